"""The engine on one rank in a bare loop equals plain torch, bit for bit, at every stage."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.single import (
    adamw,
    assert_equal,
    batches,
    every_stage,
    make_model,
    running,
    sgd,
    train_plain,
    train_zero,
    weights,
)


def compare(stage, make_optimizer=adamw, steps=4, clip=None, options=None, **model_options):
    plain, ours = make_model(**model_options), make_model(**model_options)
    expected = train_plain(plain, make_optimizer(plain), steps, clip)
    optimizer = make_optimizer(ours)
    with running(ours, [optimizer], stage, **(options or {})) as engine:
        found = train_zero(engine, optimizer, steps, clip)
    assert found == expected
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_what_is_dropped_without_an_end_is_freed(stage):
    """Nobody has to close an engine: model, engine and their memory go with their last name."""
    model = make_model()
    optimizer = adamw(model)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=stage), ShardGroups.create())
    train_zero(engine, optimizer, steps=1)
    dropped = [weakref.ref(each) for each in (model, engine, *model.parameters(), *engine.buckets)]
    del model, optimizer, engine
    gc.collect()
    assert [ref() for ref in dropped] == [None] * len(dropped)


@every_stage
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_losses_and_weights_equal_plain_torch(stage, make_optimizer):
    compare(stage, make_optimizer)


@every_stage
@pytest.mark.parametrize("options", [{"bucket_numel": 1}, {"overlap_comm": False}])
def test_bucket_size_and_overlap_change_nothing(stage, options):
    compare(stage, options=options)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_placement_changes_nothing(stage):
    compare(stage, options={"shard_by": "tensor"})


@every_stage
def test_tied_weights_equal_plain_torch(stage):
    compare(stage, tied=True)


@every_stage
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing_equals_plain_torch(stage, recompute):
    compare(stage, recompute=recompute)


@every_stage
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_unused_parameters_are_neither_decayed_nor_moved(stage, make_optimizer):
    compare(stage, make_optimizer, steps=6, unused=True)


@pytest.mark.parametrize("stage", [0])
def test_clipping_by_norm_equals_torch_bit_for_bit_where_gradients_are_whole(stage):
    compare(stage, clip=0.1)


@every_stage
def test_clipped_norm_is_within_an_ulp_of_torchs(stage):
    plain, ours = make_model(), make_model()
    plain(batches(1)[0]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    optimizer = sgd(ours)
    with running(ours, [optimizer], stage) as engine:
        engine.backward(ours(batches(1)[0]))
        found = torch.tensor(engine.clip_grad_norm_(optimizer, 0.1))
        clipped = engine.grad_norm(optimizer)
    step = torch.nextafter(expected, torch.tensor(torch.inf)) - expected
    assert (found - expected).abs() <= step
    assert clipped == pytest.approx(0.1, rel=1e-4)


@every_stage
@pytest.mark.parametrize("norm_type", [1.0, 3.0, float("inf")])
def test_other_norms_equal_torchs(stage, norm_type):
    plain, ours = make_model(), make_model()
    plain(batches(1)[0]).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
    with running(ours, [sgd(ours)], stage) as engine:
        engine.backward(ours(batches(1)[0]))
        assert engine.grad_norm(norm_type=norm_type) == pytest.approx(expected.item(), rel=1e-6)


@every_stage
def test_clipping_by_value_equals_torch(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(ours)
    with running(ours, [optimizer], stage) as engine:
        for batch in batches(3):
            plain(batch).backward()
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            engine.backward(ours(batch))
            engine.clip_grad_value_(optimizer, 0.01)
            engine.step(optimizer)
            optimizer.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_under_no_sync_equals_plain_torch(stage, set_to_none):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(ours)
    with running(ours, [optimizer], stage) as engine:
        for number, batch in enumerate(batches(6)):
            is_last = number % 3 == 2
            plain(batch).backward()
            with nullcontext() if is_last else engine.no_sync():
                engine.backward(ours(batch))
            if is_last:
                plain_optimizer.step()
                plain_optimizer.zero_grad(set_to_none)
                engine.step(optimizer)
                optimizer.zero_grad(set_to_none)
    assert_equal(weights(ours), weights(plain))


@pytest.mark.parametrize(("stage", "per_window"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_whole_gradients_travel_once_per_window_and_sharded_ones_every_backward(
    stage, per_window, monkeypatch
):
    ours = make_model()
    with running(ours, [sgd(ours)], stage) as engine:
        collectives, sent = engine.groups.gradients, []

        def count(original):
            return lambda *args, **options: sent.append(1) or original(*args, **options)

        for name in ("reduce_scatter", "all_reduce"):
            monkeypatch.setattr(collectives, name, count(getattr(collectives, name)))
        for number, batch in enumerate(batches(3)):
            with engine.no_sync() if number < 2 else nullcontext():
                engine.backward(ours(batch))
        assert len(sent) == per_window * len(engine.buckets)
        ours.zero_grad()


@every_stage
def test_accumulation_without_no_sync_equals_plain_torch(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    with running(ours, [optimizer], stage) as engine:
        for number, batch in enumerate(batches(4)):
            plain(batch).backward()
            engine.backward(ours(batch))
            if number % 2:
                plain_optimizer.step()
                plain_optimizer.zero_grad()
                engine.step(optimizer)
                optimizer.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_backward_outside_of_the_engine_counts_too(stage):
    plain, ours = make_model(), make_model()
    optimizer = adamw(ours)
    expected = train_plain(plain, adamw(plain), 2)
    with running(ours, [optimizer], stage) as engine:
        found = []
        for batch in batches(2):
            loss = ours(batch)
            loss.backward()
            engine.step(optimizer)
            optimizer.zero_grad()
            found.append(loss.item())
    assert found == expected
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_several_backwards_in_one_scope_add_up(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    first, second = batches(2)
    plain(first).backward()
    plain(second).backward()
    plain_optimizer.step()
    with running(ours, [optimizer], stage) as engine:
        with engine.backward_scope():
            ours(first).backward()
            ours(second).backward()
        engine.step(optimizer)
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_retained_graph_runs_backward_twice(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    batch = batches(1)[0]
    loss = plain(batch)
    loss.backward(retain_graph=True)
    loss.backward()
    plain_optimizer.step()
    with running(ours, [optimizer], stage) as engine:
        loss = ours(batch)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step(optimizer)
    assert_equal(weights(ours), weights(plain))


class Curved(nn.Module):
    """A loss whose gradient in the input depends on the weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def gradient_penalty(module, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return slope.pow(2).sum() + module(x).mean()


@every_stage
def test_double_backward_equals_plain_torch(stage):
    torch.manual_seed(0)
    plain = Curved()
    ours = copy.deepcopy(plain)
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    with running(ours, [optimizer], stage, bucket_numel=1) as engine:
        for _ in range(2):
            gradient_penalty(plain, x).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            with engine.step_scope():
                loss = gradient_penalty(ours, x)
            engine.backward(loss)
            engine.step(optimizer)
            optimizer.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_two_optimizers_each_step_their_own(stage):
    plain, ours = make_model(), make_model()

    def two(module):
        blocks = list(module.blocks.parameters())
        rest = [p for p in module.parameters() if not any(p is b for b in blocks)]
        return AdamW(blocks, lr=1e-2), SGD(rest, lr=0.1, momentum=0.5)

    plain_optimizers, optimizers = two(plain), two(ours)
    with running(ours, list(optimizers), stage) as engine:
        for number, batch in enumerate(batches(4)):
            plain(batch).backward()
            plain_optimizers[number % 2].step()
            plain.zero_grad()
            engine.backward(ours(batch))
            engine.step(optimizers[number % 2])
            ours.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_param_groups_keep_naming_the_users_parameters(stage):
    ours = make_model()
    matrices = [p for p in ours.parameters() if p.dim() > 1]
    others = [p for p in ours.parameters() if p.dim() <= 1]
    optimizer = AdamW([{"params": matrices, "lr": 1e-2}, {"params": others, "lr": 1e-3}])
    with running(ours, [optimizer], stage) as engine:
        train_zero(engine, optimizer, 2)
        assert [len(group["params"]) for group in optimizer.param_groups] == [
            len(matrices),
            len(others),
        ]
        named = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(named, [*matrices, *others], strict=True))
        assert set(optimizer.state) == set(named)


@every_stage
def test_step_returns_what_the_optimizer_returns(stage):
    ours = make_model()
    optimizer = sgd(ours)
    with running(ours, [optimizer], stage) as engine:
        engine.backward(ours(batches(1)[0]))
        assert engine.step(optimizer, lambda: "done") == "done"


@every_stage
@pytest.mark.parametrize("has_backward_after", [True, False])
def test_gradient_asked_for_in_between_drops_no_collected_one(stage, has_backward_after):
    """As adversarial losses weighted by gradients of the last layer do."""
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    first, second = batches(2)

    def train(module, backward, scope, step):
        backward(module(first))
        with scope():
            loss = module(second)
            (slope,) = torch.autograd.grad(loss, module.head.weight, retain_graph=True)
        if has_backward_after:
            backward(loss * (1 + slope.norm()))
        step()

    train(plain, torch.Tensor.backward, nullcontext, plain_optimizer.step)
    with running(ours, [optimizer], stage) as engine:
        train(ours, engine.backward, engine.step_scope, lambda: engine.step(optimizer))
    assert_equal(weights(ours), weights(plain))
