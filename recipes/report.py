"""What a training reports: speed, bits per byte, memory and traffic, as metrics and tables."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torchmetrics import Metric

from lightning_zero.plan.memory import ModelStateBytes, model_state_nbytes

RECORD_NAME = "record.json"
PROMPT = b"def "
MIB = 2**20


class BitsPerByte(Metric):
    """Cross entropy of held-out text in bits per byte, over all ranks."""

    nats: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, mean_nats: Tensor, count: int) -> None:
        """Add a batch.

        Args:
            mean_nats: Mean cross entropy of the batch, 0-dim, in nats per byte.
            count: Bytes that the mean was taken over.
        """
        self.nats += mean_nats * count
        self.count += count

    def compute(self) -> Tensor:
        """Return the mean over everything added, 0-dim, in bits per byte."""
        return self.nats / self.count / math.log(2)


@dataclasses.dataclass(kw_only=True)
class Record:
    """Result of one training, as it is written for the comparison."""

    overrides: list[str]
    """Hydra overrides of the job."""

    stage: int
    """ZeRO stage."""

    world_size: int
    """Ranks."""

    loss: float
    """Last training loss of rank 0, in nats per byte."""

    bits_per_byte: float
    """Last validation, in bits per byte; NaN without one."""

    step_s: float
    """Median time of an optimizer step, in seconds."""

    rank_nbytes: int
    """Model states of the fullest rank, measured, in bytes."""

    sent_nbytes_per_step: float
    """Bytes that rank 0 sent per optimizer step, the first one left out."""

    checkpoint: str
    """Path of the last checkpoint, empty without one."""


class Report(L.Callback):
    """Measures while training, and reports when it ends.

    Args:
        folder: Where the record goes.
        overrides: Hydra overrides of this job.
        sample_bytes: Length of the generated text, in bytes.
    """

    def __init__(self, folder: Path, overrides: list[str], sample_bytes: int) -> None:
        self._folder, self._overrides, self._sample_bytes = folder, overrides, sample_bytes
        self._steps: list[tuple[float, int]] = []  # seconds, sent bytes of each optimizer step
        self._open_s, self._open_sent_nbytes, self._open_tokens = 0.0, 0, 0
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember where the count of steps starts (not at 0 after a resume)."""
        self._last_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        """Start the clock."""
        self._start_s, self._start_sent_nbytes = time.perf_counter(), trainer.strategy.sent_nbytes

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Tensor,
        batch_idx: int,
    ) -> None:
        """Stop the clock; a step ends with the last of its accumulated batches."""
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize()
        self._open_s += time.perf_counter() - self._start_s
        self._open_sent_nbytes += trainer.strategy.sent_nbytes - self._start_sent_nbytes
        self._open_tokens += batch[:, 1:].numel() * trainer.world_size
        if trainer.global_step > self._last_step:
            self._last_step = trainer.global_step
            pl_module.log("tokens/s", self._open_tokens / self._open_s, prog_bar=True)
            self._steps.append((self._open_s, self._open_sent_nbytes))
            self._open_s, self._open_sent_nbytes, self._open_tokens = 0.0, 0, 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure and generate text, on all ranks: stage 3 gathers for it."""
        strategy = trainer.strategy
        measured = everywhere(strategy.measure_model_states())
        own = torch.tensor(list(measured.values()), device=strategy.root_device)
        fullest = strategy.reduce(own, reduce_op="max")
        measured = dict(zip(measured, fullest.tolist(), strict=True))
        pl_module.eval()
        with trainer.precision_plugin.forward_context():
            text = pl_module.gpt.generate(PROMPT, self._sample_bytes)
        steady = self._steps[1:] or self._steps
        curve = pl_module.validation_curve
        record = Record(
            overrides=self._overrides,
            stage=strategy.options.stage,
            world_size=trainer.world_size,
            loss=float(trainer.callback_metrics["loss"]),
            bits_per_byte=curve[-1][1] if curve else math.nan,
            step_s=statistics.median(seconds for seconds, _ in steady),
            rank_nbytes=sum(measured.values()),
            sent_nbytes_per_step=statistics.mean(sent for _, sent in steady),
            checkpoint=str(trainer.checkpoint_callback.best_model_path),
        )
        numel = sum(parameter.numel() for parameter in pl_module.parameters())
        is_low_precision = str(trainer.precision) in ("bf16-true", "16-true")
        plan = strategy.options.offload
        offload = "params" if plan.parameters else "cpu" if plan.optimizer else None
        formula = model_state_nbytes(
            numel, record.stage, record.world_size, is_low_precision, offload
        )
        self._record = record
        self._output = (
            Rule("generated text"),
            Text(text.decode("utf-8", errors="replace")),
            Rule(),
            memory_table(measured, everywhere(formula), record, numel),
            "validation bits/byte: " + " -> ".join(f"{v:.2f} (step {s})" for s, v in curve),
        )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print and write the record on rank 0: the progress bar is gone by now."""
        if not trainer.is_global_zero:
            return
        (self._folder / RECORD_NAME).write_text(
            json.dumps(dataclasses.asdict(self._record), indent=2)
        )
        console = Console()
        for part in self._output:
            console.print(part)
        console.print(f"checkpoint: {self._record.checkpoint}", soft_wrap=True, highlight=False)


def everywhere(states: ModelStateBytes) -> dict[str, int]:
    """Bytes by kind, on the device and in host memory together."""
    kinds = ("parameters_nbytes", "gradients_nbytes", "optimizer_nbytes")
    places = [place for place in (states, states.host) if place is not None]
    return {kind: sum(getattr(place, kind) for place in places) for kind in kinds}


def memory_table(
    measured: dict[str, int], formula: dict[str, int], record: Record, numel: int
) -> Table:
    """Show the model states of a rank against the formula.

    Args:
        measured: Bytes of the fullest rank, by kind (``parameters_nbytes``, ...).
        formula: The same by the formula.
        record: Result of the training.
        numel: Parameters of the model.

    Returns:
        The table.
    """
    ranks = f"stage {record.stage}, {record.world_size} ranks"
    table = Table(f"{numel:,} parameters", title=f"Model states per rank: {ranks}")
    for column in ("measured MiB", "formula MiB", "ratio"):
        table.add_column(column, justify="right")
    rows = [(kind.removesuffix("_nbytes"), measured[kind], formula[kind]) for kind in formula]
    rows.append(("total", sum(measured.values()), sum(formula.values())))
    for kind, have, want in rows:
        ratio = f"{have / want:.3f}" if want else "-"
        table.add_row(kind, f"{have / MIB:.2f}", f"{want / MIB:.2f}", ratio)
    return table
