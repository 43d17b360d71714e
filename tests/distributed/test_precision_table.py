"""Which dtype everything has, for each precision flag and stage; the README's table.

``make precision-table`` writes the table into the README.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_grad
from tests.helpers import readme
from tests.helpers.models import trainer
from tests.helpers.spawn import run_ranks

NAME = "precision table"
STAGES = (0, 1, 2, 3)
WIDTH = 8
SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
}
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # label, flag, options of ZeroStrategy
    ("`32-true`", "32-true", {}),
    ("`64-true`", "64-true", {}),
    ("`bf16-mixed`", "bf16-mixed", {}),
    ("`16-mixed`", "16-mixed", {}),
    ("`bf16-true`", "bf16-true", {}),
    ("`16-true`", "16-true", {}),
    ("`bf16-true`, `master_weights=False`", "bf16-true", {"master_weights": False}),
    ('`bf16-true`, `reduce_dtype="float32"`', "bf16-true", {"reduce_dtype": "float32"}),
    ("`bf16-true`, `keep_fp32=[nn.LayerNorm]`", "bf16-true", {"keep_fp32": [nn.LayerNorm]}),
)


class Dtypes(NamedTuple):
    """A row: names of dtypes, several where tensors differ."""

    inputs: str = "-"
    computed: str = "-"
    parameters: str = "-"
    gradients: str = "-"
    reduced: str = "-"
    full_gradients: str = "-"
    stepped: str = "-"
    states: str = "-"
    float_buffers: str = "-"
    int_buffers: str = "-"


HEAD = Dtypes(
    "inputs",
    "linear layers return",
    "parameters",
    "`param.grad`",
    "gradients travel in",
    "`full_grad`",
    "the optimizer steps",
    "its state",
    "float buffers",
    "integer buffers",
)


def names(dtypes: Iterable[torch.dtype]) -> str:
    """One name where all are equal."""
    return " + ".join(sorted({SHORT[dtype] for dtype in dtypes})) or "-"


def of(tensors: Iterable[Tensor]) -> str:
    return names(tensor.dtype for tensor in tensors)


class Net(nn.Module):
    """With buffers: one that is computed with, and one of integers. A norm in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x + self.shift)))


class Measured(pl.LightningModule):
    """Notes the dtypes of its only step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.found: dict[str, str] = {}
        self.sent_nbytes = 0
        self.reduced: set[torch.dtype] = set()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(1, 2, WIDTH), batch_size=None)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out = self.net(batch)
        self.found |= {"inputs": of([batch]), "computed": of([out])}
        return out.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        if isinstance(self.trainer.strategy.model, DistributedDataParallel):
            self.trainer.strategy.model.register_comm_hook(self.reduced, note_bucket)
        self.found["parameters"] = of(self.parameters())
        buffers = list(self.buffers())
        self.found["float_buffers"] = of(b for b in buffers if b.is_floating_point())
        self.found["int_buffers"] = of(b for b in buffers if not b.is_floating_point())

    def on_before_backward(self, loss: Tensor) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)
        self.sent_nbytes = 0 if engine is None else engine.groups.gradients.sent_nbytes

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(self.parameters())
        self.found["gradients"] = of(p.grad for p in parameters if p.grad is not None)
        engine = getattr(self.trainer.strategy, "engine", None)
        self.found["full_gradients"] = of(full_grad(p) for p in parameters)
        self.found["stepped"] = of(parameters)
        if engine is not None:
            nbytes = engine.groups.gradients.sent_nbytes - self.sent_nbytes
            self.reduced = sent_dtypes(engine, nbytes)
            self.found["stepped"] = of(master.tensor for master in engine.table.masters)

    def on_train_end(self) -> None:
        state = self.optimizers(use_pl_optimizer=False).state.values()
        self.found["states"] = of(each["exp_avg"] for each in state)
        self.found["reduced"] = names(self.reduced)


def sent_dtypes(engine: Any, nbytes: int) -> set[torch.dtype]:
    """Dtypes in which gradients have travelled, if that is what the bytes say."""
    buckets = [master.gradients for master in engine.table.masters]
    shares = 1 if engine.options.stage == 0 else engine.groups.world_size
    expected = sum(b.layout.padded_numel // shares * b.wire_dtype.itemsize for b in buckets)
    assert nbytes == expected * (engine.groups.world_size - 1)
    return {bucket.wire_dtype for bucket in buckets}


def note_bucket(found, bucket):  # DDP refuses annotations that are strings
    """A communication hook of DDP: what is sent without one, noted."""
    found.add(bucket.buffer().dtype)
    return allreduce_hook(None, bucket)


def measure_one(strategy: Any, flag: str, device: str, devices: int) -> Dtypes:
    options: dict[str, Any] = {"precision": flag}
    if (flag, device) == ("16-mixed", "cpu"):  # the flag alone means bf16-mixed there
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        options = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
    module = Measured()
    trainer(strategy, devices, **options | {"accelerator": device}).fit(module)
    return Dtypes(**module.found)


def measure_all(device: str, devices: int) -> dict[tuple[str, int | None], Dtypes]:
    """Of each run, DDP (None, without our options) and all stages."""
    found = {}
    for label, flag, options in RUNS:
        if not options:
            found[label, None] = measure_one(DDPStrategy(), flag, device, devices)
        for stage in STAGES:
            strategy = ZeroStrategy(stage, **options)
            found[label, stage] = measure_one(strategy, flag, device, devices)
    return found


def table(found: dict[tuple[str, int | None], Dtypes]) -> str:
    """Markdown; rows of DDP and the stages are one where they are equal."""
    lines = [f"| flag | | {' | '.join(HEAD)} |", "|---" * (2 + len(HEAD)) + "|"]
    for label, _, _ in RUNS:
        rows: dict[Dtypes, list[str]] = {}
        for (run, stage), dtypes in found.items():
            if run == label:
                rows.setdefault(dtypes, []).append("DDP" if stage is None else str(stage))
        for number, (dtypes, who) in enumerate(rows.items()):
            first = label if number == 0 else ""
            lines.append(f"| {first} | {who_are(who)} | {' | '.join(dtypes)} |")
    return "\n".join(lines) + "\n"


def who_are(who: list[str]) -> str:
    stages = [name for name in who if name != "DDP"]
    if not stages:
        return "DDP"
    text = f"stages {stages[0]} to {stages[-1]}" if len(stages) > 1 else f"stage {stages[0]}"
    return f"DDP, {text}" if "DDP" in who else text


@pytest.fixture(scope="module")
def found():
    first, second = run_ranks(measure_all, 2, "cpu", 2)
    assert first == second
    return first


def test_the_table_in_the_readme_is_the_one_measured(found):
    assert readme.written(NAME) == table(found), "run `make precision-table` if this is as it is"


def test_all_that_ddp_has_is_as_under_ddp(found):
    """But for what the optimizer steps: fp32 masters of 16-bit parameters."""
    assert len(found) == 6 * 5 + 3 * 4
    for (label, stage), dtypes in found.items():
        ddp = found.get((label, None))
        if ddp is not None and stage is not None:
            ours = dtypes
            if label in ("`bf16-true`", "`16-true`"):
                masters = "full_gradients", "stepped", "states"
                assert {getattr(ours, field) for field in masters} == {"fp32"}
                ours = ours._replace(**{field: getattr(ddp, field) for field in masters})
            assert ours == ddp


def measured_table() -> str:
    """What the README is to say."""
    return table(run_ranks(measure_all, 2, "cpu", 2)[0])


if __name__ == "__main__":
    readme.main(NAME, measured_table)
