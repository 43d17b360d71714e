"""A training whose steps depend on the global batch alone, and all that a checkpoint is to restore.

Whoever wrote a checkpoint of it, and whoever reads it, on any numbers of ranks: it goes on with the
same batches.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)

from lightning_zero import ZeroStrategy
from tests.helpers.models import difference, trainer, weights

GLOBAL_BATCH, BATCHES, EPOCHS = 12, 3, 3
SAVED_AFTER, STEPS = 4, BATCHES * EPOCHS
"""Steps before the checkpoint, in the middle of the second epoch, and in all."""
MOST_GAP = 1e-6


class Rows:
    """This rank's part of each global batch; goes on after the one that was handed out last."""

    def __init__(self, rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        pool = torch.randn(BATCHES, GLOBAL_BATCH, 4, generator=generator)
        self.rows = [batch.chunk(world_size)[rank] for batch in pool]
        self.done = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.done % BATCHES, BATCHES):
            self.done = index + 1
            yield self.rows[index]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.done = state["done"]


class Pooled(pl.LightningModule):
    """Two groups, a frozen layer, a buffer, a schedule by steps."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.net = nn.Sequential(
                nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
            )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, CpuFSDP):
            self.net = FullyShardedDataParallel(
                self.net, use_orig_params=True, device_id=torch.device("cpu")
            )

    def train_dataloader(self) -> Rows:
        return Rows(self.trainer.global_rank, self.trainer.world_size)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += 1
        return (self.net(self.frozen(batch)) - 1.5).square().mean()

    def configure_optimizers(self) -> Any:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in trained if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in trained if name.endswith("bias")], "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def names_in_order() -> list[str]:
    """Names of the trained parameters in the order of the optimizer's groups."""
    module = Pooled()
    names = {parameter: name for name, parameter in module.named_parameters()}
    (optimizer,), _ = module.configure_optimizers()
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


