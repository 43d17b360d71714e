"""Unusual training steps give what DDP gives: one module a case, under DDP and each stage.

Sums of two ranks have one order, so the cases are equal bit for bit unless they say why not.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.helpers.models import difference, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
FEATURES = 7
STEPS = 5


class Noise(torch.utils.data.Dataset):
    """Batches that differ between ranks."""

    def __init__(self, rank: int, steps: int) -> None:
        generator = torch.Generator().manual_seed(500 + rank)
        self.batches = torch.randn(steps, 6, FEATURES, generator=generator)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index]


class Base(pl.LightningModule):
    """A small network; ``record`` keeps what must also be equal to DDP."""

    steps = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Any] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(FEATURES, 19), nn.GELU(), nn.Linear(19, FEATURES))

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - batch.roll(1, 1)).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(Noise(self.trainer.global_rank, self.steps), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader(Noise(50 + self.trainer.global_rank, 2), batch_size=None)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.record.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Momentum, no division by small numbers: rounding stays rounding."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


class Gan(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 13), nn.Tanh(), nn.Linear(13, 1))

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()
        real, seed = batch, batch[:, :3]

        self.toggle_optimizer(first)
        loss = F.softplus(-self.discriminator(self.generator(seed))).mean()
        self.record.append(loss.item())
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        fake = self.generator(seed).detach()
        loss = F.softplus(self.discriminator(fake)).mean()
        loss = loss + F.softplus(-self.discriminator(real)).mean()
        self.record.append(loss.item())
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, gradient_clip_val=0.02, gradient_clip_algorithm="value")
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9)),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]


class SeveralBackwards(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        self.manual_backward(self.loss(batch.flip(0) * 2))
        optimizer.step()
        self.record.append(round(loss.item(), 5))

    configure_optimizers = sgd


class ZeroGradInPlace(Base):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class NoZeroGrad(Base):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class EverySecondStep(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class EverySecondStepKept(EverySecondStep):
    """Gradients of two batches add up, by hand instead of by the Trainer."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    configure_optimizers = sgd


class StepScheduler(Base):
    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2 * STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class PlateauScheduler(Base):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class Counted(Base):
    """Order and number of the hooks of a step."""

    steps = 7

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.record.append("training_step")
        return self.loss(batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.record.append("optimizer_step")
        super().optimizer_step(*args, **kwargs)
        self.record.append(f"stepped {self.trainer.global_step}")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.record.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.record.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.record.append("on_before_backward")

    def on_after_backward(self) -> None:
        self.record.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.record.append(f"on_before_optimizer_step {type(optimizer).__name__}")

    def on_train_batch_end(self, *_: Any) -> None:
        self.record.append("on_train_batch_end")

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class UnusedOnSomeRanks(Base):
    def build(self) -> None:
        super().build()
        self.odd = nn.Linear(FEATURES, FEATURES)
        self.even = nn.Linear(FEATURES, FEATURES)
        self.never = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        branch = self.odd if (index + self.global_rank) % 2 else self.even
        if index == 3:  # nobody uses a branch
            branch = nn.Identity()
        loss = self.loss(branch(batch))
        self.record.append(loss.item())
        return loss


class NeverUsed(Base):
    """Weight decay would move a weight that has a zero gradient instead of none."""

    def build(self) -> None:
        super().build()
        self.never = nn.Linear(FEATURES, 5)
        self.initial = (self.never.weight.detach().clone(), self.net[0].weight.detach().clone())

    def on_train_end(self) -> None:
        now = (self.never.weight, self.net[0].weight)
        self.record += [torch.equal(a, b) for a, b in zip(now, self.initial, strict=True)]


class SparseEmbedding(Base):
    def build(self) -> None:
        super().build()
        self.table = nn.Embedding(23, FEATURES, sparse=True)

    def loss(self, batch: Tensor) -> Tensor:
        rows = (batch.abs() * 7).long().clamp(max=22)
        return super().loss(self.table(rows[:, 0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Checkpointed(Base):
    use_reentrant = False

    def build(self) -> None:
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 17), nn.GELU(), nn.Linear(17, FEATURES))
            for _ in range(3)
        )

    def loss(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return (x - batch.roll(1, 1)).square().mean()


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class UsedElsewhere(Base):
    def build(self) -> None:
        self.table = nn.Embedding(13, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(8) * 0.1) for _ in range(3))
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8))})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def loss(self, batch: Tensor) -> Tensor:
        rows = (batch.abs() * 5).long().clamp(max=12)
        x = self.table(rows)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for scale in self.listed:
            x = x * (1 + scale)
        x = self.normed(x + self.named["shift"])
        loss = F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), rows.flatten())
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return loss + 1e-3 * penalty


