"""Reductions leave in one order, bounded in number, whatever a rank's gradients do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.reducer import MAX_IN_FLIGHT, GradientReducer
from lightning_zero.memory.pool import BufferPool
from lightning_zero.plan.layout import ParameterSpec, plan_buckets

COUNT = 5


class Pending:
    """A transfer that ends when it is waited for."""

    def __init__(self, owner, run):
        self.owner, self.run = owner, run
        owner.pending += 1
        owner.most_pending = max(owner.most_pending, owner.pending)

    def wait(self, timeout=None):
        self.owner.pending -= 1
        self.run()


class Recording(type(choose_collectives(None))):
    """One rank whose transfers end late."""

    def __init__(self):
        super().__init__()
        self.keys, self.pending, self.most_pending = [], 0, 0

    def scratch_numel(self, flat_numel):
        return 3

    def reduce_scatter(self, flat, out, accumulate, key, scratch):
        assert scratch.shape == (3,)
        assert scratch.dtype == flat.dtype
        self.keys.append(key)
        run = super().reduce_scatter
        return Pending(self, lambda: run(flat, out, accumulate, key, scratch))


@pytest.fixture
def world():
    """Parameters in buckets of their own, their reducer, and its transfers."""
    parameters = [nn.Parameter(torch.full((4,), float(n))) for n in range(COUNT)]
    specs = [ParameterSpec(f"p{n}", (4,), (1,), "fp32", n) for n in range(COUNT)]
    layouts = plan_buckets(specs, world_size=1, bucket_numel=1, align_numel=16)
    buckets = [
        GradientBucket(layout, [parameters[n]], 0, torch.float32)
        for n, layout in enumerate(layouts)
    ]
    collectives = Recording()
    complete = []
    reducer = GradientReducer(
        buckets,
        collectives,
        BufferPool(torch.device("cpu")),
        is_scattered=True,
        overlap_comm=True,
        on_complete=complete.append,
        on_finish=lambda: complete.append("end"),
    )
    yield parameters, reducer, collectives, complete
    reducer.close()


def loss_of(parameters, numbers):
    return sum((n + 1) * parameters[n].sum() for n in numbers)


@pytest.mark.parametrize("numbers", [range(COUNT), [0, 3], [4, 1, 2], [2]])
def test_buckets_leave_from_last_to_first_whichever_are_used(world, numbers):
    parameters, reducer, collectives, complete = world
    with reducer.backward_scope():
        loss_of(parameters, numbers).backward()
    assert collectives.keys == list(reversed(range(COUNT)))
    assert sorted(complete[:-1]) == sorted(numbers)
    assert complete[-1] == "end"
    for n, parameter in enumerate(parameters):
        assert (parameter.grad == (n + 1 if n in numbers else 0)).all()
        assert reducer.buckets[n].used == ({0} if n in numbers else set())


def test_few_reductions_are_in_flight_and_none_after_the_end(world):
    parameters, reducer, collectives, _ = world
    with reducer.backward_scope():
        loss_of(parameters, range(COUNT)).backward()
    assert collectives.most_pending == MAX_IN_FLIGHT
    assert collectives.pending == 0
    assert all(bucket.buffer is None for bucket in reducer.buckets)


def test_backward_without_a_scope_is_finished_when_it_returns(world):
    parameters, reducer, collectives, _ = world
    loss_of(parameters, [0, 1]).backward()
    assert collectives.keys == list(reversed(range(COUNT)))
    assert reducer.generation == 1


def test_gradients_stay_local_while_not_synchronised(world):
    parameters, reducer, collectives, _ = world
    reducer.synchronises = False
    for _ in range(2):
        loss_of(parameters, [1]).backward()
    assert not collectives.keys
    assert reducer.has_unreduced()
    assert (parameters[1].grad == 4.0).all()
    reducer.synchronises = True
    loss_of(parameters, [1]).backward()
    assert not reducer.has_unreduced()
    assert (parameters[1].grad == 6.0).all()


def test_gradient_after_its_bucket_left_is_reduced_in_one_more_round(world):
    parameters, reducer, collectives, _ = world
    with reducer.backward_scope():
        loss_of(parameters, [4]).backward()
        loss_of(parameters, [4]).backward()
    assert reducer.has_unreduced()
    reducer.reduce_unreduced()
    assert not reducer.has_unreduced()
    assert (parameters[4].grad == 10.0).all()
    assert collectives.keys == [*reversed(range(COUNT))] * 2


def test_aborted_backward_leaves_nothing_behind(world):
    parameters, reducer, collectives, _ = world

    def fail(grad):
        raise ValueError("on purpose")

    hook = parameters[0].register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"), reducer.backward_scope():
        loss_of(parameters, range(COUNT)).backward()
    hook.remove()
    reducer.abort(None)
    assert collectives.pending == 0
    collectives.keys.clear()
    for parameter in parameters:
        parameter.grad = None
    with reducer.backward_scope():
        loss_of(parameters, range(COUNT)).backward()
    assert collectives.keys == list(reversed(range(COUNT)))
    assert [p.grad[0].item() for p in parameters] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_closed_reducer_leaves_gradients_alone(world):
    parameters, reducer, collectives, _ = world
    reducer.close()
    loss_of(parameters, [2]).backward()
    assert not collectives.keys
    assert (parameters[2].grad == 3.0).all()
