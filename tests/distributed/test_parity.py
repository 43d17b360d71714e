"""Training equals Lightning's DDP: bit for bit at two ranks in fp32, else within stated bounds."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero import ZeroStrategy
from tests.helpers import models
from tests.helpers.models import Language, difference, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
STEPS = 20

VARIANTS = {
    "adamw": {"make_optimizer": models.adamw},
    "fused_adamw": {"make_optimizer": models.fused_adamw},
    "sgd_momentum": {"make_optimizer": models.sgd_momentum},
    "two_groups": {"make_optimizer": models.two_groups, "with_scheduler": True},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
}


def fit(strategy, world_size, trainer_options, **module_options):
    module = Language(**module_options)
    trainer(strategy, world_size, **trainer_options).fit(module)
    return module.losses, weights(module)


def compare(world_size, trainer_options, module_options, zero_options):
    """Losses and weights of DDP and of every stage, on one set of ranks."""
    losses, trained = fit(DDPStrategy(), world_size, trainer_options, **module_options)
    found = {}
    for stage in STAGES:
        got_losses, got = fit(
            ZeroStrategy(stage=stage, **zero_options), world_size, trainer_options, **module_options
        )
        found[stage] = {
            "losses_equal": got_losses == losses,
            "weights_equal": equal(got, trained),
            "difference": difference(got, trained),
            "loss_difference": max(abs(a - b) for a, b in zip(got_losses, losses, strict=True)),
        }
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_ddp_bit_for_bit(variant):
    options = {"steps": STEPS, **VARIANTS[variant]}
    for found in run_ranks(compare, 2, 2, {}, options, {"bucket_numel": 3000}):
        for stage in STAGES:
            assert found[stage]["losses_equal"], (stage, found[stage])
            assert found[stage]["weights_equal"], (stage, found[stage])


@pytest.mark.parametrize("zero_options", [{}, {"bucket_numel": 1}, {"bucket_numel": 10**9}])
def test_bucket_size_and_overlap_do_not_change_a_bit(zero_options):
    for overlap_comm in (True, False):
        options = {**zero_options, "overlap_comm": overlap_comm}
        for found in run_ranks(compare, 2, 2, {}, {"steps": 4}, options):
            assert all(found[stage]["weights_equal"] for stage in STAGES), (options, found)


def test_accumulation_equals_ddp():
    """Stages 0 and 1 add up a window as DDP does; 2 and 3 average every micro-batch, then add."""
    options = {"accumulate_grad_batches": 2}
    for found in run_ranks(compare, 2, 2, options, {"steps": STEPS}, {}):
        assert all(found[stage]["weights_equal"] for stage in (0, 1)), found
        assert all(found[stage]["difference"] <= 1e-6 for stage in (2, 3)), found


def test_norm_clipping_is_within_an_ulp_of_ddp():
    for found in run_ranks(compare, 2, 2, {"gradient_clip_val": 0.5}, {"steps": STEPS}, {}):
        assert found[0]["weights_equal"], found
        assert all(found[stage]["difference"] <= 1e-6 for stage in (1, 2, 3)), found


def test_value_clipping_equals_ddp_bit_for_bit():
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    for found in run_ranks(compare, 2, 2, options, {"steps": 6}, {}):
        assert all(found[stage]["weights_equal"] for stage in STAGES), found


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_world_sizes(world_size):
    """The order of the sum over ranks differs from the ring's; one rank has no sum."""
    for found in run_ranks(
        compare, world_size, world_size, {}, {"steps": STEPS}, {"bucket_numel": 3000}
    ):
        for stage in STAGES:
            assert found[stage]["difference"] <= (0.0 if world_size == 1 else 1e-6), found


def clip_norms():
    """The norm that clipping finds, ours against torch's on the same gradients."""
    norms = {}

    class Recording(Language):
        def on_before_optimizer_step(self, optimizer):
            strategy = self.trainer.strategy
            if isinstance(strategy, ZeroStrategy):
                norm = strategy.grad_norm()
            else:
                grads = [p.grad for p in self.parameters() if p.grad is not None]
                norm = float(torch.nn.utils.get_total_norm(grads))
            norms.setdefault(self.kind, []).append(norm)

    for kind, strategy in [("ddp", DDPStrategy()), *((s, ZeroStrategy(s)) for s in STAGES)]:
        module = Recording(steps=4)
        module.kind = kind
        trainer(strategy, 2).fit(module)
    return norms


def test_grad_norm_is_within_an_ulp_of_torch():
    for norms in run_ranks(clip_norms, 2):
        expected = torch.tensor(norms["ddp"])
        ulp = torch.nextafter(expected, torch.tensor(float("inf"))) - expected
        for stage in STAGES:
            assert ((torch.tensor(norms[stage]) - expected).abs() <= ulp).all(), (stage, norms)
