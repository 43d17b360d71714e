"""Precision flags: mixed precision equals DDP, 16-bit parameters have an fp32 master."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, TinyGPT, Tokens, difference, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)


def mixed_runs(precision):
    found = {}
    for name, strategy in [("ddp", DDPStrategy()), *((s, ZeroStrategy(s)) for s in STAGES)]:
        module = Language(steps=6)
        trainer(strategy, 2, precision=precision).fit(module)
        found[name] = module.losses, weights(module)
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision_equals_ddp_bit_for_bit(precision):
    for found in run_ranks(mixed_runs, 2, precision):
        losses, trained = found["ddp"]
        for stage in STAGES:
            assert found[stage][0] == losses
            assert equal(found[stage][1], trained)


def scaled_runs(bad_rank, bad_step):
    """Loss scaling with an infinite gradient on one rank; the scaler skips on all."""

    class Overflowing(Language):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index == bad_step and self.trainer.global_rank == bad_rank:
                loss = loss * float("inf")
            return loss

    found = {}
    for stage in STAGES:
        module = Overflowing(steps=4)
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        fit = trainer(ZeroStrategy(stage), 2, plugins=plugin)
        fit.fit(module)
        skipped = fit.precision_plugin.nonfinite_steps
        counts = skipped.count, skipped.in_a_row(fit.optimizers[0])
        found[stage] = weights(module), fit.precision_plugin.scaler.get_scale(), counts
    return found


def test_overflow_on_one_rank_skips_the_step_on_all():
    ranks = run_ranks(scaled_runs, 2, 1, 2)
    for stage in STAGES:
        first, second = (rank[stage] for rank in ranks)
        assert equal(first[0], second[0])
        assert all(value.isfinite().all() for value in first[0].values())
        assert first[1] == second[1] == 2.0**9
        assert first[2] == second[2] == (1, 0)
        assert difference(first[0], ranks[0][0][0]) <= 1e-6


def frozen_run(folder):
    """Every step overflows on rank 1."""

    class Frozen(Language):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * float("inf") if self.trainer.global_rank == 1 else loss

    found = {}
    for stage in STAGES:
        module = Frozen(steps=12)
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))
        logger = CSVLogger(folder, name=f"stage{stage}", version="")
        fit = trainer(ZeroStrategy(stage), 2, plugins=plugin, logger=logger)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit.fit(module)
        told = [str(w.message) for w in caught if "not finite" in str(w.message)]
        metrics = Path(folder, f"stage{stage}", "metrics.csv")
        rows = metrics.read_text().splitlines() if fit.is_global_zero else []
        found[stage] = told, rows
    return found


def test_run_that_overflows_at_every_step_is_announced(tmp_path):
    first, second = run_ranks(frozen_run, 2, str(tmp_path))
    for stage in STAGES:
        (message,), rows = first[stage]
        assert "step 9 was skipped on all ranks" in message
        assert "10 steps in a row" in message
        assert "They arose on rank 1, in model." in message
        assert rows[0].split(",").count("zero/skipped_steps") == 1
        column = rows[0].split(",").index("zero/skipped_steps")
        assert [float(row.split(",")[column]) for row in rows[1:]] == list(range(1, 13))
        assert second[stage][0] == [message]


def vanishing_scale():
    """As above, but the loss scale cannot be halved for long."""

    class Lost(Language):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            return loss * float("inf") if self.trainer.global_rank == 1 else loss

    found = {}
    for stage in (0, 3):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-124)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        with pytest.raises(RuntimeError) as caught:
            trainer(ZeroStrategy(stage), 2, plugins=plugin).fit(Lost(steps=6))
        found[stage] = str(caught.value)
    return found


def test_a_loss_scale_that_vanishes_ends_the_run_on_all_ranks():
    for found in run_ranks(vanishing_scale, 2):
        for stage in (0, 3):
            assert "step 2: the loss scale has fallen to" in found[stage]
            assert "on rank 1, in model." in found[stage]


def half_reference(world_size, steps, learning_rate):
    """bf16 parameters with an fp32 master in one process; the mean over ranks is taken in bf16."""
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyGPT().to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=learning_rate, weight_decay=0.1)
    data = [Tokens(rank, steps) for rank in range(world_size)]
    for step in range(steps):
        grads = []
        for rank in range(world_size):
            model.zero_grad()
            model(data[rank][step]).backward()
            grads.append([p.grad / world_size for p in model.parameters()])
        for master, *parts in zip(masters, *grads, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            master.grad = total.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return {f"model.{name}": value.detach() for name, value in model.state_dict().items()}


def half_runs():
    found = {}
    for stage in STAGES:
        module = Language(steps=6)
        trainer(ZeroStrategy(stage), 2, precision="bf16-true").fit(module)
        found[stage] = weights(module)
    return found


def test_bf16_true_steps_an_fp32_master():
    expected = half_reference(2, 6, 1e-2)
    for found in run_ranks(half_runs, 2):
        for stage in STAGES:
            assert equal(found[stage], expected), (stage, difference(found[stage], expected))


class Creeping(pl.LightningModule):
    """w = 1 with gradient 1 and lr 1e-3: a bf16 weight cannot move, an fp32 master can."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))

    def train_dataloader(self):
        return DataLoader(torch.ones(100, 1), batch_size=None)

    def training_step(self, batch, index):
        return self.w.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def creep():
    found = {}
    for stage in STAGES:
        for master_weights in (None, False):
            module = Creeping()
            strategy = ZeroStrategy(stage, master_weights=master_weights)
            trainer(strategy, 2, precision="bf16-true").fit(module)
            found[stage, master_weights] = module.w.float().mean().item()
    return found


def test_master_weights_let_small_updates_add_up():
    for found in run_ranks(creep, 2):
        for stage in STAGES:
            assert found[stage, None] == pytest.approx(0.9, abs=2e-3)
            assert found[stage, False] == 1.0


def reduced_in(dtype):
    module = Language(steps=4)
    trainer(ZeroStrategy(2, reduce_dtype=dtype), 2).fit(module)
    plain = Language(steps=4)
    strategy = ZeroStrategy(2)
    trainer(strategy, 2).fit(plain)
    return difference(weights(module), weights(plain)), strategy.sent_nbytes


def test_reduce_dtype_changes_what_travels():
    for found, _ in run_ranks(reduced_in, 2, "bfloat16"):
        assert 0.0 < found < 0.05
    for found, _ in run_ranks(reduced_in, 2, "float64"):
        assert found < 1e-6
