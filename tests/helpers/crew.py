"""Ranks that stay and run one cell after the other; a cell that hangs or dies costs only itself."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.cells import LIKE_DDP, TIMEOUT_S, Case, Cases, Outcome, Outcomes, User, observe
from tests.helpers.spawn import RankError, context, end_rank, free_port

GRACE_S = 12.0
"""How long ranks have to end once one of them has failed; longer than any of their waits."""


class Crew:
    """The ranks of one world size; they start with the first cell and after each failure.

    Args:
        module: Name of the module with the cases.
        world_size: Number of ranks.
        folder: For logs and for what cases write.
    """

    def __init__(self, module: str, world_size: int, folder: Path) -> None:
        self.module, self.world_size, self.folder = module, world_size, folder
        self.ranks: list[tuple[Any, Connection, Path]] = []

    def run(self, case: Case, stage: int | None) -> list[Outcome]:
        """Outcomes of all ranks, in order."""
        if case.timeout_s is not None:
            self.end()
        if not self.ranks:
            self._start(case.timeout_s or TIMEOUT_S)
        place = Path(tempfile.mkdtemp(prefix=f"{case.id}-{stage}-", dir=self.folder))
        for _, pipe, _ in self.ranks:
            pipe.send((case.id, stage, str(place)))
        outcomes = self._collect(case.limit_s)
        if case.timeout_s is not None or any(
            isinstance(outcome, RankError) for outcome in outcomes
        ):
            self.end()  # they may be at different calls of their group
        return outcomes

    def _collect(self, limit_s: float) -> list[Outcome]:
        deadline = time.monotonic() + limit_s
        found: dict[int, Outcome] = {}
        pipes = {pipe: rank for rank, (_, pipe, _) in enumerate(self.ranks)}
        while len(found) < self.world_size and (left_s := deadline - time.monotonic()) > 0:
            for pipe in wait([p for p, rank in pipes.items() if rank not in found], left_s):
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                try:
                    found[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    found[rank] = self._silent(rank, "died without a word")
                if isinstance(found[rank], RankError):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in range(self.world_size):
            if rank not in found:
                time.sleep(1.0 if rank == 0 else 0.0)  # for the stacks that ranks write by then
                found[rank] = self._silent(rank, f"was still waiting after {limit_s} s")
        return [found[rank] for rank in range(self.world_size)]

    def _silent(self, rank: int, what: str) -> RankError:
        return RankError("Silent", what, f"{what}\n{self.ranks[rank][2].read_text()[-6000:]}")

    def _start(self, timeout_s: float) -> None:
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            log = self.folder / f"{self.world_size}-{rank}-{port}.log"
            process = context.Process(
                target=_serve,
                args=(self.module, theirs, rank, self.world_size, port, timeout_s, log),
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours, log))

    def end(self) -> None:
        """End all ranks."""
        for process, pipe, _ in self.ranks:
            end_rank(process)
            pipe.close()
        self.ranks = []


def run_cells(
    module: str, cases: Cases, cells: Iterable[tuple[str, int]], folder: Path
) -> Outcomes:
    """Run cells, and DDP where cases ask for it."""
    wanted: dict[int, list[tuple[Case, int | None]]] = {}
    for name, stage in cells:
        case = cases.by_id[name]
        row = wanted.setdefault(case.ranks, [])
        if case.expected == LIKE_DDP and case.error is None and (case, None) not in row:
            row.append((case, None))
        row.append((case, stage))
    found: dict[tuple[str, int | None], list[Outcome]] = {}
    for world_size, row in wanted.items():
        crew = Crew(module, world_size, folder)
        try:
            for case, stage in row:
                found[case.id, stage] = crew.run(case, stage)
        finally:
            crew.end()
    return Outcomes(cases, found)


def _serve(
    module: str,
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    path: Path,
) -> None:
    os.setsid()
    log = open(path, "w", buffering=1)  # noqa: SIM115  (until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    torch.set_num_threads(1)
    cases: Cases = importlib.import_module(module).CASES
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    place |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(place)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    while True:
        try:
            name, stage, folder = pipe.recv()
        except EOFError:  # nobody asks any more
            os._exit(0)
        os.environ.update(place)  # Lightning removes some of it after a fit
        case = cases.by_id[name]
        log.write(f"--- {name}, stage {stage}\n")
        faulthandler.dump_traceback_later(case.limit_s, file=log)
        outcome: Outcome
        try:
            outcome = observe(case, User(case, stage, rank, Path(folder)))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes, too
            outcome = RankError(type(error).__name__, str(error), traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(outcome))
