"""Starts a rank's worker, with cores of its own."""

from __future__ import annotations

import os
import socket
import warnings

from lightning_zero.comm import Collectives
from lightning_zero.plan.cores import share_cores
from lightning_zero.worker import HostWorker
from lightning_zero.worker.binding import BoundThreads


class BesideWorker:
    """A worker, and this process kept off its cores while there is one.

    To be made on all ranks together.

    Args:
        name: What it is for, to be named in errors.
        worker_share: Share of the rank's cores that it gets.
        pin_memory: Page-lock its memory.
        control: Group of the ranks, which share the cores of their hosts.
    """

    def __init__(
        self, name: str, worker_share: float, pin_memory: bool, control: Collectives
    ) -> None:
        mine = socket.gethostname(), sorted(os.sched_getaffinity(0))
        every = control.exchange_objects(mine, "share the cores of their hosts")
        here = [rank for rank, (host, _) in enumerate(every) if host == mine[0]]
        shares = share_cores([every[rank][1] for rank in here], worker_share)
        own = shares[here.index(control.rank)]
        if own.is_contested and control.rank == here[0]:
            warnings.warn(
                f"{name} steps in a worker beside each rank, but host {mine[0]!r} has fewer than"
                f" two cores for each of its {len(here)} rank(s) ({mine[1]} for this one): they"
                " take turns, and little is gained. Give each rank two cores or more.",
                stacklevel=2,
            )
        self.worker = HostWorker(name, own.worker, pin_memory)
        """The worker."""
        self._bound = None if own.is_contested else BoundThreads(own.trainer)

    def close(self) -> None:
        """End the worker, and use its cores again."""
        self.worker.close()
        if self._bound is not None:
            self._bound.release()
