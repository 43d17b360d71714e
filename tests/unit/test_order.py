"""The order of bucket uses that prefetching follows."""

from __future__ import annotations

from lightning_zero.prefetch.order import UseOrder


def learned(*uses):
    order = UseOrder()
    for use in uses:
        order.use(use)
    order.restart()
    return order


def test_first_pass_expects_nothing():
    order = UseOrder()
    order.use(0)
    assert order.next_use() is None
    assert order.next_other(0) is None


def test_next_pass_follows_the_one_before():
    order = learned(0, 1, 2)
    expected = []
    for use in (0, 1, 2):
        expected.append(order.next_use())
        order.use(use)
    assert expected == [0, 1, 2]
    assert order.next_use() is None


def test_repeated_use_of_one_bucket_is_skipped_by_next_other_only():
    order = learned(0, 0, 0, 1)
    order.use(0)
    assert order.next_use() == 0
    assert order.next_other(0) == 1


def test_pass_that_leaves_the_order_is_followed_from_the_next_known_use():
    order = learned(0, 1, 2, 3)
    order.use(0)
    order.use(7)
    assert order.next_use() == 1
    order.use(2)
    assert order.next_use() == 3


def test_use_that_lies_behind_does_not_turn_the_order_back():
    order = learned(0, 1, 2)
    order.use(0)
    order.use(1)
    order.use(0)
    assert order.next_use() == 2


def test_new_order_replaces_the_old_one():
    order = learned(0, 1)
    order.use(1)
    order.use(0)
    order.restart()
    assert order.next_use() == 1
    assert order.next_other(1) == 0


def test_empty_pass_keeps_what_was_learned():
    order = learned(4, 5)
    order.restart()
    assert order.next_use() == 4
