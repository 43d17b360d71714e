"""The engine finds gradients that are not finite, names their parameters, and forgets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.optim.overflow import NonfiniteGradients
from tests.helpers.single import batches, every_stage, make_model, running, sgd

INF = float("inf")
BAD = "blocks.1.up.bias"


def backward(engine, batch, poison=None):
    """One backward; ``poison`` times the sum of one parameter is added to the loss."""
    loss = engine.module(batch)
    if poison is not None:
        loss = loss + engine.module.get_parameter(BAD).sum() * poison
    engine.backward(loss)


@every_stage
@pytest.mark.parametrize("poison", [INF, -INF, float("nan")])
def test_the_parameter_is_named(stage, poison):
    module = make_model()
    optimizer = sgd(module)
    with running(module, [optimizer], stage) as engine:
        first, second, third = batches(3)
        backward(engine, first)
        assert not engine.agreement.nonfinite(optimizer)
        engine.step(optimizer)
        optimizer.zero_grad()
        backward(engine, second, poison)
        assert engine.agreement.nonfinite(optimizer) == NonfiniteGradients((0,), (BAD,))
        optimizer.zero_grad()
        backward(engine, third)
        assert not engine.agreement.nonfinite(optimizer)


@every_stage
def test_clipping_spreads_it_to_all_but_only_the_source_is_named(stage):
    module = make_model()
    optimizer = sgd(module)
    with running(module, [optimizer], stage) as engine:
        backward(engine, batches(1)[0], INF)
        engine.clip_grad_norm_(optimizer, 1.0)
        assert engine.agreement.nonfinite(optimizer).names == (BAD,)


@every_stage
def test_one_micro_batch_is_enough_and_is_not_forgotten_when_somebody_looks(stage):
    module = make_model()
    optimizer = sgd(module)
    with running(module, [optimizer], stage) as engine:
        first, second, third = batches(3)
        backward(engine, first, INF)
        engine.grad_norm()  # as to log it
        backward(engine, second)
        assert engine.agreement.nonfinite(optimizer) == NonfiniteGradients((0,), (BAD,))
        with engine.no_sync():
            backward(engine, third)
        assert engine.agreement.nonfinite(optimizer) == NonfiniteGradients((0,), (BAD,))


@every_stage
def test_only_the_optimizer_that_has_the_parameter_is_told(stage):
    module = make_model()
    inside = list(module.blocks.parameters())
    others = [p for p in module.parameters() if all(p is not q for q in inside)]
    first, second = (torch.optim.SGD(group, lr=0.1) for group in (inside, others))
    with running(module, [first, second], stage) as engine:
        backward(engine, batches(1)[0], INF)
        assert not engine.agreement.nonfinite(second)
        engine.step(second)
        assert engine.agreement.nonfinite(first).names == (BAD,)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_sum_of_micro_batches_that_fp16_cannot_hold(stage):
    module = nn.Sequential(nn.Linear(3, 2, bias=False)).half()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with running(module, [optimizer], stage) as engine:
        inputs = torch.full((1, 3), 40000.0, dtype=torch.float16)
        for is_finite in (True, False):
            engine.backward(module(inputs).float().sum())
            found = engine.agreement.nonfinite(optimizer)
            assert found == NonfiniteGradients((), () if is_finite else ("0.weight",))


@every_stage
def test_an_aborted_step_leaves_nothing_behind(stage):
    module = make_model()
    optimizer = sgd(module)
    with running(module, [optimizer], stage) as engine:
        first, second = batches(2)
        backward(engine, first, INF)
        engine.abort_step()
        optimizer.zero_grad()
        backward(engine, second)
        assert not engine.agreement.nonfinite(optimizer)
