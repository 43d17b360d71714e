"""Properties of bucket layouts that must hold for any model and any number of ranks."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.plan.layout import (
    MAX_BUCKET_NUMEL,
    MIN_BUCKET_NUMEL,
    ParameterSpec,
    default_bucket_numel,
    plan_buckets,
)

KINDS = ("fp32", "bf16", "frozen")

shapes = st.one_of(
    st.just(()),
    st.sampled_from([(0,), (0, 3), (1,), (1, 1)]),
    st.tuples(st.integers(1, 9)),
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
parameters = st.lists(
    st.tuples(shapes, st.sampled_from(KINDS), st.booleans()), min_size=0, max_size=12
)
plans = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 9),
        "bucket_numel": st.sampled_from([1, 7, 64, 300, 10_000]),
        "align_numel": st.sampled_from([1, 4, 8, 16, 32]),
        "shard_by": st.sampled_from(["element", "tensor"]),
    }
)


def contiguous(shape):
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


def specs_of(chosen):
    """Specs whose unit changes where a flag says so."""
    units = itertools.accumulate(int(opens_unit) for _, _, opens_unit in chosen)
    return [
        ParameterSpec(f"p{number}", shape, contiguous(shape), kind, unit)
        for number, ((shape, kind, _), unit) in enumerate(zip(chosen, units, strict=True))
    ]


def placed(buckets):
    """Bucket, rank, name and piece of all pieces."""
    for bucket in buckets:
        for rank in range(bucket.world_size):
            for piece in bucket.pieces(rank):
                yield bucket, rank, bucket.slots[piece.slot].fqn, piece


@settings(max_examples=60)
@given(parameters, plans)
def test_every_element_lies_in_exactly_one_piece(chosen, plan):
    specs = specs_of(chosen)
    buckets = plan_buckets(specs, **plan)
    names = [slot.fqn for bucket in buckets for slot in bucket.slots]
    assert sorted(names) == sorted(spec.fqn for spec in specs)
    covered = defaultdict(list)
    for _, _, fqn, piece in placed(buckets):
        assert piece.numel >= 1
        covered[fqn] += range(piece.param_offset, piece.param_offset + piece.numel)
    for spec in specs:
        assert sorted(covered[spec.fqn]) == list(range(spec.numel)), spec


@settings(max_examples=60)
@given(parameters, plans)
def test_pieces_lie_in_their_shard_at_their_parameters_place(chosen, plan):
    buckets = plan_buckets(specs_of(chosen), **plan)
    for bucket, rank, _, piece in placed(buckets):
        begin, end = bucket.shard_range(rank)
        in_bucket = begin + piece.shard_offset
        assert begin <= in_bucket
        assert in_bucket + piece.numel <= end
        assert in_bucket == bucket.slots[piece.slot].offset + piece.param_offset


@settings(max_examples=60)
@given(parameters, plans)
def test_shards_are_equal_and_aligned(chosen, plan):
    for bucket in plan_buckets(specs_of(chosen), **plan):
        ranges = [bucket.shard_range(rank) for rank in range(plan["world_size"])]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == bucket.padded_numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
        assert {end - begin for begin, end in ranges} == {bucket.shard_numel}
        assert bucket.shard_numel >= 1
        assert all(begin % plan["align_numel"] == 0 for begin, _ in ranges)


@settings(max_examples=60)
@given(parameters, plans)
def test_slots_are_aligned_and_cover_the_bucket_with_the_gaps(chosen, plan):
    for bucket in plan_buckets(specs_of(chosen), **plan):
        assert all(slot.offset % plan["align_numel"] == 0 for slot in bucket.slots)
        assert all(slot.end <= bucket.padded_numel for slot in bucket.slots)
        slots = [(slot.offset, slot.end) for slot in bucket.slots if slot.numel]
        ranges = sorted([*slots, *bucket.gaps()])
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == bucket.padded_numel
        assert bucket.numel + sum(end - begin for begin, end in bucket.gaps()) == (
            bucket.padded_numel
        )


@settings(max_examples=60)
@given(parameters, plans)
def test_kinds_never_share_a_bucket(chosen, plan):
    specs = specs_of(chosen)
    kind_of = {spec.fqn: spec.kind for spec in specs}
    buckets = plan_buckets(specs, **plan)
    for index, bucket in enumerate(buckets):
        assert bucket.index == index
        assert {kind_of[slot.fqn] for slot in bucket.slots} == {bucket.kind}


@settings(max_examples=60)
@given(parameters, plans)
def test_bucket_is_over_capacity_only_for_its_last_unit(chosen, plan):
    specs = specs_of(chosen)
    unit_of = {spec.fqn: spec.unit for spec in specs}
    is_whole = plan["shard_by"] == "tensor"
    capacity = plan["bucket_numel"] * (plan["world_size"] if is_whole else 1)
    for bucket in plan_buckets(specs, **plan):
        numel_of = defaultdict(int)
        for slot in bucket.slots:
            numel_of[unit_of[slot.fqn]] += slot.numel
        before_last = bucket.numel - numel_of[max(numel_of)]
        assert before_last <= capacity
        if bucket.numel > capacity:  # what is joined by a large unit is small
            assert before_last * 8 <= capacity


@settings(max_examples=60)
@given(parameters, plans)
def test_units_of_a_kind_stay_together_and_in_model_order(chosen, plan):
    specs = specs_of(chosen)
    spec_of = {spec.fqn: spec for spec in specs}
    place = {s.fqn: bucket.index for bucket in plan_buckets(specs, **plan) for s in bucket.slots}
    for kind in KINDS:
        members = [spec for spec in specs if spec.kind == kind]
        assert [place[s.fqn] for s in members] == sorted(place[s.fqn] for s in members)
        for a, b in itertools.pairwise(members):
            if spec_of[a.fqn].unit == spec_of[b.fqn].unit:
                assert place[a.fqn] == place[b.fqn]


@settings(max_examples=60)
@given(parameters, plans)
def test_whole_placement_keeps_each_parameter_on_one_rank(chosen, plan):
    specs = specs_of(chosen)
    buckets = plan_buckets(specs, **{**plan, "shard_by": "tensor"})
    ranks = defaultdict(list)
    for _, rank, fqn, piece in placed(buckets):
        ranks[fqn].append((rank, piece.param_offset, piece.numel))
    for spec in specs:
        found = ranks[spec.fqn]
        assert len(found) == (1 if spec.numel else 0), spec
        assert all((offset, numel) == (0, spec.numel) for _, offset, numel in found)


@settings(max_examples=60)
@given(parameters, plans)
def test_whole_placement_is_balanced(chosen, plan):
    """Largest first: no rank holds more than an even share and one parameter."""
    align = plan["align_numel"]
    for bucket in plan_buckets(specs_of(chosen), **{**plan, "shard_by": "tensor"}):
        aligned = [-(-slot.numel // align) * align for slot in bucket.slots]
        assert bucket.shard_numel <= max(sum(aligned) / plan["world_size"] + max(aligned), align)


def test_whole_placement_puts_the_largest_first_on_the_emptiest_rank():
    lengths = [10, 60, 20, 30]
    specs = specs_of([((length,), "fp32", False) for length in lengths])
    (bucket,) = plan_buckets(
        specs, world_size=2, bucket_numel=1000, align_numel=1, shard_by="tensor"
    )
    held = [{bucket.slots[piece.slot].numel for piece in bucket.pieces(r)} for r in (0, 1)]
    assert held == [{60}, {10, 20, 30}]
    assert bucket.padded_numel == sum(lengths)


@settings(max_examples=60)
@given(parameters, plans, plans, st.integers(0, 2**32))
def test_values_survive_a_change_of_world_size_and_sharding(chosen, old_plan, new_plan, seed):
    """From the pieces of one layout to those of another by intervals alone, and all back."""
    specs = specs_of(chosen)
    draw = random.Random(seed)
    values = {spec.fqn: [draw.random() for _ in range(spec.numel)] for spec in specs}
    old, new = plan_buckets(specs, **old_plan), plan_buckets(specs, **new_plan)
    old_shards = _shards(old, values)
    pieces_by_name = defaultdict(list)
    for bucket, rank, fqn, piece in placed(old):
        pieces_by_name[fqn].append((old_shards[bucket.index, rank], piece))
    new_shards = _empty_shards(new)
    for bucket, rank, fqn, target in placed(new):
        shard = new_shards[bucket.index, rank]
        for source_shard, source in pieces_by_name[fqn]:
            first = max(source.param_offset, target.param_offset)
            last = min(
                source.param_offset + source.numel,
                target.param_offset + target.numel,
            )
            for element in range(first, last):
                shard[target.shard_offset + element - target.param_offset] = source_shard[
                    source.shard_offset + element - source.param_offset
                ]
    assert new_shards == _shards(new, values)


def _empty_shards(buckets):
    return {
        (bucket.index, rank): [0.0] * bucket.shard_numel
        for bucket in buckets
        for rank in range(bucket.world_size)
    }


def _shards(buckets, values):
    """Shards cut from flat tensors that were filled by slots, not by pieces."""
    shards = {}
    for bucket in buckets:
        flat = [0.0] * bucket.padded_numel
        for slot in bucket.slots:
            flat[slot.offset : slot.end] = values[slot.fqn]
        for rank in range(bucket.world_size):
            begin, end = bucket.shard_range(rank)
            shards[bucket.index, rank] = flat[begin:end]
    return shards


def test_no_parameters_make_no_bucket():
    assert plan_buckets([], world_size=3, bucket_numel=10, align_numel=4) == ()


def test_small_leftover_joins_the_next_unit_instead_of_a_collective_of_its_own():
    specs = specs_of([((3,), "fp32", False), ((90,), "fp32", True), ((90,), "fp32", True)])
    buckets = plan_buckets(specs, world_size=2, bucket_numel=80, align_numel=4)
    assert [[slot.fqn for slot in bucket.slots] for bucket in buckets] == [["p0", "p1"], ["p2"]]


def test_frozen_parameters_do_not_split_the_trainable_bucket_around_them():
    specs = specs_of([((5,), "fp32", True), ((5,), "frozen", True), ((5,), "fp32", True)])
    buckets = plan_buckets(specs, world_size=1, bucket_numel=100, align_numel=1)
    assert [[slot.fqn for slot in bucket.slots] for bucket in buckets] == [["p0", "p2"], ["p1"]]


@pytest.mark.parametrize("name", ["world_size", "bucket_numel", "align_numel"])
def test_count_below_one_is_refused(name):
    counts = {"world_size": 1, "bucket_numel": 1, "align_numel": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        plan_buckets([], **counts)


@pytest.mark.parametrize(
    ("total_numel", "expected"),
    [
        (0, MIN_BUCKET_NUMEL),
        (12 * MIN_BUCKET_NUMEL, MIN_BUCKET_NUMEL),
        (12_000_001, 1_000_001),
        (10**12, MAX_BUCKET_NUMEL),
    ],
)
def test_default_bucket_is_a_twelfth_of_the_model_within_limits(total_numel, expected):
    assert default_bucket_numel(total_numel) == expected
