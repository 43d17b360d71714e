"""Keeps the threads of a process on some cores, so that a worker has the others for itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from contextlib import suppress

import torch

THREADS = "/proc/self/task"


class BoundThreads:
    """Binds all threads of this process, and what they start from now on, until it is released.

    As many threads compute as there are cores, at most.

    Args:
        cores: Where they may run.
    """

    def __init__(self, cores: Collection[int]) -> None:
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        _bind(cores)
        torch.set_num_threads(min(threads, len(cores)))
        self._release = weakref.finalize(self, _release, before, threads)

    def release(self) -> None:
        """Let them run where they might before."""
        self._release()


def _release(cores: Collection[int], threads: int) -> None:
    _bind(cores)
    torch.set_num_threads(threads)


def _bind(cores: Collection[int]) -> None:
    for thread in os.listdir(THREADS):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
