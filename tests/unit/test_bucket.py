"""States and storage of a parameter bucket, and what users see while it is away."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.params.bucket import LEGAL_TRANSITIONS, ParameterBucket, ParamStatus
from lightning_zero.params.dense import fingerprint
from lightning_zero.plan.layout import ParameterSpec, plan_buckets

AWAY, INFLIGHT, AVAILABLE = (
    ParamStatus.NOT_AVAILABLE,
    ParamStatus.INFLIGHT,
    ParamStatus.AVAILABLE,
)


def layout_of(parameters, world_size=1, **plan):
    specs = [
        ParameterSpec(f"p{n}", tuple(p.shape), p.stride(), p.dtype, n)
        for n, p in enumerate(parameters)
    ]
    plan = {"bucket_numel": 10**6, "align_numel": 16, **plan}
    (layout,) = plan_buckets(specs, world_size=world_size, **plan)
    return layout


def make_bucket(parameters, is_resident=False):
    """A bucket that is available, at first."""
    bucket = ParameterBucket(
        layout_of(parameters), parameters, choose_collectives(None), is_resident=is_resident
    )
    if not is_resident:
        bucket.begin_unshard(key=0)
        bucket.wait()
    return bucket


def some_parameters():
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape, generator=generator))
        for shape in [(3, 5), (), (0, 4), (7,)]
    ]


def copies(parameters):
    return [p.detach().clone() for p in parameters]


def all_equal(parameters, expected):
    return all(torch.equal(p.detach(), e) for p, e in zip(parameters, expected, strict=True))


class Peers(type(choose_collectives(None))):
    """Rank 1 of 2, alone: gathers write what the other rank would have sent."""

    def __init__(self, other_shard=None, error=None):
        super().__init__()
        self.rank, self.world_size = 1, 2
        self.other_shard, self.error = other_shard, error

    def all_gather(self, flat, shard, key):
        assert torch.equal(flat[shard.numel() :], shard)
        self.flat = flat
        return self

    def wait(self, timeout=None):
        if self.error is not None:
            raise self.error
        self.flat[: self.other_shard.numel()] = self.other_shard


def test_table_of_transitions_is_the_documented_one():
    documented = {AWAY: {INFLIGHT}, INFLIGHT: {AVAILABLE}, AVAILABLE: {AWAY, INFLIGHT}}
    assert documented == LEGAL_TRANSITIONS


@pytest.mark.parametrize(
    ("start", "step"), list(itertools.product(ParamStatus, ("begin", "reshard")))
)
def test_step_that_the_table_forbids_raises_with_both_states(start, step):
    bucket = make_bucket(some_parameters())
    reach(bucket, start)
    target = INFLIGHT if step == "begin" else AWAY
    run = (lambda: bucket.begin_unshard(0)) if step == "begin" else bucket.reshard
    if target in LEGAL_TRANSITIONS[start]:
        run()
        assert bucket.status is target
    else:
        with pytest.raises(RuntimeError, match=f"cannot go from {start.value} to {target.value}"):
            run()
        assert bucket.status is start


def reach(bucket, status):
    if status is not AVAILABLE:
        bucket.reshard()
    if status is INFLIGHT:
        bucket.begin_unshard(0)


def test_wait_for_a_bucket_that_nobody_asked_for_raises():
    bucket = make_bucket(some_parameters())
    bucket.wait()
    bucket.reshard()
    with pytest.raises(RuntimeError, match="while not available"):
        bucket.wait()


@pytest.mark.parametrize("is_resident", [False, True])
def test_new_bucket_holds_the_initial_values(is_resident):
    parameters = some_parameters()
    expected = copies(parameters)
    bucket = make_bucket(parameters, is_resident)
    assert bucket.status is AVAILABLE
    assert all_equal(parameters, expected)
    flat_storage = bucket.flat.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == flat_storage for p in parameters)


def test_padding_is_zero():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    assert bucket.layout.gaps()
    for begin, end in bucket.layout.gaps():
        assert not bucket.flat[begin:end].any()


@pytest.mark.parametrize("status", [AWAY, INFLIGHT])
def test_shapes_are_true_and_values_nan_while_away(status):
    parameters = some_parameters()
    shapes = [p.shape for p in parameters]
    bucket = make_bucket(parameters)
    reach(bucket, status)
    assert [p.shape for p in parameters] == shapes
    assert all(p.isnan().all() for p in parameters)
    assert (parameters[0] @ torch.ones(5)).isnan().all()


def test_released_bucket_holds_its_shard_only():
    bucket = make_bucket(some_parameters())
    bucket.reshard()
    assert bucket.flat.untyped_storage().nbytes() == 0
    assert bucket.shard.numel() == bucket.layout.shard_numel
    assert len(set(bucket.placeholder_pointers())) == len(bucket.parameters)


def test_values_come_back_after_any_number_of_reshards():
    parameters = some_parameters()
    expected = copies(parameters)
    bucket = make_bucket(parameters)
    key = bucket.storage_key()
    for _ in range(3):
        bucket.reshard()
        bucket.begin_unshard(0)
        bucket.wait()
        assert all_equal(parameters, expected)
        assert bucket.storage_key() == key


def test_view_taken_before_a_reshard_keeps_its_values():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    view, expected = parameters[0].detach().t()[1:], parameters[0].detach().clone().t()[1:]
    bucket.reshard()
    bucket.begin_unshard(0)
    bucket.wait()
    assert torch.equal(view, expected)
    assert torch.equal(parameters[0].detach().t()[1:], expected)
    assert view.data_ptr() != parameters[0].detach().t()[1:].data_ptr()


def test_storage_that_nobody_else_holds_is_used_again():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    key = bucket.storage_key()
    for _ in range(3):
        assert not bucket.is_aliased()
        bucket.reshard()
        assert bucket.flat.untyped_storage().nbytes() == 0
        bucket.begin_unshard(0)
        bucket.wait()
        view = parameters[0].detach()
        assert bucket.is_aliased()
        del view
    assert bucket.storage_key() == key


def test_fingerprint_tells_any_write_through_data():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    before = fingerprint(bucket.flat)
    assert fingerprint(bucket.flat) == before
    values = parameters[0].data.flatten()
    first, last = values[0].item(), values[-1].item()
    parameters[0].data.view(-1)[0], parameters[0].data.view(-1)[-1] = last, first  # the sum stays
    assert fingerprint(bucket.flat) != before
    assert not bucket.was_written()


def test_gather_brings_the_other_ranks_part():
    parameters = [nn.Parameter(torch.arange(40.0))]
    collectives = Peers()
    bucket = ParameterBucket(layout_of(parameters, 2), parameters, collectives, is_resident=False)
    assert bucket.rank == 1
    assert torch.equal(bucket.shard[:8], torch.arange(32.0, 40.0))
    assert bucket.status is AWAY
    assert parameters[0].isnan().all()
    collectives.other_shard = torch.full((32,), 5.0)
    bucket.begin_unshard(0)
    assert parameters[0].isnan().all()
    bucket.wait()
    assert torch.equal(parameters[0], torch.cat([torch.full((32,), 5.0), torch.arange(32.0, 40.0)]))


def test_failed_gather_names_the_rank_and_the_bucket():
    parameters = [nn.Parameter(torch.arange(40.0))]
    collectives = Peers(error=RuntimeError("connection closed by peer"))
    bucket = ParameterBucket(layout_of(parameters, 2), parameters, collectives, is_resident=False)
    bucket.begin_unshard(0)
    with pytest.raises(RuntimeError, match=r"rank 1 could not gather bucket 0 \(p0\).*by peer"):
        bucket.wait()


WRITES = {
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(2.0),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "mul_": lambda p: p.mul_(2.0),
    "add_nan": lambda p: p.add_(float("nan")),
    "index": lambda p: p.__setitem__(..., 1.0),
    "normal_": lambda p: nn.init.normal_(p),
    "data_zero_": lambda p: p.data.zero_(),
    "data_copy_": lambda p: p.data.copy_(torch.ones_like(p)),
    "data_nan_to_num_": lambda p: p.data.nan_to_num_(0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("slot", [0, 1], ids=["matrix", "scalar"])
def test_write_while_released_raises_at_once_or_at_the_next_unshard(write, slot):
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    bucket.reshard()

    def write_and_use():
        with torch.no_grad():
            WRITES[write](parameters[slot])
        bucket.begin_unshard(0)

    with pytest.raises(RuntimeError, match="would be lost|refers to a single memory location"):
        write_and_use()


@pytest.mark.parametrize("is_resident", [False, True])
def test_write_to_available_parameters_is_noticed(is_resident):
    parameters = some_parameters()
    bucket = make_bucket(parameters, is_resident)
    assert not bucket.was_written()
    with torch.no_grad():
        parameters[0].add_(1.0)
    assert bucket.was_written()


def test_written_values_survive_a_reshard_if_they_are_kept():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    with torch.no_grad():
        parameters[3].fill_(4.0)
    bucket.keep_written_values()
    bucket.reshard()
    bucket.begin_unshard(0)
    bucket.wait()
    assert torch.equal(parameters[3], torch.full((7,), 4.0))
    assert not bucket.was_written()


def test_stored_shard_is_what_the_next_unshard_brings():
    parameters = some_parameters()
    bucket = make_bucket(parameters)
    bucket.reshard()
    bucket.store_shard(torch.arange(bucket.layout.shard_numel, dtype=torch.float64))
    bucket.begin_unshard(0)
    bucket.wait()
    assert torch.equal(parameters[0].flatten(), torch.arange(15.0))


def test_resident_shard_is_a_view_so_an_update_shows_at_once():
    parameters = some_parameters()
    bucket = make_bucket(parameters, is_resident=True)
    bucket.store_shard(torch.ones(bucket.layout.shard_numel))
    assert all_equal(parameters, [torch.ones_like(p) for p in parameters])
    with torch.no_grad():
        parameters[0].fill_(3.0)
    assert bucket.shard[0] == 3.0


def test_resident_bucket_keeps_its_storage_through_a_publish():
    parameters = some_parameters()
    bucket = make_bucket(parameters, is_resident=True)
    expected, pointer = copies(parameters), bucket.flat.data_ptr()
    bucket.begin_unshard(0)
    assert all(p.isnan().all() for p in parameters)
    bucket.wait()
    assert all_equal(parameters, expected)
    assert bucket.flat.data_ptr() == pointer


def test_memory_order_is_kept():
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    parameters = [nn.Parameter(weight.to(memory_format=torch.channels_last))]
    stride = parameters[0].stride()
    bucket = make_bucket(parameters)
    assert parameters[0].stride() == stride
    bucket.reshard()
    bucket.begin_unshard(0)
    bucket.wait()
    assert parameters[0].stride() == stride
    assert parameters[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(parameters[0], weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_integer_parameters_read_as_their_smallest_value_while_away(dtype):
    values = torch.arange(9).to(dtype)
    parameters = [nn.Parameter(values.clone(), requires_grad=False)]
    bucket = make_bucket(parameters)
    bucket.reshard()
    assert (parameters[0] == torch.iinfo(dtype).min).all()
    bucket.begin_unshard(0)
    bucket.wait()
    assert torch.equal(parameters[0], values)


def test_bool_parameter_comes_back():
    values = torch.tensor([True, False, True])
    parameters = [nn.Parameter(values.clone(), requires_grad=False)]
    bucket = make_bucket(parameters)
    bucket.reshard()
    bucket.begin_unshard(0)
    bucket.wait()
    assert torch.equal(parameters[0], values)


@pytest.mark.parametrize("is_resident", [False, True])
def test_restored_parameters_own_their_values(is_resident):
    parameters = some_parameters()
    expected = copies(parameters)
    bucket = make_bucket(parameters, is_resident)
    bucket.restore_parameters()
    assert all_equal(parameters, expected)
    nbytes = [p.untyped_storage().nbytes() for p in parameters]
    assert nbytes == [4 * p.numel() for p in parameters]


def test_restoring_a_released_bucket_raises():
    bucket = make_bucket(some_parameters())
    bucket.reshard()
    with pytest.raises(RuntimeError, match=r"restore_parameters\(\) while not available"):
        bucket.restore_parameters()


def test_bucket_is_named_by_its_parameters():
    assert str(make_bucket(some_parameters())) == "bucket 0 (p0, ..., p3)"
    assert str(make_bucket(some_parameters()[:2])) == "bucket 0 (p0, p1)"
