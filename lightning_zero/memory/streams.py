"""States of this rank in one file, read and written through a window."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.memory.run_folder import RunFolder
from lightning_zero.memory.state_file import StateFile
from lightning_zero.memory.window import PendingRead, Window

SECTION_ALIGN_NBYTES = 64


class Sections:
    """1-D tensors of one length that lie one after the other in a region.

    Args:
        numel: Elements of each.
        dtypes: Their names and dtypes, in order.
    """

    def __init__(self, numel: int, dtypes: dict[str, torch.dtype]) -> None:
        self.numel = numel
        self.dtypes = dict(dtypes)
        self._begins: dict[str, int] = {}
        self.nbytes = 0
        """Bytes of all of them."""
        for name, dtype in dtypes.items():
            self._begins[name] = self.nbytes
            nbytes = numel * dtype.itemsize
            self.nbytes += -(-nbytes // SECTION_ALIGN_NBYTES) * SECTION_ALIGN_NBYTES

    def view(self, region: Tensor, name: str) -> Tensor:
        """One of them in a region's bytes, 1-D."""
        dtype, begin = self.dtypes[name], self._begins[name]
        return region[begin : begin + self.numel * dtype.itemsize].view(dtype)


class StateStream:
    """A file that grows, in a run folder of its own, and the window through which it is used.

    Args:
        root: Where the run folder is made, when it is needed.
        rank: This rank.
        name: Name of the file in it.
        buffer_count: Regions that are in memory at once.
        pin: Page-lock them.
    """

    def __init__(self, root: Path, rank: int, name: str, buffer_count: int, pin: bool) -> None:
        self._root, self._rank = root, rank
        self._name = name
        self._buffer_count, self._pin = buffer_count, pin
        self._folder: RunFolder | None = None
        self._file: StateFile | None = None
        self._window: Window | None = None

    @property
    def window(self) -> Window:
        """The window, once there is a region."""
        if self._window is None:
            raise AssertionError(f"nothing was added to {self._name}, or it is closed")
        return self._window

    def add(self, nbytes: int) -> int:
        """One more region, filled with zeros.

        Args:
            nbytes: Its bytes.

        Returns:
            Its index.

        Raises:
            RuntimeError: The disk is full.
            ValueError: The folder cannot be used.
        """
        if self._file is None:
            self._folder = RunFolder(self._root, self._rank)
            self._file = StateFile(self._folder.path / self._name, [nbytes])
            count = self._buffer_count
            self._window = Window(self._file, buffer_count=count, pin=self._pin)
        else:
            self._file.grow([nbytes])
        return len(self._file.regions) - 1

    def mapped(self, index: int) -> Tensor:
        """See :meth:`StateFile.mapped`."""
        if self._file is None:
            raise AssertionError(f"nothing was added to {self._name}, or it is closed")
        return self._file.mapped(index)

    def flush(self) -> None:
        """See :meth:`StateFile.flush`."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End all transfers and remove the folder. What is mapped stays valid."""
        window, self._window = self._window, None
        file, self._file = self._file, None
        if window is not None:
            window.close()
        if file is not None:
            file.close()
        if self._folder is not None:
            self._folder.close()


class ReadAhead:
    """Reads of regions that are needed soon, never so many that one needed now has no buffer.

    Args:
        stream: Where they are.
        buffer_count: Buffers of its window.
    """

    def __init__(self, stream: StateStream, buffer_count: int) -> None:
        self.stream = stream
        self._max_count = buffer_count - 1
        self._begun: dict[int, PendingRead] = {}

    def begin(self, index: int) -> None:
        """Begin to read a region, if there is room for it."""
        if index not in self._begun and len(self._begun) < self._max_count:
            self._begun[index] = self.stream.window.begin_read(index)

    def take(self, index: int) -> PendingRead:
        """The read of a region, for the caller to wait for and to release."""
        read = self._begun.pop(index, None)
        return self.stream.window.begin_read(index) if read is None else read

    def drop(self, index: int) -> None:
        """A region is about to change, or is not needed: what was read of it is of no use."""
        read = self._begun.pop(index, None)
        if read is not None:
            read.release()
