"""LightningModules of a few numbers, whose trained weights can be told in advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

Loss = Callable[["Small", Tensor], Tensor]
MakeOptimizer = Callable[["Small"], Any]


def sgd(lr: float = 1.0, **options: Any) -> MakeOptimizer:
    """SGD over all parameters."""
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, **options)


def adamw(lr: float = 0.1, **options: Any) -> MakeOptimizer:
    """AdamW over all parameters, with a weight decay of 0.1."""
    options = {"weight_decay": 0.1, **options}
    return lambda module: torch.optim.AdamW(module.parameters(), lr=lr, **options)


class Small(pl.LightningModule):
    """Named parts and a loss; nothing is random.

    Args:
        loss: Takes the module and a batch; its sum is what is trained, and what evaluation sees
            unless ``evaluate`` is given.
        data: One list of batches for each rank, or a single one that all ranks get.
        optimizer: Makes what ``configure_optimizers`` returns; None for SGD with a rate of 1.
        evaluate: As ``loss``, for the steps of evaluation.
        eval_data: As ``data``, for evaluation; none by default.
        parts: Modules and parameters; a number, a list or a tensor becomes a parameter.
    """

    def __init__(
        self,
        loss: Loss,
        data: Sequence[Sequence[Any]] = ((1.0,),),
        optimizer: MakeOptimizer | None = None,
        *,
        evaluate: Loss | None = None,
        eval_data: Sequence[Sequence[Any]] = (),
        **parts: Any,
    ) -> None:
        super().__init__()
        self.loss, self.evaluate = loss, evaluate or loss
        self.data, self.eval_data, self.make_optimizer = data, eval_data, optimizer or sgd()
        self.index = 0
        self.losses: list[float] = []
        self.seen: list[float] = []
        for name, part in parts.items():
            is_ready = isinstance(part, (nn.Module, nn.Parameter))
            setattr(self, name, part if is_ready else parameter(part))

    def train_dataloader(self) -> Any:
        return batches_of(self.data, self.trainer.global_rank)

    def val_dataloader(self) -> Any:
        return batches_of(self.eval_data, self.trainer.global_rank)

    test_dataloader = predict_dataloader = val_dataloader

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.index = index
        loss = self.loss(self, batch).sum()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> Tensor:
        value = self.evaluate(self, batch).sum()
        self.seen.append(value.item())
        return value

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


def batches_of(data: Sequence[Sequence[Any]], rank: int) -> Any:
    """A loader of this rank's batches, in order."""
    rows = data[rank % len(data)] if data else []
    return DataLoader([tensor(row) for row in rows], batch_size=None) if rows else []


def tensor(row: Any) -> Tensor:
    """A batch; a number becomes one element, 1-D."""
    return torch.atleast_1d(torch.as_tensor(row))


def parameter(value: Any, requires_grad: bool = True) -> nn.Parameter:
    """A parameter with given values; a number makes one element, 1-D."""
    values = torch.as_tensor(value, dtype=torch.float32)
    values = values.reshape(1) if isinstance(value, (int, float)) else values.clone()
    return nn.Parameter(values, requires_grad=requires_grad)


def linear(inputs: int, outputs: int, value: float | None = None, seed: int = 0) -> nn.Linear:
    """A layer without bias: all weights ``value``, or drawn with a seed of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = nn.Linear(inputs, outputs, bias=False)
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def mlp(width: int = 5, depth: int = 3, seed: int = 0) -> nn.Sequential:
    """Layers with biases, of a size that ranks cannot divide."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*(module for pair in pairs for module in pair))


def noise(steps: int, *shape: int, ranks: int = 3, seed: int = 1) -> list[list[Tensor]]:
    """Batches that differ between ranks and steps."""
    generator = torch.Generator().manual_seed(seed)
    return [list(rows) for rows in torch.randn(ranks, steps, *shape, generator=generator)]


def square(module: Small, batch: Tensor) -> Tensor:
    """The usual loss of a part named ``net``."""
    return module.net(batch).square().mean()


def product(module: Small, batch: Tensor) -> Tensor:
    """The usual loss of a number named ``w``."""
    return module.w * batch
