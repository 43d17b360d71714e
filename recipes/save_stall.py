"""How long training stops for a checkpoint, and how much memory a checkpoint takes.

python recipes/save_stall.py                      DDP and ZeRO stages, both forms of checkpoints
python recipes/save_stall.py --layers 8 --width 512 --saves 6

Every strategy trains the same GPT in processes of its own, once without and with saves. What is
measured: the time in ``trainer.save_checkpoint`` (training stops), the longest step without one,
and by how much the memory of a rank grows while it saves (private memory, without files it maps).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from gpt import GPT, VOCABULARY

CONTEXT, BATCH, STEPS_BETWEEN = 64, 2, 6
CASES = ("ddp", "zero1", "zero2", "zero3", "zero1:sharded", "zero2:sharded", "zero3:sharded")
MIB = 2**20


class PeakMemory:
    """Watches the private memory of this process from a thread."""

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.peak_nbytes = max(self.peak_nbytes, private_nbytes())

    def reset(self) -> None:
        self.peak_nbytes = private_nbytes()

    def close(self) -> None:
        self._is_over.set()


def private_nbytes() -> int:
    """Resident memory that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class Saving(L.LightningModule):
    """Trains, saves every few steps, and notes how long each step and each save takes."""

    def __init__(self, layers: int, width: int, saves: int, folder: Path) -> None:
        super().__init__()
        self.gpt = GPT(dim=width, depth=layers, heads=4, context=CONTEXT)
        self.saves, self.folder = saves, folder
        self.steps_s: list[float] = []
        self.saves_s: list[float] = []
        self.grown_nbytes: list[int] = []
        self._memory = PeakMemory()
        self._begin_s = 0.0
        self._rest_nbytes = 0

    def train_dataloader(self) -> Any:
        steps = STEPS_BETWEEN * (self.saves + 1)
        data = torch.randint(VOCABULARY, (steps, BATCH, CONTEXT + 1))
        return DataLoader(data, batch_size=None)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        logits = self.gpt(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self._begin_s = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.steps_s.append(time.perf_counter() - self._begin_s)
        if (index + 1) % STEPS_BETWEEN == STEPS_BETWEEN // 2 and len(self.saves_s) < self.saves:
            self._note_growth()
            self.trainer.strategy.barrier()
            self._rest_nbytes = private_nbytes()
            self._memory.reset()
            begin_s = time.perf_counter()
            self.trainer.save_checkpoint(self.folder / "last.ckpt")
            self.saves_s.append(time.perf_counter() - begin_s)

    def _note_growth(self) -> None:
        if self.saves_s:
            self.grown_nbytes.append(self._memory.peak_nbytes - self._rest_nbytes)

    def on_train_end(self) -> None:
        self._note_growth()
        self._memory.close()


def run_case(case: str, layers: int, width: int, saves: int, folder: Path) -> None:
    """Train in this process and one that Lightning starts; leave the figures in files."""
    kind, _, form = case.partition(":")
    strategy: Any = "ddp"
    if kind != "ddp":
        from lightning_zero import ZeroStrategy

        strategy = ZeroStrategy(int(kind[-1]), checkpoint=form or "consolidated")
    torch.set_num_threads(1)
    L.seed_everything(0)
    module = Saving(layers, width, saves, folder)
    numel = sum(parameter.numel() for parameter in module.parameters())
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    begin_s = time.perf_counter()
    trainer.fit(module)
    figures = {
        "numel": numel,
        "fit_s": time.perf_counter() - begin_s,
        "saves_s": module.saves_s,
        "steps_s": module.steps_s,
        "grown_nbytes": module.grown_nbytes,
    }
    (folder / f"figures{trainer.global_rank}.json").write_text(json.dumps(figures))


def measure(case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of all ranks of one case."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--case", case, "--folder", folder]
        words += ["--layers", str(arguments.layers), "--width", str(arguments.width)]
        words += ["--saves", str(arguments.saves)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, env=environment, check=False, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{case}: {done.stderr[-3000:]}")
        files = sorted(Path(folder).glob("figures*.json"))
        return [json.loads(file.read_text()) for file in files]


def main() -> None:
    """Measure every case, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(
            arguments.case, arguments.layers, arguments.width, arguments.saves, arguments.folder
        )
        return
    found: dict[str, list[list[dict[str, Any]]]] = {case: [] for case in arguments.cases}
    for _ in range(arguments.rounds):  # interleaved: the machine may be busy at times
        for case in arguments.cases:
            found[case].append(measure(case, arguments))
    first = arguments.cases[0]
    numel = found[first][0][0]["numel"]
    table = Table(title=f"{numel / 1e6:.1f} M parameters, Adam, fp32, 2 ranks")
    for heading in (
        *("strategy", "training stops ms", f"x {first}", "median step ms"),
        *("rank 0 grows MiB", "rank 1 grows MiB"),
    ):
        table.add_column(heading, justify="right")
    stops = {
        case: median(s for ranks in rounds for s in ranks[0]["saves_s"][1:])
        for case, rounds in found.items()
    }
    for case, rounds in found.items():
        step_s = median(s for ranks in rounds for s in ranks[0]["steps_s"][2:])
        grown = [max(max(ranks[r]["grown_nbytes"]) for ranks in rounds) for r in (0, 1)]
        table.add_row(
            case,
            f"{stops[case] * 1e3:.0f}",
            f"{stops[case] / stops[first]:.2f}",
            f"{step_s * 1e3:.0f}",
            *(f"{nbytes / MIB:.0f}" for nbytes in grown),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
