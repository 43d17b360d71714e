"""Cores of a host, shared among ranks and their workers."""

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_zero.plan.cores import share_cores


@pytest.mark.parametrize(
    ("masks", "share", "expected"),
    [
        ([[0, 1]], 0.8, [([0], [1])]),
        ([range(10)], 0.8, [([0, 1], [*range(2, 10)])]),
        ([range(10)], 1.0, [([0], [*range(1, 10)])]),
        ([range(10)], 0.0, [([*range(9)], [9])]),
        ([range(8)] * 2, 0.5, [([0, 1], [2, 3]), ([4, 5], [6, 7])]),
        ([[0, 1, 2], [5, 6, 7]], 0.6, [([0], [1, 2]), ([5], [6, 7])]),
        ([range(5)] * 2, 0.5, [([0], [1]), ([2], [3, 4])]),
        ([[0, 1, 2, 3], [2, 3, 4, 5]], 0.5, [([0], [1, 2]), ([3], [4, 5])]),
    ],
)
def test_each_has_its_own(masks, share, expected):
    found = share_cores(masks, share)
    assert [(list(one.trainer), list(one.worker)) for one in found] == expected
    assert not any(one.is_contested for one in found)


@pytest.mark.parametrize("masks", [[[3]], [[0, 1]] * 2, [[0]] * 3, [[0, 1], [1]]])
def test_with_less_than_two_each_they_take_turns(masks):
    found = share_cores(masks, 0.8)
    for one, mask in zip(found, masks, strict=True):
        if one.is_contested:
            assert one.trainer == one.worker
        assert one.trainer
        assert set(one.trainer) | set(one.worker) <= set(mask)
    assert any(one.is_contested for one in found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cores", [1, 2, 7, 16, 61])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.8, 1.0])
def test_no_core_has_two_users_unless_there_are_too_few(ranks, cores, share):
    found = share_cores([range(100, 100 + cores)] * ranks, share)
    assert any(one.is_contested for one in found) == (cores < 2 * ranks)
    if cores >= 2 * ranks:
        users = [set(part) for one in found for part in (one.trainer, one.worker)]
        assert all(users)
        assert all(a.isdisjoint(b) for a, b in combinations(users, 2))
        assert set().union(*users) == set(range(100, 100 + cores))