@dataclass
class Packed:
    """A container that no tree walker knows."""

    parts: list[dict[str, Tensor]] = field(default_factory=list)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Packed:
        y = self.inner(x)
        self.aux_loss = y.square().mean()
        return Packed([{"y": y}, {"half": y / 2}])


class OddOutputs(Base):
    def build(self) -> None:
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def loss(self, batch: Tensor) -> Tensor:
        x = batch
        for part in self.parts:
            packed = part(x)
            x = torch.tanh(packed.parts[0]["y"]) + packed.parts[1]["half"]
        aux = sum(part.aux_loss for part in self.parts)
        return (x - batch.roll(1, 1)).square().mean() + 0.1 * aux


class CalledTwice(Base):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(self.net(batch)) + self.net(self.net[2](self.net[0](batch))).mean()


class Buffers(Base):
    """Running statistics and a random buffer, observed on every rank."""

    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, FEATURES)
        )
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.record.append(self.net[1].running_mean.tolist())
        self.record.append(self.count.item())
        self.count += batch[0, 0].abs()
        return super().training_step(batch, index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.record.append(self.net[1].running_var.tolist())
        self.record.append(self.loss(batch).item())

    configure_optimizers = sgd  # the bias before a normalization has no gradient but rounding


class WholeTensors(Base):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 19, bias=False), nn.GELU(), nn.Linear(19, FEATURES, bias=False)
        )


class WithMuon(WholeTensors):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters(), lr=0.02)


