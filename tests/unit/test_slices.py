"""Slices of parameters, and who may be whole while a model is built."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.plan.slices import (
    WholeParameters,
    cut_at_slices,
    slice_numel,
    slice_range,
)


@given(st.integers(0, 200), st.integers(1, 9))
def test_slices_lie_end_to_end(numel, world_size):
    ranges = [slice_range(numel, world_size, rank) for rank in range(world_size)]
    assert [n for begin, end in ranges for n in range(begin, end)] == list(range(numel))
    longest = max(end - begin for begin, end in ranges)
    assert longest == slice_numel(numel, world_size) or numel == 0


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 60))
def test_a_range_is_cut_where_slices_meet(length, begin, end):
    found = [
        rank * length + at + n
        for rank, at, count in cut_at_slices(begin, end, length)
        for n in range(count)
    ]
    assert found == list(range(begin, end))
    assert all(at + count <= length for _, at, count in cut_at_slices(begin, end, length))


def whole(capacity, *members):
    """Members given as (name, elements, group), used in this order."""
    found = WholeParameters(capacity)
    for name, numel, group in members:
        found.saw(numel)
        found.use(name, numel, group)
    return found


def test_groups_leave_together_the_longest_unused_first():
    found = whole(400, ("a", 40, 1), ("b", 50, 2), ("c", 5, 1), ("d", 60, 3))
    assert found.numel == 155
    assert found.leaving(2) == ["b", "a", "c"]  # 106 may be whole: a quarter, and a sixteenth of it
    assert "d" in found
    assert "a" not in found
    assert found.numel == 60


def test_the_largest_group_may_stay_whatever_the_capacity():
    found = whole(4, ("weight", 900, 1), ("bias", 30, 1))
    assert found.leaving(0) == []
    assert found.leaving(58) == []  # a sixteenth more
    assert found.leaving(59) == ["weight", "bias"]


def test_what_comes_next_counts_and_may_be_larger_than_all():
    found = whole(40, ("a", 8, 1))
    assert found.leaving(1000) == []
    found = whole(40, ("a", 80, 1))
    assert found.leaving(1000) == ["a"]


def test_a_group_in_use_is_kept():
    found = whole(40, ("a", 80, 1), ("b", 80, 2))
    assert found.leaving(80, keep=2) == ["a"]
    assert found.leaving(80, keep=2) == []
    assert "b" in found


def test_a_member_can_move_to_another_group():
    found = whole(400, ("tied", 90, 1), ("other", 10, 2), ("tied", 90, 3))
    assert found.numel == 100
    assert found.leaving(60) == ["other", "tied"]


def test_default_capacity_follows_the_size_of_the_model():
    small = whole(None, *((n, 1000, n) for n in range(8)))
    assert small.leaving(0) == []  # a quarter of the least bucket, 32 Ki
    small = whole(None, *((n, 1000, n) for n in range(20)))
    assert small.leaving(0) == list(range(12))
    large = whole(None, *((n, 1_000_000, n) for n in range(40)))
    assert large.numel == 40_000_000
    assert len(large.leaving(0)) == 39


def test_clear_takes_all_out():
    found = whole(400, ("a", 4, 1), ("b", 5, 2), ("a", 4, 1))
    assert found.clear() == ["b", "a"]
    assert found.numel == 0
    assert found.clear() == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50), st.integers(0, 4)), max_size=60),
    st.integers(1, 300),
)
def test_no_more_is_whole_than_allowed(uses, capacity):
    found = WholeParameters(capacity)
    sizes, groups = {}, {}
    largest = 0
    for member, numel, group in uses:
        if member not in sizes:
            sizes[member] = numel
            found.saw(numel)
        found.leaving(sizes[member] if member not in found else 0, keep=group)
        found.use(member, sizes[member], group)
        groups = {m: g for m, g in groups.items() if m in found} | {member: group}
        for one in set(groups.values()):
            largest = max(largest, sum(sizes[m] for m, g in groups.items() if g == one))
        own = sum(sizes[m] for m, g in groups.items() if g == group)
        limit = max(capacity // 4, largest, sizes[member])
        assert found.numel <= max(limit + limit // 16, own)
