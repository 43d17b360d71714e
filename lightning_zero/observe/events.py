"""Points of time in the queue of an accelerator, read once the device has passed them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

DeviceEvent = Any
"""A ``torch.Event`` with timing."""

MILLISECOND_S = 1e-3


def is_host_time(kind: str) -> bool:
    """Whether a kind of span is the host's own work on every device: submitting."""
    return kind.endswith("_submit")


class DeviceEvents:
    """Marks in a device's queue; made once, used again.

    Args:
        make: Makes an event.
        clock: Seconds of the host.
    """

    def __init__(
        self, make: Callable[[], DeviceEvent], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._make = make
        self._clock = clock
        self._spare: list[DeviceEvent] = []

    @classmethod
    def of(cls, device: torch.device) -> DeviceEvents | None:
        """Events of a device; None for the CPU, which runs what it is told at once."""
        if device.type == "cpu":
            return None
        return cls(lambda: torch.Event(device=device, enable_timing=True))

    def mark(self) -> DeviceEvent:
        """Mark the current end of the queue; nothing waits."""
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        return event

    def seconds(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """Time between two marks that the device has passed."""
        return float(begin.elapsed_time(end)) * MILLISECOND_S

    def now(self) -> tuple[float, DeviceEvent]:
        """The same moment by the host's clock, in seconds, and as a mark; waits for the device."""
        event = self.mark()
        event.synchronize()
        return self._clock(), event

    def reuse(self, event: DeviceEvent) -> None:
        """Take back a mark that nobody will read any more."""
        self._spare.append(event)
