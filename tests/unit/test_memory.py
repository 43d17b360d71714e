"""Buffers that are used again, and bytes that are counted once."""

from __future__ import annotations

import torch

from lightning_zero.memory.measure import storage_nbytes
from lightning_zero.memory.pool import BufferPool


def test_buffer_given_back_is_taken_again():
    pool = BufferPool(torch.device("cpu"))
    first = pool.take(8, torch.float32)
    second = pool.take(8, torch.float32)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take(8, torch.float32) is first


def test_buffer_of_another_dtype_or_too_small_is_a_new_one():
    pool = BufferPool(torch.device("cpu"))
    held = pool.take(8, torch.float32)
    pool.give(held)
    assert pool.take(8, torch.bfloat16).dtype is torch.bfloat16
    assert pool.take(9, torch.float32).shape == (9,)
    assert pool.take(8, torch.float32) is held


def test_part_of_a_larger_buffer_is_given_back_as_the_whole():
    pool = BufferPool(torch.device("cpu"))
    large, small = pool.take(8, torch.float32), pool.take(5, torch.float32)
    pool.give(large)
    pool.give(small)
    part = pool.take(4, torch.float32)
    assert part.shape == (4,)
    assert part.data_ptr() == small.data_ptr()  # the smallest that fits
    assert pool.take(4, torch.float32).data_ptr() == large.data_ptr()
    pool.give(part)
    assert pool.take(5, torch.float32).data_ptr() == small.data_ptr()


def test_cleared_pool_holds_nothing():
    pool = BufferPool(torch.device("cpu"))
    held = pool.take(8, torch.float32)
    pool.give(held)
    pool.clear()
    assert pool.take(8, torch.float32) is not held


def test_storages_are_counted_once_and_in_full():
    flat = torch.zeros(10)
    views = [flat[:3], flat[5:].view(5, 1), flat]
    assert storage_nbytes(views) == 40
    assert storage_nbytes([*views, torch.zeros(2, dtype=torch.float64)]) == 56


def test_expanded_and_empty_tensors_cost_what_they_hold():
    assert storage_nbytes([torch.zeros(1).expand(1000)]) == 4
    assert storage_nbytes([torch.zeros(0), torch.zeros(0, 5)]) == 0
    assert storage_nbytes([]) == 0
