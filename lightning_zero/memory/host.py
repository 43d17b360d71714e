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
mapped one by one go back whole.
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
"""While a model is built, blocks from this size on are mapped one by one."""


def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed, for its next step; see [Note: page faults].

    Returns:
        False where the C library is not glibc; nothing has changed then.
    """
    return _tune(MMAP_THRESHOLD_NBYTES, TRIM_THRESHOLD_NBYTES)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """While inside, large blocks are taken from the system and given back; see [Note: holes].

    After it, freed memory stays as far as it would in a process that has run for a while.
    """
    _tune(SINGLE_BLOCK_NBYTES, SINGLE_BLOCK_NBYTES)
    try:
        yield
    finally:
        _tune(MMAP_THRESHOLD_NBYTES, 2 * MMAP_THRESHOLD_NBYTES)


def _tune(mmap_threshold_nbytes: int, trim_threshold_nbytes: int) -> bool:
    mallopt = _mallopt()
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, mmap_threshold_nbytes)
        and mallopt(M_TRIM_THRESHOLD, trim_threshold_nbytes)
    )


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """The function of glibc; None where the C library is another one."""
    try:
        found: Callable[[int, int], int] = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return None
    return found
