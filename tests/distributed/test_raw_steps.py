"""Steps that are called past the strategy, on plain torch optimizers, train as under DDP."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions, ZeroStrategy
from tests.helpers.models import Language, TinyGPT, adamw, equal, trainer, weights
from tests.helpers.spawn import run_ranks

SHARDED = (1, 2, 3)


class Manual(Language):
    """Steps its optimizer in one of the ways that lead past Lightning."""

    def __init__(self, how):
        super().__init__(steps=3)
        self.how, self.automatic_optimization = how, False

    def configure_optimizers(self):
        self.own = adamw(self.model)
        return None if self.how == "own" else self.own

    def training_step(self, batch, index):
        if self.how == "closure":
            self.own.step(lambda: self.backpropagated(batch))
        else:
            self.backpropagated(batch)
        if self.how == "own":
            self.own.step()
        elif self.how == "inner":
            self.optimizers().optimizer.step()
        elif self.how == "plain":
            self.optimizers(use_pl_optimizer=False).step()
        elif self.how == "trainer":
            self.trainer.optimizers[0].step()

    def backpropagated(self, batch):
        self.own.zero_grad()
        loss = self.model(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        return loss


WAYS = ("own", "inner", "plain", "trainer", "closure")


def fit(strategy, how, **options):
    module = Manual(how)
    trainer(strategy, 2, **options).fit(module)
    return module.losses, weights(module)


class Scaled(Manual):
    """Scales its losses itself, which needs gradients that are there."""

    def __init__(self):
        super().__init__("own")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def backpropagated(self, batch):
        self.manual_backward(self.scaler.scale(self.model(batch)))
        self.scaler.step(self.own)


def refused_scalers():
    found = {}
    for stage in SHARDED:
        try:
            trainer(ZeroStrategy(stage), 2).fit(Scaled())
        except RuntimeError as error:
            found[stage] = str(error)
    return found


def checked():
    """A self-check sees raw steps, as any."""
    found = {}
    for stage in SHARDED:
        found[stage] = []
        for how in ("plain", "own"):
            strategy = ZeroStrategy(stage, self_check=2)
            trainer(strategy, 2).fit(Manual(how))
            found[stage].append(strategy.self_check_report)
    return found


def every_way():
    found = {}
    for how in WAYS:
        losses, trained = fit(DDPStrategy(), how)
        for stage in SHARDED:
            got_losses, got = fit(ZeroStrategy(stage), how)
            found[how, stage] = got_losses == losses and equal(got, trained)
    masters = {stage: fit(ZeroStrategy(stage), "plain", precision="bf16-true") for stage in SHARDED}
    for stage, (losses, _) in masters.items():
        found["bf16", stage] = losses == masters[1][0]
    return found, failures(), left_over(), refused_scalers(), checked()


class Failing:
    """A hook that raises in the second step."""

    def __init__(self):
        self.steps = 0

    def __call__(self, *_):
        self.steps += 1
        if self.steps == 2:
            raise ValueError("in the middle of a step")


def failures():
    """An error within a raw step, and an optimizer that cannot be stepped on pieces."""
    found = {}
    for stage in SHARDED:
        model = TinyGPT()
        engine = ZeroEngine(model, [adamw(model)], ZeroOptions(stage=stage), ShardGroups.create())
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        own.register_step_pre_hook(Failing())
        batch = torch.arange(18).reshape(2, 9)
        engine.backward(model(batch))
        lbfgs = torch.optim.LBFGS(model.parameters())
        said = [attempt(partial(lbfgs.step, partial(model, batch))), attempt(own.step)]
        own.zero_grad()
        engine.backward(model(batch))
        said += [attempt(own.step), attempt(own.step)]
        engine.abandon()
        named = [id(parameter) for parameter in own.param_groups[0]["params"]]
        found[stage] = said, named == [id(p) for p in model.parameters()]
    return found


def attempt(step):
    try:
        step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "stepped"


def left_over():
    """Hooks of engines that are closed, or that nobody has any more."""
    model = nn.Linear(2, 2)
    engine = ZeroEngine(model, [adamw(model)], ZeroOptions(stage=1), ShardGroups.create())
    gone = weakref.ref(engine)
    del engine, model
    gc.collect()
    is_gone = gone() is None
    return is_gone, len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


def two_ranks():
    dist.init_process_group("gloo")
    return every_way()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(two_ranks, 2)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize("how", [*WAYS, "bf16"])
def test_raw_step_trains_as_under_ddp_bit_for_bit(ranks, how, stage):
    for found, *_ in ranks:
        assert found[how, stage]


@pytest.mark.parametrize("stage", SHARDED)
def test_raw_step_that_raises_leaves_the_users_groups(ranks, stage):
    for _, found, *_ in ranks:
        said, is_named_again = found[stage]
        assert said[1:3] == ["stepped", "in the middle of a step"]
        assert "an earlier step of it has raised" in said[3]
        assert is_named_again


@pytest.mark.parametrize("stage", SHARDED)
def test_optimizer_that_cannot_be_used_is_refused_in_its_raw_step(ranks, stage):
    for _, found, *_ in ranks:
        assert "LBFGS" in found[stage][0][0]


def test_closed_and_forgotten_engines_leave_no_hook(ranks):
    for _, _, (is_gone, hooks), *_ in ranks:
        assert is_gone
        assert hooks == 0


@pytest.mark.parametrize("stage", SHARDED)
def test_scaler_of_ones_own_is_an_error_that_says_what_to_do(ranks, stage):
    for *_, found, _ in ranks:
        assert "precision='16-mixed'), not with a GradScaler of your own" in found[stage]
        assert ("parameter" in found[stage]) == (stage == 3)


@pytest.mark.parametrize("stage", SHARDED)
def test_self_check_sees_raw_steps(ranks, stage):
    for *_, found in ranks:
        for report in found[stage]:
            assert report.is_exact
            assert report.steps == 2
