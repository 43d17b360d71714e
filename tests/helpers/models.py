"""Small models and data for parity tests, the same on every rank unless said otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCAB, WIDTH, LENGTH = 61, 24, 9


class Block(nn.Module):
    """A pre-norm block with odd sizes, so that pieces are cut within rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyGPT(nn.Module):
    """Embedding, a bare parameter, blocks, tied or free head, a frozen layer, a scalar."""

    def __init__(self, depth: int = 3, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.token.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.token(tokens) + self.position) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Tokens(Dataset):
    """Batches of random tokens; element k of rank r differs from all others."""

    def __init__(self, rank: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self.batches = torch.randint(VOCAB, (steps, 2, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def fused_adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def sgd_momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    """Decay for matrices only, and another learning rate for the rest."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


class Language(pl.LightningModule):
    """An ordinary LightningModule that keeps its losses."""

    def __init__(
        self,
        make_optimizer: OptimizerFactory = adamw,
        steps: int = 6,
        with_scheduler: bool = False,
        **model: Any,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = TinyGPT(**model)
        self.make_optimizer, self.steps, self.with_scheduler = make_optimizer, steps, with_scheduler
        self.losses: list[float] = []
        self.val_losses: list[float] = []

    def train_dataloader(self) -> Iterable[Tensor]:
        return DataLoader(Tokens(self.trainer.global_rank, self.steps), batch_size=None)

    def val_dataloader(self) -> Iterable[Tensor]:
        return DataLoader(Tokens(100 + self.trainer.global_rank, 2), batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.model(batch)
        self.val_losses.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self)
        if not self.with_scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(strategy: Any, world_size: int, **options: Any) -> pl.Trainer:
    """A quiet Trainer on CPU ranks that already run."""
    quiet = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
    }
    return pl.Trainer(devices=world_size, strategy=strategy, **{**quiet, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all weights and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts are equal to the last bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference relative to the larger of 1 and the largest value of the tensor.

    Infinite where a value is not a number, as a weight that is not there.
    """
    if a.keys() != b.keys():
        raise AssertionError(f"names differ: {sorted(a.keys() ^ b.keys())}")
    found = 0.0
    for name, value in a.items():
        if value.numel():
            scale = max(1.0, value.double().abs().max().item())
            gap = (value.double() - b[name].double()).abs().max().item() / scale
            if math.isnan(gap):  # which max() would pass over
                return math.inf
            found = max(found, gap)
    return found