class Counter(Callback):
    """State of a callback: a number, and a random generator's tensor."""

    def __init__(self) -> None:
        self.count, self.generator = 0, torch.Generator().manual_seed(11)
        self.drawn = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1
        self.drawn = torch.rand((), generator=self.generator).item()

    def state_dict(self) -> dict[str, Any]:
        state = self.generator.get_state()
        return {"count": self.count, "drawn": self.drawn, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.drawn = state["count"], state["drawn"]
        self.generator.set_state(state["generator"])


class Watch(Callback):
    """What the training has when it starts and when it ends; full states are those of rank 0."""

    start: dict[str, Any]
    end: dict[str, Any]
    rank: int

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.rank, self.start = trainer.global_rank, _held(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end = _held(trainer)


def _held(trainer: pl.Trainer) -> dict[str, Any]:
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    (counter,) = (each for each in trainer.callbacks if isinstance(each, Counter))
    (optimizer,) = trainer.optimizers
    return copy.deepcopy(
        {
            "weights": trainer.strategy.lightning_module_state_dict(),
            "optimizer": trainer.strategy.optimizer_state(optimizer),
            "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "rates": [group["lr"] for group in optimizer.param_groups],
            "callback": counter.state_dict(),
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batches": progress.processed,
        }
    )


class CpuFSDP(FSDPStrategy):
    """Lightning refuses its own class without a GPU, though torch's FSDP trains with gloo.

    Lightning has full states moved to the CPU. Where they are, torch takes no copy of memory that
    it frees or uses again, so here states are taken without, and each kind of moment by itself.
    """

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._full():
            state = self.model.state_dict()
        return state if self.global_rank == 0 else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        plain = getattr(optimizer, "optimizer", optimizer)
        local, full = plain.state_dict(), FullyShardedDataParallel
        merged: dict[str, Any] = {}
        for kept in ("exp_avg", "exp_avg_sq"):
            states = {
                number: {key: value for key, value in state.items() if key in (kept, "step")}
                for number, state in local["state"].items()
            }
            with self._full():
                part = full.optim_state_dict(self.model, plain, {**local, "state": states})
            part = copy.deepcopy(part)
            merged = merged or part
            for name, state in part["state"].items():
                merged["state"][name] |= state
        if self.global_rank:
            return {}
        return full.rekey_optim_state_dict(merged, OptimStateKeyType.PARAM_ID, self.model)

    def _full(self) -> Any:
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(),
            FullOptimStateDictConfig(),
        )


def strategy_of(kind: str, **options: Any) -> Any:
    """``single``, ``ddp``, ``fsdp``, or ``zero`` with a stage."""
    if kind == "single":
        return "auto"
    if kind == "ddp":
        return DDPStrategy()
    if kind == "fsdp":
        return CpuFSDP(state_dict_type="full", use_orig_params=True)  # the layers wrap themselves
    return ZeroStrategy(int(kind[-1]), bucket_numel=50, timeout=30, **options)


def world_size() -> int:
    """Ranks of this process group; Lightning deletes the variable after the first fit."""
    is_running = torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_running else int(os.environ["WORLD_SIZE"])


def fitted(
    kind: str,
    path: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
    **strategy_options: Any,
) -> tuple[Watch, Pooled]:
    """Train to the end, from the beginning or from a checkpoint."""
    watch, module = Watch(), Pooled()
    user = trainer(
        strategy_of(kind, **strategy_options),
        world_size(),
        max_epochs=EPOCHS,
        callbacks=[watch, Counter(), *callbacks],
        enable_checkpointing=bool(callbacks),
    )
    user.fit(module, ckpt_path=path)
    return watch, module


def by_name(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of an optimizer's state dict under names of parameters, whatever its keys are."""
    numbers = [n for group in optimizer_state["param_groups"] for n in group["params"]]
    names = dict(zip(numbers, names_in_order(), strict=True))
    return {
        f"{names[number]}.{key}": torch.as_tensor(value)
        for number, state in optimizer_state["state"].items()
        for key, value in state.items()
    }


def lost_in(start: Mapping[str, Any], file: Mapping[str, Any]) -> list[str]:
    """What a training that went on from a file does not have as it is in the file, bit for bit."""
    (saved_optimizer,) = file["optimizer_states"]
    (callback,) = (s for name, s in file["callbacks"].items() if name.startswith("Counter"))
    checks: dict[str, Callable[[], bool]] = {
        "weights": lambda: _same(start["weights"], file["state_dict"]),
        "moments": lambda: _same(by_name(start["optimizer"]), by_name(saved_optimizer)),
        "options": lambda: _options(start["optimizer"]) == _options(saved_optimizer),
        "scheduler": lambda: start["scheduler"] == file["lr_schedulers"][0],
        "rates": lambda: start["rates"] == [g["lr"] for g in saved_optimizer["param_groups"]],
        "callback": lambda: _same_values(start["callback"], callback),
        "global_step": lambda: start["global_step"] == file["global_step"] == SAVED_AFTER,
        "epoch": lambda: start["epoch"] == file["epoch"] == SAVED_AFTER // BATCHES,
        "batches": lambda: start["batches"] == SAVED_AFTER % BATCHES,
    }
    return [name for name, is_same in checks.items() if not is_same()]


def gap_at_end(watch: Watch, module: Pooled, expected: Mapping[str, Any]) -> float:
    """Largest difference at the end from what was to come out; infinite if steps differ.

    On rank 0 it takes in the optimizer's state.
    """
    counts = ("global_step", "epoch", "batches", "rates", "scheduler")
    if any(watch.end[name] != expected[name] for name in counts):
        return math.inf
    if not _same_values(watch.end["callback"], expected["callback"]):
        return math.inf
    gap = difference(weights(module), expected["weights"])
    if watch.rank == 0:
        states = by_name(watch.end["optimizer"]), by_name(expected["optimizer"])
        gap = max(gap, difference(*states))
    return gap


def _options(optimizer_state: Mapping[str, Any]) -> list[dict[str, Any]]:
    dropped = ("params", "param_names")
    return [
        {key: value for key, value in group.items() if key not in dropped}
        for group in optimizer_state["param_groups"]
    ]


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _same_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(*map(torch.as_tensor, (a[k], b[k]))) for k in a)
