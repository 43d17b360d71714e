"""Copies between a device and host memory, beside what the device computes.

[Note: two memories]
What is offloaded lies in *host memory*, apart from the device's, and only a link copies between the
two. Where the device is the CPU itself, the link is a plain copy within one memory: the same code
runs, so that it can be tested there, and saves nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch
from torch import Tensor


class Transfer(ABC):
    """A copy that may be under way."""

    @abstractmethod
    def wait(self) -> None:
        """What the device is given to do from now on sees the copy as done."""

    @abstractmethod
    def wait_on_host(self) -> None:
        """Block until the copy is done: the host may read its target, and write to its source."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether :meth:`wait_on_host` would return at once."""


class HostLink(ABC):
    """The way between one device and host memory.

    Args:
        device: The device.
    """

    is_within_memory = False
    """Host memory is the device's own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host_nbytes = 0
        """Bytes that have been copied to the host."""
        self.to_device_nbytes = 0
        """Bytes that have been copied to the device."""

    @abstractmethod
    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D host memory that the device can copy from and to."""

    def to_host(self, source: Tensor, target: Tensor) -> Transfer:
        """Copy from the device, once all work that it has been given so far is done.

        Args:
            source: On the device; may be freed, but not written to, before the copy is done.
            target: In host memory, of the same shape; the dtypes may differ.
        """
        self.to_host_nbytes += source.nbytes
        return self._copy(source, target, is_up=False)

    def to_device(self, source: Tensor, target: Tensor) -> Transfer:
        """Copy to the device, once all work that it has been given so far is done.

        Args:
            source: In host memory; not to be written to before the copy is done.
            target: On the device, of the same shape; the dtypes may differ.
        """
        self.to_device_nbytes += source.nbytes
        return self._copy(source, target, is_up=True)

    @abstractmethod
    def _copy(self, source: Tensor, target: Tensor, is_up: bool) -> Transfer: ...


def make_link(device: torch.device, pin_memory: bool = True) -> HostLink:
    """The link of a device.

    Args:
        device: The device.
        pin_memory: Page-lock host memory, so that copies run beside everything else.
    """
    return CpuLink(device) if device.type == "cpu" else AcceleratorLink(device, pin_memory)


class _Copied(Transfer):
    def wait(self) -> None:
        """See the base class."""

    def wait_on_host(self) -> None:
        """See the base class."""

    def is_done(self) -> bool:
        """See the base class."""
        return True


class CpuLink(HostLink):
    """Host memory is the device's, see [Note: two memories]."""

    is_within_memory = True

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return torch.zeros(numel, dtype=dtype)

    def _copy(self, source: Tensor, target: Tensor, is_up: bool) -> Transfer:
        target.copy_(source)
        return _Copied()


class AcceleratorLink(HostLink):
    """Copies on two streams of their own, one for each direction.

    Args:
        device: The accelerator.
        pin_memory: See :func:`make_link`.
    """

    def __init__(self, device: torch.device, pin_memory: bool) -> None:
        super().__init__(device)
        self._pin_memory = pin_memory
        self._accelerator: Any = torch.get_device_module(device)
        self._streams = {is_up: self._accelerator.Stream(device) for is_up in (True, False)}

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self._pin_memory)

    def _copy(self, source: Tensor, target: Tensor, is_up: bool) -> Transfer:
        if source.dtype != target.dtype:
            source = source.to(target.dtype)
        stream = self._streams[is_up]
        stream.wait_stream(self._accelerator.current_stream(self.device))
        with self._accelerator.stream(stream):
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        (target if is_up else source).record_stream(stream)
        return _Recorded(self, event)


class _Recorded(Transfer):
    def __init__(self, link: AcceleratorLink, event: Any) -> None:
        self._link, self._event = link, event

    def wait(self) -> None:
        """See the base class."""
        self._link._accelerator.current_stream(self._link.device).wait_event(self._event)

    def wait_on_host(self) -> None:
        """See the base class."""
        self._event.synchronize()

    def is_done(self) -> bool:
        """See the base class."""
        return bool(self._event.query())


class Staging:
    """A few pieces of host memory that take turns on the way to the device.

    Args:
        link: The way.
        count: How many.
    """

    def __init__(self, link: HostLink, count: int = 2) -> None:
        self._link = link
        self._count = count
        self._free: deque[tuple[Tensor, Transfer | None]] = deque()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D host memory that nothing reads any more, with arbitrary content."""
        if len(self._free) >= self._count:
            buffer, transfer = self._free.popleft()
            if transfer is not None:
                transfer.wait_on_host()
            if buffer.dtype == dtype and buffer.numel() >= numel:
                return buffer[:numel]
        return self._link.zeros(numel, dtype)

    def send(self, taken: Tensor, target: Tensor) -> Transfer:
        """Copy to the device; the memory is taken again once that is done.

        Args:
            taken: From :meth:`take`.
            target: On the device, of the same shape and dtype.
        """
        transfer = self._link.to_device(taken, target)
        self._free.append((_whole(taken), transfer))
        return transfer

    def give(self, taken: Tensor) -> None:
        """Let the memory be taken again."""
        self._free.append((_whole(taken), None))


def _whole(taken: Tensor) -> Tensor:
    return taken if taken._base is None else taken._base
