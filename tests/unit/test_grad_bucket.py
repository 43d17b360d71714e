"""The gradient side of a bucket: collection, the shard's gradient, and the faces users see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.grads.bucket import IDLE_STEPS_UNTIL_ABSENT, GradientBucket
from lightning_zero.plan.layout import ParameterSpec, plan_buckets

SHAPES = [(4, 8), (7,), ()]


def make(world_size=1, rank=0, wire_dtype=torch.float32, dtype=torch.float32):
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    specs = [
        ParameterSpec(f"p{n}", tuple(p.shape), p.stride(), p.dtype, n)
        for n, p in enumerate(parameters)
    ]
    (layout,) = plan_buckets(specs, world_size=world_size, bucket_numel=10**6, align_numel=16)
    bucket = GradientBucket(layout, parameters, rank, wire_dtype)
    bucket.watched.update(range(len(parameters)))  # as the reducer does
    return bucket


def reduce(bucket, values, scale=1.0, others=None):
    """One backward that brings a constant gradient to some slots, and its reduction.

    The other rank's gradients are ``others``, else zero.
    """
    bucket.buffer = torch.full((bucket.layout.padded_numel,), float("nan"), dtype=bucket.wire_dtype)
    for slot, value in values.items():
        bucket.note_face(slot)
        bucket.put(slot, torch.full(SHAPES[slot], value), scale)
        bucket.parameters[slot].grad = None
    bucket.fill_rest()
    for slot, value in (others or {}).items():
        place = bucket.layout.slots[slot]
        bucket.buffer[place.offset : place.end] += value
    own = bucket.buffer[: bucket.layout.shard_numel]
    if bucket.prepare_shard_grad():
        bucket.shard_grad.add_(own)
    else:
        bucket.shard_grad.copy_(own)
    bucket.buffer = None
    bucket.show_faces()


def test_one_rank_shows_true_gradients():
    bucket = make()
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0}, scale=0.5)
    grads = [p.grad for p in bucket.parameters]
    assert [g.unique().item() for g in grads] == [1.0, 1.5, 2.0]
    assert [tuple(g.shape) for g in grads] == SHAPES
    storage = bucket.shard_grad.untyped_storage().data_ptr()
    assert all(g.untyped_storage().data_ptr() == storage for g in grads)


@pytest.mark.parametrize("rank", [0, 1])
def test_several_ranks_show_nan_of_true_shape_that_costs_nothing(rank):
    bucket = make(world_size=2, rank=rank)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    for parameter in bucket.parameters:
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isnan().all()
        assert parameter.grad.untyped_storage().nbytes() == parameter.element_size()


def test_padding_and_unused_parameters_are_zero_in_the_buffer():
    bucket = make()
    bucket.buffer = torch.full((bucket.layout.padded_numel,), float("nan"))
    bucket.put(1, torch.full((7,), 3.0), 1.0)
    bucket.fill_rest()
    expected = torch.zeros(bucket.layout.padded_numel)
    slot = bucket.layout.slots[1]
    expected[slot.offset : slot.end] = 3.0
    assert torch.equal(bucket.buffer, expected)


def test_gradient_that_needs_one_itself_is_taken_without_its_graph():
    bucket = make()
    bucket.buffer = torch.zeros(bucket.layout.padded_numel)
    bucket.put(1, torch.ones(7, requires_grad=True) * 2, 1.0)
    assert not bucket.buffer.requires_grad


def test_sparse_gradient_is_made_dense():
    bucket = make()
    bucket.buffer = torch.zeros(bucket.layout.padded_numel)
    bucket.put(
        0, torch.sparse_coo_tensor([[2]], torch.ones(1, 8), (4, 8), check_invariants=True), 2.0
    )
    rows = bucket.buffer[:32].view(4, 8).sum(1)
    assert rows.tolist() == [0.0, 0.0, 16.0, 0.0]


def test_gradient_cleared_by_none_starts_anew():
    bucket = make()
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    for parameter in bucket.parameters:
        parameter.grad = None
    assert all(bucket.is_cleared(slot) for slot in range(3))
    reduce(bucket, {0: 5.0, 1: 5.0, 2: 5.0})
    assert all((p.grad == 5.0).all() for p in bucket.parameters)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_cleared_to_zeros_starts_from_zero(world_size):
    bucket = make(world_size)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    for parameter in bucket.parameters:
        parameter.grad.zero_()
    assert not any(bucket.is_cleared(slot) for slot in range(3))
    reduce(bucket, {0: 5.0})
    assert (bucket.piece_grad(0) == 5.0).all()
    for slot in bucket.pieces.keys() - {0}:
        assert (bucket.piece_grad(slot) == 0.0).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradient_that_is_kept_is_added_to(world_size):
    bucket = make(world_size)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    reduce(bucket, {0: 10.0, 1: 10.0, 2: 10.0})
    expected = [12.0, 13.0, 14.0]
    for slot in bucket.pieces:
        assert (bucket.piece_grad(slot) == expected[slot]).all()
    assert all(p.grad is not None for p in bucket.parameters)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_kept_and_cleared_one_by_one(world_size):
    bucket = make(world_size)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    bucket.parameters[0].grad = None
    reduce(bucket, {0: 10.0, 1: 10.0})
    expected = [10.0, 13.0, 4.0]
    for slot in bucket.pieces:
        assert (bucket.piece_grad(slot) == expected[slot]).all(), slot


def test_parameter_without_gradient_is_used_until_it_is_cleared():
    bucket = make(world_size=2)
    reduce(bucket, {0: 2.0, 1: 3.0})
    assert bucket.used == {0, 1}
    reduce(bucket, {0: 2.0})
    assert bucket.used == {0, 1}
    bucket.parameters[1].grad = None
    reduce(bucket, {0: 2.0})
    assert bucket.used == {0}


@pytest.mark.parametrize("change", ["mul_", "clamp_", "fill_"])
def test_in_place_change_of_a_placeholder_face_raises_or_is_refused_by_torch(change):
    bucket = make(world_size=2)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    arguments = {"mul_": (0.5,), "clamp_": (-1.0, 1.0), "fill_": (1.0,)}[change]

    def change_and_go_on():
        getattr(bucket.parameters[0].grad, change)(*arguments)
        bucket.note_face(0)

    with pytest.raises(RuntimeError, match="'p0' was changed in place|single memory location"):
        change_and_go_on()


def test_in_place_change_of_a_scalars_face_raises_before_the_step():
    bucket = make(world_size=2)
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    bucket.parameters[2].grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="gradient of 'p2' was changed in place"):
        bucket.is_cleared(2)


def test_in_place_change_of_a_whole_gradient_is_what_the_step_sees():
    bucket = make()
    reduce(bucket, {0: 2.0, 1: 3.0, 2: 4.0})
    bucket.parameters[1].grad.mul_(10.0)
    assert not bucket.is_cleared(1)
    assert (bucket.piece_grad(1) == 30.0).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_reduced_is_added_to_where_a_local_gradient_hides_its_face(world_size):
    """A gradient that came late, or before the ranks synchronised; reduced in a later round."""
    bucket = make(world_size)
    bucket.parameters[0].grad = torch.full(SHAPES[0], 5.0)
    reduce(bucket, {1: 3.0}, others={0: 2.0})
    assert (bucket.piece_grad(0) == 2.0).all()
    reduce(bucket, {1: 1.0})  # another backward without it
    reduce(bucket, {0: 5.0})
    assert (bucket.piece_grad(0) == 7.0).all()
    bucket.parameters[0].grad = None
    reduce(bucket, {0: 1.0})
    assert (bucket.piece_grad(0) == 1.0).all()


def test_local_gradient_is_told_from_a_face():
    bucket = make(world_size=2)
    assert not bucket.has_unreduced()
    bucket.parameters[0].grad = torch.ones(4, 8)
    assert bucket.has_unreduced()
    bucket.parameters[0].grad = None
    reduce(bucket, {0: 1.0})
    assert not bucket.has_unreduced()
    bucket.parameters[1].grad = torch.ones(7)
    assert bucket.has_unreduced()


def test_bucket_is_complete_without_parameters_that_have_been_idle():
    bucket = make()
    bucket.buffer = torch.zeros(bucket.layout.padded_numel)
    bucket.idle_steps = [0, IDLE_STEPS_UNTIL_ABSENT - 1, IDLE_STEPS_UNTIL_ABSENT]
    assert not bucket.is_complete()
    bucket.put(0, torch.ones(4, 8), 1.0)
    assert not bucket.is_complete()
    bucket.put(1, torch.ones(7), 1.0)
    assert bucket.is_complete()


def test_bucket_of_idle_parameters_is_not_complete_before_anything_arrived():
    bucket = make()
    bucket.idle_steps = [IDLE_STEPS_UNTIL_ABSENT] * 3
    assert not bucket.is_complete()


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_gradient_of_the_shard_has_the_wider_dtype(dtype, wire_dtype, expected):
    bucket = make(dtype=dtype, wire_dtype=wire_dtype)
    reduce(bucket, {0: 1.0, 1: 1.0, 2: 1.0})
    assert bucket.shard_grad.dtype is expected
    assert all(p.grad.dtype is dtype for p in bucket.parameters)


def test_nothing_is_allocated_before_the_first_reduction():
    bucket = make()
    assert bucket.held_shard_grad() is None
    assert bucket.shard_grad is bucket.held_shard_grad()


def test_collecting_without_a_buffer_is_an_error():
    with pytest.raises(AssertionError, match="bucket 0 has no gradient buffer"):
        make().put(0, torch.ones(4, 8), 1.0)