class WithAdafactor(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


class GradientPenalty(Base):
    """Backward of a backward, with the weights of the first one."""

    def loss(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        loss = super().loss(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Recurrent(Base):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(FEATURES, FEATURES))
        self.cell = nn.LSTM(FEATURES, 11, num_layers=2, batch_first=True, bidirectional=True)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.cell(batch[None])[0].square().mean()


class OddParameters(Base):
    """Other memory orders, dtypes and sizes than those of a linear layer."""

    def build(self) -> None:
        super().build()
        self.convolution = nn.Conv2d(1, 6, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Conv2d(6, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(FEATURES, 5).t())
        self.precise = nn.Linear(FEATURES, 3).double()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch) * self.scalar + F.linear(batch, self.transposed).square().mean()
        image = self.wide(self.convolution(batch[None, None])).square().mean()
        double = self.precise(batch.double()).square().mean().float()
        counted = (batch[:5, 0] * self.counts)[self.flags[:1].expand(5)].mean()
        return loss + image + double + counted + self.nothing.sum()


class WithoutOptimizer(Base):
    def configure_optimizers(self) -> None:
        return None


class ParameterHooks(Base):
    def build(self) -> None:
        super().build()
        self.net[0].weight.register_hook(lambda grad: grad * 3)

    configure_optimizers = sgd


class ValidatedInWindow(Base):
    """Validation between the micro-batches of a window leaves their gradients alone."""

    steps = 6

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.loss(batch)

    configure_optimizers = sgd


class TargetNetwork(Base):
    """A frozen copy that follows the trained network, moved within the step."""

    def build(self) -> None:
        super().build()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
            slow.lerp_(fast, 0.3)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.follow()
        with torch.no_grad():
            aim = self.target(batch)
        loss = self.loss(batch) + (self.net(batch) - aim).square().mean()
        self.record.append(loss.item())
        return loss


class TargetAfterStep(TargetNetwork):
    """The same outside of the step, as many examples do."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch) + (self.net(batch) - self.target(batch)).square().mean()
        self.record.append(loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


class TargetAfterStepWhole(TargetAfterStep):
    """As stage 3 asks for it."""

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, ZeroStrategy):
            with strategy.full_params(self, writeback=True):
                self.follow()
        else:
            self.follow()


class ClampedData(Base):
    """Weight clipping through ``.data``, past autograd's version counters."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


@dataclass
class Case:
    """A module, how it is trained, and where it may differ from DDP in rounding."""

    make: Callable[[], Base]
    ddp: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    rounds: tuple[int, ...] = ()
    """Stages that add the terms of a sum in another order: within 1e-6 instead of bit for bit."""


UNUSED = {"find_unused_parameters": True}
GROUPS: dict[str, dict[str, Case]] = {
    "steps": {
        "gan": Case(Gan, ddp=UNUSED),
        # DDP averages what is already averaged again with every further backward.
        "several_backwards": Case(SeveralBackwards, rounds=STAGES),
        "zero_grad_in_place": Case(ZeroGradInPlace),
        "no_zero_grad": Case(NoZeroGrad, rounds=STAGES),
        "every_second_step": Case(EverySecondStep),
        "every_second_step_kept": Case(EverySecondStepKept, rounds=STAGES),
        "step_scheduler": Case(StepScheduler, trainer={"max_epochs": 2}),
        "plateau_scheduler": Case(
            PlateauScheduler, trainer={"max_epochs": 3, "limit_val_batches": 2}
        ),
        # Stages 2 and 3 average every micro-batch, then add.
        "accumulation": Case(
            Counted, trainer={"accumulate_grad_batches": 3, "max_epochs": 2}, rounds=(2, 3)
        ),
        "no_accumulation": Case(Counted),
        "validated_in_window": Case(
            ValidatedInWindow,
            trainer={"accumulate_grad_batches": 4, "val_check_interval": 1, "limit_val_batches": 2},
            rounds=(2, 3),
        ),
        "without_optimizer": Case(WithoutOptimizer),
    },
    "gradients": {
        "unused_on_some_ranks": Case(UnusedOnSomeRanks, ddp=UNUSED, stages=(0, 1, 2)),
        "never_used": Case(NeverUsed, ddp=UNUSED),
        "sparse_embedding": Case(SparseEmbedding),
        "gradient_penalty": Case(GradientPenalty),
        "parameter_hooks": Case(ParameterHooks),
        "muon": Case(WithMuon, zero={"shard_by": "tensor"}, stages=(1, 2, 3)),
        "adafactor": Case(WithAdafactor, zero={"shard_by": "tensor"}, stages=(1, 2, 3)),
    },
    "modules": {
        "checkpointed": Case(Checkpointed),
        "checkpointed_reentrant": Case(CheckpointedReentrant),
        "used_elsewhere": Case(UsedElsewhere),
        "odd_outputs": Case(OddOutputs),
        "called_twice": Case(CalledTwice),
        "recurrent": Case(Recurrent),
        "odd_parameters": Case(OddParameters),
        "target_network": Case(TargetNetwork),
        "target_after_step": Case(TargetAfterStep, stages=(0, 1, 2)),
        "target_after_step_whole": Case(TargetAfterStepWhole),
        "clamped_data": Case(ClampedData, stages=(0, 1, 2)),
        "buffers": Case(Buffers, trainer={"max_epochs": 2, "limit_val_batches": 2}),
        "buffers_accumulation": Case(
            Buffers, trainer={"accumulate_grad_batches": 2}, rounds=(2, 3)
        ),
    },
}


def fit(case: Case, strategy: Any) -> Base:
    module = case.make()
    trainer(strategy, 2, **case.trainer).fit(module)
    return module


def compare(group: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Every case of a group under DDP and every stage, on one set of ranks."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, case in GROUPS[group].items():
        expected = fit(case, DDPStrategy(**case.ddp))
        trained = weights(expected)
        found[name] = {}
        for stage in case.stages:
            try:
                module = fit(case, ZeroStrategy(stage, bucket_numel=100, timeout=20, **case.zero))
            except Exception:
                found[name][stage] = {"error": traceback.format_exc()}
                continue
            got = weights(module)
            found[name][stage] = {
                "record": module.record == expected.record,
                "records": (module.record, expected.record),
                "equal": equal(got, trained),
                "difference": difference(got, trained),
            }
    return found


@functools.cache
def outcome(group: str) -> list[dict[str, dict[int, dict[str, Any]]]]:
    return run_ranks(compare, 2, group)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, cases in GROUPS.items() for name in cases]
)
def test_equals_ddp(group, name):
    case = GROUPS[group][name]
    for rank, found in enumerate(outcome(group)):
        for stage in case.stages:
            got = found[name][stage]
            where = f"{name}, stage {stage}, rank {rank}"
            assert "error" not in got, f"{where}: {got['error']}"
            if stage in case.rounds:
                assert got["difference"] <= 1e-6, where
            else:
                assert got["equal"], (where, got["difference"])
            if stage not in case.rounds or case.make is Counted:
                assert got["record"], (where, *got["records"])


def test_never_used_weights_keep_their_values():
    """Not only as DDP does: the record says it in so many words."""
    for found in outcome("gradients"):
        for stage in STAGES:
            never_is_kept, trained_is_kept = found["never_used"][stage]["records"][0][-2:]
            assert never_is_kept
            assert not trained_is_kept


def write_outside_of_a_step() -> list[tuple[str, str]]:
    answers = []
    for make in (TargetAfterStep, ClampedData):
        try:
            trainer(ZeroStrategy(3, timeout=20), 2).fit(make())
            answers.append(("none", ""))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
    return answers


def test_a_write_to_weights_that_are_not_there_is_refused():
    """Stage 3 does not lose it without a word."""
    for answers in run_ranks(write_outside_of_a_step, 2):
        for kind, message in answers:
            assert kind == "RuntimeError"
            assert "full_params" in message
