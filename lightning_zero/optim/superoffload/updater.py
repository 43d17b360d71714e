"""Confirms what was stepped during backward, or has it made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.comm import Collectives
from lightning_zero.comm.agreed import failing_together
from lightning_zero.optim.apart import ApartSteps
from lightning_zero.optim.bucket_steps import Group, grouped, step_in_place
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.superoffload.master import SuperMaster
from lightning_zero.optim.superoffload.speculation import HostSteps, Speculation
from lightning_zero.optim.updaters import TOLD, Updater, Used


def check_super_offload(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers whose steps cannot be made ahead.

    Raises:
        ValueError: There is one.
    """
    for optimizer in optimizers:
        kind, groups = type(optimizer), optimizer.param_groups
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            raise ValueError(
                f"super_offload steps by Adam ahead and takes that back where it was wrong, and"
                f" cannot do so for {kind.__name__}: use torch.optim.Adam or AdamW, or remove"
                " super_offload"
            )
        if any(group["amsgrad"] for group in groups):
            raise ValueError(
                f"super_offload does not know {kind.__name__}(amsgrad=True): remove one of the two"
            )
        if any(p.dtype.itemsize > 4 for group in groups for p in group["params"]):
            raise ValueError(
                f"super_offload steps in fp32, and {kind.__name__} has parameters of fp64: train"
                " in fp32, or remove super_offload"
            )


class SuperOffloadUpdater(Updater):
    """Steps ahead, see [Note: speculation] in ``__init__.py``.

    Args:
        table: This rank's pieces.
        steps: This rank's worker.
        control: Group over which ranks tell each other whether their workers have failed.
    """

    def __init__(self, table: PieceTable, steps: HostSteps, control: Collectives) -> None:
        super().__init__(table)
        self._steps = steps
        self._control = control

    @property
    def counts(self) -> Speculation:
        """What came of this rank's steps."""
        return self._steps.counts

    def accumulating(self) -> AbstractContextManager[None]:
        """See the base class."""
        return self._steps.accumulating()

    def bring_together(self, optimizer: Optimizer) -> None:
        """See the base class."""
        with failing_together(self._control, "step in a worker", TOLD):
            super().bring_together(optimizer)

    @contextmanager
    def _stepping(
        self, optimizer: Optimizer, masters: Sequence[MasterShard], used: Used
    ) -> Iterator[None]:
        check_super_offload([optimizer])  # one may come later than training has begun
        step = _Step(optimizer, self._table, masters, used, self._steps)
        handle = optimizer.register_step_pre_hook(step.run)
        has_hooks = _compat.has_step_hooks(optimizer, besides=1)
        if has_hooks:  # the user's see what there is, and may write to it
            step.take_back()
        try:
            with self._table.swapped(optimizer, used if has_hooks else used - step.hidden()):
                yield
        finally:
            handle.remove()
        step.finish()
        with failing_together(self._control, "step in a worker", TOLD):
            self._steps.raise_kept()
        step.show()


class _Step:
    """One step of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        table: PieceTable,
        masters: Sequence[MasterShard],
        used: Used,
        steps: HostSteps,
    ) -> None:
        self._masters = masters
        self._steps = steps
        self._versions = {master: master.tensor._version for master in masters}
        """Of masters, when they were last in line with their shards."""
        self._has_run = False
        self._ahead: dict[SuperMaster, list[Group]] = {}
        self._others: dict[MasterShard, list[Group]] = {}
        """What is stepped on the device."""
        for master, groups in grouped(optimizer, table, used).items():
            if isinstance(master, SuperMaster):
                self._ahead[master] = groups
            else:
                self._others[master] = groups

    def hidden(self) -> Used:
        """Parameters whose gradients need not be made for the optimizer to see."""
        return frozenset(
            piece.parameter
            for master, groups in self._ahead.items()
            if not master.has_made_grad
            for group in groups
            for piece in group.pieces
        )

    def take_back(self) -> None:
        """Be as if nothing had been stepped ahead."""
        for master in self._masters:
            if isinstance(master, SuperMaster):
                master.take_back()

    @torch.no_grad()
    def run(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        """Hook before the optimizer's own step, which has nothing left to do after it."""
        found_inf = getattr(optimizer, "found_inf", None)  # of a loss scaler: the step is left out
        if found_inf is None or not bool(found_inf):
            self._has_run = True
            self._steps.guarded(partial(self._step, optimizer))
        for groups in (*self._ahead.values(), *self._others.values()):
            for group in groups:
                for piece in group.pieces:
                    piece.tensor.grad = None

    def _step(self, optimizer: Optimizer) -> None:
        for master, groups in self._ahead.items():
            master.begin_step(optimizer, groups)
        apart = ApartSteps(optimizer)
        for other, groups in self._others.items():  # while the worker steps
            step_in_place(optimizer, apart, other, groups)
            self._versions[other] = other.tensor._version
        for master, groups in self._ahead.items():
            master.finish_step(optimizer, groups)

    def finish(self) -> None:
        """A step that was left out is as if nothing had been stepped ahead."""
        if not self._has_run:
            self.take_back()

    def show(self) -> None:
        """Bring new values to the parameters' shards, and what hooks have written."""
        for master, version in self._versions.items():
            if master.tensor._version == version:
                continue
            master.settle()
            if isinstance(master, SuperMaster):
                master.show()
            else:
                master.store()
