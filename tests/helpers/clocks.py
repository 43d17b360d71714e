"""A clock and a device whose time goes on only when a test says so."""

from __future__ import annotations

from lightning_zero.observe.events import DeviceEvents


class Clock:
    """Seconds of a host."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Device:
    """A queue of work: what is marked is passed once ``done_s`` has reached it."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.done_s = 0.0
        self.made = 0
        self.waited = 0

    def events(self, clock: Clock) -> DeviceEvents:
        return DeviceEvents(lambda: Mark(self), clock)


class Mark:
    """As a ``torch.Event`` with timing."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._at: float | None = None
        device.made += 1

    def record(self) -> None:
        self._at = self._device.queued_s

    def query(self) -> bool:
        assert self._at is not None, "an event is asked that nobody has recorded"
        return self._at <= self._device.done_s

    def synchronize(self) -> None:
        assert self._at is not None
        self._device.waited += 1
        self._device.done_s = max(self._device.done_s, self._at)

    def elapsed_time(self, end: Mark) -> float:
        assert self.query()
        assert end.query(), "a time is read before the device has come there"
        return (end._at - self._at) * 1e3
