"""The C allocator of the host.

[Note: page faults]
glibc gives freed memory at the end of its heap back to the system. Activations and buffers come and
go in every step, so their pages are handed out anew, zeroed, each time: 43,000 page faults in a
step of a 50 M model against 60, and 4 to 8 % of its time, by the luck of what lies last in the
heap.

[Note: holes]
While a model is built sharded, large parameters are freed and small slices stay. On a heap the
slices lie in the holes of the parameters, the next parameter does not fit there, and the process
takes most of the memory that sharding saves (95 of 108 MiB measured, on 4 ranks). Blocks that are
mapped one by one go back whole. Gradient shards come to stay between the buffers of the first
backward, and would do the same.

[Note: scarce memory]
An aligned block is cut out of a larger one, so what is freed does not hold a tensor of its own size
again. A model of 288 MiB on 4 ranks took 200 to 320 MiB on each, by luck; with every large block
mapped apart it takes 165 to 185. So a model that does not fit into memory whole is trained that
way, at the price of [Note: page faults].
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MMAP_THRESHOLD_NBYTES = 32 * 2**20
"""The largest that glibc takes: larger blocks are mapped one by one, and go back when freed."""
TRIM_THRESHOLD_NBYTES = 2**31 - 1

SINGLE_BLOCK_NBYTES = 2**17
"""Where blocks are to lie apart, those from this size on are mapped one by one."""


def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed, for its next step; see [Note: page faults].

    Returns:
        False where the C library is not glibc; nothing has changed then.
    """
    global _usual
    _usual = (MMAP_THRESHOLD_NBYTES, TRIM_THRESHOLD_NBYTES)
    return _tune(*_usual)


def give_freed_memory_back() -> bool:
    """Let this process give back at once what it frees; see [Note: scarce memory].

    Returns:
        As :func:`keep_freed_memory`.
    """
    global _usual
    _usual = (SINGLE_BLOCK_NBYTES, SINGLE_BLOCK_NBYTES)
    return _tune(*_usual)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """While inside, large blocks are taken from the system and given back; see [Note: holes]."""
    _tune(SINGLE_BLOCK_NBYTES, SINGLE_BLOCK_NBYTES)
    try:
        yield
    finally:
        _tune(*_usual)


def _tune(mmap_threshold_nbytes: int, trim_threshold_nbytes: int) -> bool:
    mallopt = _mallopt()
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, mmap_threshold_nbytes)
        and mallopt(M_TRIM_THRESHOLD, trim_threshold_nbytes)
    )


_usual = (MMAP_THRESHOLD_NBYTES, 2 * MMAP_THRESHOLD_NBYTES)
"""Thresholds outside: at first as far as in a process that has run for a while."""


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """The function of glibc; None where the C library is another one."""
    try:
        found: Callable[[int, int], int] = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return None
    return found
