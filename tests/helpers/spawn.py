"""Real ranks for tests: fresh processes, a free port, a time limit, and nothing left behind."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.limits import HANG_S

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["lightning.pytorch", "lightning_zero"])


@dataclass
class RankError:
    """What a rank raised."""

    kind: str
    message: str
    trace: str


class RanksFailed(AssertionError):
    """At least one rank raised, died or was still waiting at the limit."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S
) -> list[Any]:
    """Call ``function(*args)`` on fresh ranks and return what each of them returned."""
    outcomes = try_ranks(function, world_size, *args, timeout_s=timeout_s)
    if any(isinstance(outcome, RankError) for outcome in outcomes):
        texts = [
            f"--- rank {rank}: {outcome.trace}"
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, RankError)
        ]
        raise RanksFailed("\n".join(texts))
    return outcomes


def try_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S
) -> list[Any]:
    """As :func:`run_ranks`, but a rank that raised yields its :class:`RankError`."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        processes = [
            context.Process(
                target=_rank_main, args=(function, args, rank, world_size, port, folder, timeout_s)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            end_rank(process)
        outcomes = [read_outcome(Path(folder) / f"{rank}.pickle") for rank in range(world_size)]
        if waiting:
            logs = "\n".join(
                f"--- rank {rank}\n" + (Path(folder) / f"{rank}.log").read_text()[-6000:]
                for rank in waiting
            )
            raise RanksFailed(f"ranks {waiting} still waiting after {timeout_s} s\n{logs}")
        for rank, outcome in enumerate(outcomes):
            if outcome is None:
                log = (Path(folder) / f"{rank}.log").read_text()[-6000:]
                raise RanksFailed(f"rank {rank} died without a word\n{log}")
        return [outcome[0] for outcome in outcomes if outcome is not None]


_ports = random.Random(f"{os.getpid()} {time.time_ns()}")  # tests of two processes draw at once


def free_port() -> int:
    """A port that nobody listens on now, from below those that connections are given."""
    while True:
        port = _ports.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    timeout_s: float,
) -> None:
    os.setsid()
    log = open(f"{folder}/{rank}.log", "w", buffering=1)  # noqa: SIM115  (until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 2.0), file=log)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        NODE_RANK="0",
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    torch.set_num_threads(1)
    try:
        outcome = function(*args)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes, too
        outcome = RankError(type(error).__name__, str(error), traceback.format_exc())
    part = Path(folder) / f"{rank}.part"
    part.write_bytes(pickle.dumps((outcome,)))
    part.rename(Path(folder) / f"{rank}.pickle")
    faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized() and not isinstance(outcome, RankError):
        # A rank that goes first would look like a failure to one that is still busy.
        while len(list(Path(folder).glob("*.pickle"))) < world_size:
            time.sleep(0.01)


def read_outcome(path: Path) -> tuple[Any] | None:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def end_rank(process: Any) -> None:
    """End a rank and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        if process.is_alive():
            process.kill()
    process.join(5)
