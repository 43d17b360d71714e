"""The C allocator of the host.

[Note: page faults]
glibc gives freed memory at the end of its heap back to the system. Activations and buffers come and
go in every step, so their pages are handed out anew, zeroed, each time: 43,000 page faults in a
step of a 50 M model against 60, and 4 to 8 % of its time, by the luck of what lies last in the
heap.
"""

from __future__ import annotations

import ctypes
import functools

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MMAP_THRESHOLD_NBYTES = 32 * 2**20
"""The largest that glibc takes: larger blocks are mapped one by one, and go back when freed."""
TRIM_THRESHOLD_NBYTES = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed, for its next step.

    Returns:
        False where the C library is not glibc; nothing has changed then.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_NBYTES)
        and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_NBYTES)
    )
