"""How long a step waits for the host: plain offload, ZenFlow and SuperOffload side by side.

python recipes/offload_stall.py                       a GPT of 19 M parameters, 12 rounds
python recipes/offload_stall.py --width 768 --batch 8 --rounds 6

One rank, one thread, on the first core that it may run on; the worker of those that have one runs
on the others. Each variant trains the same GPT in a process of its own, and all take turns, four
steps at a time, so that what else the machine does meets all of them. The *stall* is the time of a
step beyond that of forward and backward alone, which is measured as a variant that never steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from gpt import GPT, VOCABULARY
from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.worker.binding import BoundThreads

CONTEXT, STEPS = 64, 4
"""Bytes of a window of text, and steps of a turn: one window of ZenFlow."""
WARM_UP = 3
"""Turns before the first that counts."""
ZENFLOW = {"topk_ratio": 0.05, "update_interval": STEPS, "select_strategy": "step"}
COMPUTE, PLAIN = "compute only", "plain offload"
VARIANTS: dict[str, dict[str, Any]] = {
    COMPUTE: {},
    PLAIN: {"offload_optimizer": "cpu"},
    "ZenFlow, in turn": {"offload_optimizer": "cpu", "zenflow": ZENFLOW},
    "ZenFlow, in a worker": {
        "offload_optimizer": "cpu",
        "zenflow": {**ZENFLOW, "overlap_step": True},
    },
    "SuperOffload": {"offload_optimizer": {"super_offload": True}},
}


class Training:
    """One variant under way.

    Args:
        name: The variant.
        width: Width of the model.
        layers: Blocks of the model.
        batch: Windows of a batch.
    """

    def __init__(self, name: str, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        self._model = GPT(dim=width, depth=layers, heads=8, context=CONTEXT)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1))
        options = ZeroOptions(stage=2, **VARIANTS[name])
        self._steps = name != COMPUTE
        self.engine = ZeroEngine(self._model, [self._optimizer], options, ShardGroups.create())
        # The engine has done it where there is a worker.
        self._bound = BoundThreads([min(os.sched_getaffinity(0))])

    def turn(self) -> float:
        """Seconds of a step."""
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            logits = self._model(self._tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
            self.engine.backward(loss)
            if self._steps:
                self.engine.step(self._optimizer)
            self._optimizer.zero_grad()
        return (time.perf_counter() - begin_s) / STEPS

    @property
    def note(self) -> str:
        """What came of steps that were made ahead."""
        counts = getattr(self.engine.updater, "counts", None)
        return "" if counts is None else f"{counts.confirmed} confirmed, {counts.undone} undone"


def serve(pipe: Connection, name: str, width: int, layers: int, batch: int) -> None:
    """Take a turn whenever it is asked for."""
    training = Training(name, width, layers, batch)
    pipe.send(sum(p.numel() for p in training.engine.names))
    while pipe.recv():
        pipe.send(training.turn())
    pipe.send(training.note)
    training.engine.close()


def measure(args: argparse.Namespace) -> tuple[int, dict[str, list[float]], dict[str, str]]:
    """Parameters of the model, seconds of a step in each round, and notes."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in VARIANTS:
        pipes[name], theirs = context.Pipe()
        how = theirs, name, args.width, args.layers, args.batch
        processes.append(context.Process(target=serve, args=how))
        processes[-1].start()
    numel = [pipe.recv() for pipe in pipes.values()][0]
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(WARM_UP + args.rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds = pipe.recv()
            if number >= WARM_UP:
                found[name].append(seconds)
    for pipe in pipes.values():
        pipe.send(False)
    notes = {name: pipe.recv() for name, pipe in pipes.items()}
    for process in processes:
        process.join()
    return numel, found, notes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    numel, found, notes = measure(args)
    table = Table("variant", "step ms", "stall ms", "range of the stall", "of plain's removed", "")
    stalls = {
        name: [(own - bare) * 1e3 for own, bare in zip(seconds, found[COMPUTE], strict=True)]
        for name, seconds in found.items()
    }
    for name, stall in stalls.items():
        removed = 1 - median(stall) / median(stalls[PLAIN])
        table.add_row(
            name,
            f"{median(found[name]) * 1e3:.1f}",
            f"{median(stall):.1f}",
            f"{min(stall):.1f} to {max(stall):.1f}",
            "" if name in (COMPUTE, PLAIN) else f"{removed:.0%}",
            notes[name],
        )
    console = Console(width=120)
    console.print(f"{numel / 1e6:.1f} M parameters, medians of {args.rounds} rounds")
    console.print(table)
    console.print(
        f"load of the machine: {os.getloadavg()}, cores {sorted(os.sched_getaffinity(0))}"
    )


if __name__ == "__main__":
    main()
