"""Gradients that are not finite on one rank: one decision on all of them, never in silence."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_params
from tests.helpers.models import Language, TinyGPT, Tokens, difference, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
BAD_RANK, BAD_BATCH = 1, 2
BAD_NAME = "model.blocks.1.down.bias"
TELLS = f"gradients are not finite. They arose on rank {BAD_RANK}, in {BAD_NAME}."


def poisoned(module, loss, index):
    """One parameter gets an infinite gradient in one batch of one rank."""
    if index == BAD_BATCH and module.trainer.global_rank == BAD_RANK:
        return loss + module.model.blocks[1].down.bias.sum() * float("inf")
    return loss


class Poisoned(Language):
    def training_step(self, batch, index):
        return poisoned(self, super().training_step(batch, index), index)


class SkippingByHand(Poisoned):
    """What skipping means, with DDP: nobody steps if a whole gradient is not finite."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()
        if all(p.grad.isfinite().all() for p in self.parameters()):
            optimizer.step()


class TwoOptimizers(pl.LightningModule):
    """Manual optimization; the poisoned parameter belongs to the second one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = TinyGPT()
        self.has_moved = []

    def configure_optimizers(self):
        second = list(self.model.blocks.parameters())
        first = [p for p in self.model.parameters() if all(p is not q for q in second)]
        return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)

    def train_dataloader(self):
        return DataLoader(Tokens(self.trainer.global_rank, 4), batch_size=None)

    def training_step(self, batch, index):
        self.manual_backward(poisoned(self, self.model(batch), index))
        names = "head.weight", "blocks.0.up.weight"
        for optimizer, name in zip(self.optimizers(), names, strict=True):
            parameter = self.model.get_parameter(name)
            with full_params(parameter):
                before = parameter.clone()
            optimizer.step()
            optimizer.zero_grad()
            with full_params(parameter):
                self.has_moved.append(not torch.equal(parameter, before))


class Kept(Logger):
    """Metrics in a list."""

    def __init__(self):
        super().__init__()
        self.counts = []

    name = version = "kept"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step):
        self.counts += [(step, metrics[key]) for key in metrics if key == "zero/nonfinite_steps"]


def fit(module, strategy, **options):
    """Train, and return the weights, what was told, and what was logged on this rank."""
    logger = Kept()
    run = trainer(strategy, 2, logger=logger, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module)
    told = [str(w.message) for w in caught if "not finite" in str(w.message)]
    return weights(module), told, logger.counts


def runs():
    found = {"ddp": fit(Poisoned(steps=13), DDPStrategy())}
    found["by hand"] = fit(SkippingByHand(steps=5), DDPStrategy())
    for stage in STAGES:
        found[stage, "step"] = fit(Poisoned(steps=13), ZeroStrategy(stage))
        skipping = ZeroStrategy(stage, nonfinite_gradients="skip")
        found[stage, "skip"] = fit(Poisoned(steps=5), skipping)
        skipping = ZeroStrategy(stage, nonfinite_gradients="skip")
        accumulated = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        found[stage, "window"] = fit(Poisoned(steps=6), skipping, **accumulated)
        two = TwoOptimizers()
        skipping = ZeroStrategy(stage, nonfinite_gradients="skip")
        found[stage, "two"] = *fit(two, skipping), two.has_moved
        try:
            fit(Poisoned(steps=5), ZeroStrategy(stage, nonfinite_gradients="error"))
        except RuntimeError as error:
            found[stage, "error"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(runs, 2)


def is_same(found, expected):
    """To the last bit, where NaN equals NaN."""
    return all(
        torch.allclose(found[name], value, rtol=0, atol=0, equal_nan=True)
        for name, value in expected.items()
    )


@pytest.mark.parametrize("stage", STAGES)
def test_by_default_all_ranks_step_as_ddp_does_and_say_so(ranks, stage):
    for found in ranks:
        trained, told, counts = found[stage, "step"]
        assert is_same(trained, found["ddp"][0])
        first, tenth = told
        assert f"step {BAD_BATCH}: {TELLS}" in first
        assert "step 11: gradients are not finite. They arose on ranks 0, 1, in model." in tenth
        assert "10 steps in a row (10 in all)" in tenth
        assert counts == [(step, float(step - 1)) for step in range(2, 13)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_is_skipped_by_all(ranks, stage):
    for found in ranks:
        trained, (text,), counts = found[stage, "skip"]
        assert f"step {BAD_BATCH}: {TELLS} All ranks skip the step" in text
        assert equal(trained, found["by hand"][0])
        assert counts == [(BAD_BATCH, 1.0)]


@pytest.mark.parametrize("stage", STAGES)
def test_one_micro_batch_of_a_clipped_window_is_enough(ranks, stage):
    for found in ranks:
        trained, (text,), counts = found[stage, "window"]
        assert f"step 1: {TELLS}" in text
        assert counts == [(1, 1.0)]
        assert all(value.isfinite().all() for value in trained.values())
        assert difference(trained, found[0, "window"][0]) <= 1e-6
    assert equal(ranks[0][stage, "window"][0], ranks[1][stage, "window"][0])


@pytest.mark.parametrize("stage", STAGES)
def test_of_two_optimizers_the_one_without_the_parameter_steps(ranks, stage):
    for found in ranks:
        trained, (text,), _, has_moved = found[stage, "two"]
        assert f"{TELLS} All ranks skip the step" in text
        assert has_moved == [True] * 5 + [False] + [True] * 2
        assert difference(trained, found[0, "two"][0]) <= 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_is_one_on_all_ranks(ranks, stage):
    for found in ranks:
        assert f"step {BAD_BATCH}: {TELLS}" in found[stage, "error"]


def test_a_loss_scaler_decides_itself():
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"nonfinite_gradients='skip' has no effect with a loss"):
        pl.Trainer(
            accelerator="cpu",
            strategy=ZeroStrategy(2, nonfinite_gradients="skip"),
            plugins=scaled,
            logger=False,
        )
    with pytest.raises(ValueError, match="must be 'step', 'skip' or 'error'"):
        ZeroStrategy(2, nonfinite_gradients="ignore")
