"""Bytes per rank and bytes on the wire equal the theory."""

from __future__ import annotations

import gc

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.plan.layout import default_bucket_numel
from lightning_zero.plan.memory import model_state_nbytes
from tests.helpers.alive import alive_nbytes
from tests.helpers.models import trainer
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
WIDTH, DEPTH, STEPS = 128, 16, 3
BUCKETS_AT_PEAK = {0: 4, 1: 4, 2: 4, 3: 7}
"""The stated buffer bound, in buckets: collection, staging and gathered parameters at once."""


class Deep(pl.LightningModule):
    """Square layers; weighs itself in every hook of forward and backward, and between steps."""

    def __init__(self, is_sampling: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.is_sampling = is_sampling
        self.before_nbytes = self.peak_nbytes = 0
        self.rest_nbytes, self.states, self.sent_nbytes = [], [], []

    def sample(self, *_) -> None:
        if self.trainer.global_step == 1:  # the first step has no optimizer state yet
            self.peak_nbytes = max(self.peak_nbytes, alive_nbytes() - self.before_nbytes)

    def on_train_start(self) -> None:
        for layer in self.layers if self.is_sampling else ():
            layer.register_forward_hook(self.sample)
            layer.register_full_backward_hook(self.sample)

    def train_dataloader(self):
        return DataLoader(torch.randn(STEPS, 2, WIDTH), batch_size=None)

    def training_step(self, batch, index):
        # The input asks for a gradient, so that backward needs every weight, the first one too.
        return self.layers(batch.requires_grad_()).square().mean()

    def on_before_optimizer_step(self, optimizer) -> None:
        self.sample()

    def on_train_batch_end(self, *_) -> None:
        gc.collect()
        self.rest_nbytes.append(alive_nbytes() - self.before_nbytes)
        self.states.append(self.trainer.strategy.measure_model_states())
        self.trainer.strategy.barrier()  # a faster rank's next step may ask for shards of this one
        self.sent_nbytes.append(self.trainer.strategy.sent_nbytes)
        self.trainer.strategy.barrier()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def weigh(world_size, stage, precision, is_sampling):
    gc.collect()
    before = alive_nbytes()
    module = Deep(is_sampling)
    module.before_nbytes = before
    numel = sum(p.numel() for p in module.parameters())
    trainer(ZeroStrategy(stage), world_size, precision=precision).fit(module)
    sent = [b - a for a, b in zip(module.sent_nbytes, module.sent_nbytes[1:], strict=False)]
    return numel, module.rest_nbytes[1:], module.peak_nbytes, module.states[1:], sent


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_model_states_between_steps_equal_the_formula(stage, precision):
    world_size = 2
    for numel, rest, _, states, _ in run_ranks(
        weigh, world_size, world_size, stage, precision, False
    ):
        formula = model_state_nbytes(numel, stage, world_size, precision != "32-true")
        for measured in states:
            # Full gradients live only within an accumulation window: stage 1 is below its formula.
            assert measured.parameters_nbytes == pytest.approx(formula.parameters_nbytes, rel=0.05)
            assert measured.optimizer_nbytes == pytest.approx(formula.optimizer_nbytes, rel=0.05)
            assert measured.gradients_nbytes <= 1.05 * formula.gradients_nbytes
        # Nothing else is alive: no buffer outlives its step (64 KiB for batches and metrics).
        assert max(rest) <= 1.05 * formula.total_nbytes + 2**16


@pytest.mark.parametrize("stage", STAGES)
def test_peak_within_a_step_stays_within_the_buffer_bound(stage):
    world_size = 2
    for numel, _, peak, _, _ in run_ranks(weigh, world_size, world_size, stage, "32-true", True):
        formula = model_state_nbytes(numel, stage, world_size, False).total_nbytes
        bound = BUCKETS_AT_PEAK[stage] * default_bucket_numel(numel) * 4
        assert peak <= 1.05 * formula + bound, (peak, formula, bound)


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_sent_equal_the_theory(world_size):
    """Gradients and parameters: 2P (W-1)/W elements at stages 0 to 2, 3P (W-1)/W at stage 3.

    Stage 3 saves up to two buckets of it: what its forward ends with is kept for its backward.
    """
    for stage, factor in ((0, 2), (1, 2), (2, 2), (3, 3)):
        for numel, _, _, _, sent in run_ranks(
            weigh, world_size, world_size, stage, "32-true", False
        ):
            theory = factor * numel * 4 * (world_size - 1) / world_size
            kept = 2 * default_bucket_numel(numel) * 4 * (world_size - 1) / world_size
            least = theory - kept if stage == 3 else theory
            for nbytes in sent:
                assert 0.99 * least <= nbytes <= 1.01 * theory, (stage, nbytes / theory)
