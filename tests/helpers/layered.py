"""A training of named layers that can be changed between two runs, and many cases in one spawn."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.restored import RestoreWarning
from tests.helpers.models import trainer

WIDTH = 6
Case = Callable[[Path], None]
Groups = Callable[["Layers"], Any]


def every(module: Layers) -> Any:
    """One group of all that is trained."""
    return [p for p in module.parameters() if p.requires_grad]


def by_kind(module: Layers) -> Any:
    """Weights and biases apart, in this order."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trained if n.endswith("weight")], "lr": 0.02},
        {"params": [p for n, p in trained if n.endswith("bias")], "lr": 0.03, "eps": 1e-5},
    ]


class Layers(pl.LightningModule):
    """Layers in a row; each has values of its own, whatever others there are."""

    def __init__(
        self,
        layers: str = "abc",
        frozen: str = "",
        groups: Groups = every,
        seed: int = 0,
        steps: int = 2,
        lr: float = 0.01,
    ) -> None:
        super().__init__()
        self.net = nn.ModuleDict()
        for name in layers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(ord(name) + seed)
                self.net[name] = nn.Linear(WIDTH, WIDTH).requires_grad_(name not in frozen)
        self.groups, self.steps, self.lr = groups, steps, lr

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net.values():
            x = torch.tanh(layer(x)) + 0.1
        return x

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        return DataLoader(torch.randn(self.steps, 3, WIDTH, generator=generator), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(1, 1, WIDTH), batch_size=None)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.groups(self), lr=self.lr)


def world_size() -> int:
    """Ranks of this process group; Lightning deletes the variable after the first fit."""
    is_running = torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_running else int(os.environ["WORLD_SIZE"])


def user_of(stage: int | None, strategy_options: Mapping[str, Any] = {}, **options: Any) -> Any:
    """A Trainer of a stage, or of DDP."""
    if stage is None:
        strategy: Any = DDPStrategy(**strategy_options)
    else:
        strategy = ZeroStrategy(stage, bucket_numel=60, timeout=20, **strategy_options)
    return trainer(strategy, world_size(), **options)


def saved(
    path: Path, stage: int | None, module: pl.LightningModule, **strategy_options: Any
) -> Any:
    """Train, and save before the training ends.

    Returns:
        What the training held at its end, see :func:`held`; empty but on rank 0.
    """
    watch = Watch(path)
    user_of(stage, strategy_options, callbacks=[watch]).fit(module)
    return watch.end


class Watch(Callback):
    """What a training has when it starts and when it ends, where states are full; saves then."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.start = held(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.end = held(trainer)
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def held(trainer: pl.Trainer) -> list[dict[str, Tensor]]:
    """Moments and steps of each optimizer by names of parameters; empty but on rank 0.

    Stored tensors, of a training that writes sharded checkpoints, are left out.
    """
    module, found = trainer.lightning_module, []
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        plain = getattr(optimizer, "optimizer", optimizer)
        packed = trainer.strategy.optimizer_state(optimizer)
        numbers = [n for group in packed["param_groups"] for n in group["params"]]
        parameters = [p for group in plain.param_groups for p in group["params"]]
        by_number = dict(zip(numbers, (names[p] for p in parameters), strict=True))
        found.append(
            {
                f"{by_number[number]}.{key}": torch.as_tensor(value).clone()
                for number, state in (packed["state"] if trainer.is_global_zero else {}).items()
                for key, value in state.items()
                if not hasattr(value, "reader")
            }
        )
    return found


def resumed(
    path: Path, stage: int | None, module: pl.LightningModule, **options: Any
) -> tuple[list[dict[str, Tensor]], list[str], pl.Trainer]:
    """Go on from a checkpoint for one more epoch.

    Returns:
        What the training held at its start, what was told about the checkpoint, and the Trainer.
    """
    user = user_of(stage, callbacks=[watch := Watch()], max_epochs=2, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        user.fit(module, ckpt_path=path)
    notices = [str(each.message) for each in told if issubclass(each.category, RestoreWarning)]
    return watch.start, notices, user


def error_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What a call raises, as kind and message; "" if nothing."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def outcomes(cases: Sequence[Case], folder: Path) -> dict[str, str]:
    """Run cases one after the other, each with a folder of its own, until one fails.

    Returns:
        The trace of the one that failed, and "" for those before it; the rest is not there, since
        ranks may be apart by then.
    """
    found = {}
    for case in cases:
        place = folder / case.__name__
        place.mkdir(exist_ok=True)
        try:
            case(place)
        except Exception:
            return {**found, case.__name__: traceback.format_exc()}
        found[case.__name__] = ""
    return found


def check_outcome(found: Sequence[Mapping[str, str]], case: Case) -> None:
    """Fail with the trace of a case that failed on any rank, or was not reached."""
    for rank, outcome in enumerate(found):
        trace = outcome.get(case.__name__, "not run, since an earlier case failed")
        assert not trace, f"rank {rank}: {trace}"
