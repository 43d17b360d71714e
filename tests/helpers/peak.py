"""The most memory that tensors had at one time, as torch's allocator tells its profiler."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Bytes beyond what was there at the beginning."""

    nbytes: int = 0
    """The most at any time."""

    end_nbytes: int = 0
    """What is left at the end."""


@contextmanager
def counted_peak() -> Iterator[Peak]:
    """Count every allocation of host memory inside, by whomever and however short."""
    gc.collect()
    peak = Peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    held = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak.nbytes = max(peak.nbytes, held)
    peak.end_nbytes = held
