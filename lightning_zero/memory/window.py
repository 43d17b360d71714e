"""States on a disk pass through a few buffers in memory.

[Note: window]
A sweep yields region after region. While a consumer works on one, those that follow are read and
those before are written, by threads that need no interpreter lock for it. So a sweep takes as long
as the disk or the consumer, whichever is slower, and as much memory as the buffers, however large
the file is.

A buffer is free, or on its way from or to the disk, or held: filled, and not given back yet. Reads
that find none free wait in the order in which they were asked for. Where every buffer is held and
nothing is on its way, waiting would never end; that is an error.

What was written last is what is read: a read of a region whose old content is still being written
begins after that. Methods may be called from any thread, by one consumer at a time. A forked child
has no threads for files and cannot use a window.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from lightning_zero.memory.io_threads import BLOCK_NBYTES, IoThreads, Transfer
from lightning_zero.memory.state_file import Region, StateFile, aligned_buffer

CLOSED = "the window of states was closed, and is used again. Close it last"


class PendingRead:
    """One region on its way into memory; made by ``Window.begin_read``."""

    def __init__(self, window: Window, index: int) -> None:
        self.index = index
        self._window = window
        self.buffer: Tensor | None = None
        """Set as the read begins."""
        self.error: Exception | None = None
        self.is_ready = False
        self.is_released = False

    def wait(self) -> Tensor:
        """The region's bytes, 1-D uint8, once they are there; valid until ``release``.

        Raises:
            RuntimeError: The read failed, or was released before, or the window is closed, or no
                buffer will be free because all are held.
        """
        return self._window.wait_for(self)

    def release(self) -> None:
        """Give the buffer back; a read that has not begun does not begin. A second call is fine."""
        self._window.take_back(self)


class Window:
    """A bounded set of buffers, and threads that fill and empty them; see [Note: window].

    Args:
        file: Where the states are.
        buffer_count: How many regions are in memory at most: one that is worked on, and those that
            are read or written meanwhile.
        threads: How many blocks are on their way at once.
        pin: Page-locked buffers, if there is an accelerator. torch's allocator of such memory
            rounds each up to a power of two.

    Raises:
        ValueError: Fewer than 1 buffer or thread.
    """

    def __init__(
        self, file: StateFile, *, buffer_count: int = 4, threads: int = 2, pin: bool = False
    ) -> None:
        if buffer_count < 1:
            raise ValueError(f"buffer_count={buffer_count}: at least 1 buffer is needed")
        self._threads = IoThreads(file, threads)
        self._file = file
        self._count = buffer_count
        self._pin = pin and torch.accelerator.is_available()
        self._changed = threading.Condition()
        """Guards what follows, and tells of each change."""
        self._free: list[Tensor | None] = [None] * buffer_count
        """Buffers that nobody uses; None stands for one that has no memory yet."""
        self._waiting: deque[PendingRead] = deque()
        """Reads that have not begun."""
        self._moving: Counter[int] = Counter()
        """How many transfers of each region are on their way."""
        self._written: set[int] = set()
        """Regions that are being written, or are about to be."""
        self._swept: set[int] = set()
        """Regions of sweeps that have not ended."""
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that all buffers take at most; ``write`` takes up to two blocks more meanwhile."""
        return self._count * self._file.largest_nbytes

    def sweep(self, indexes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Pass through regions, and write back what the consumer makes of them.

        Reading ahead begins when the first region is asked for. A region goes back to the disk when
        the next is asked for; when the sweep has ended, all are there. A consumer that leaves early
        (by an exception, ``break`` or ``close`` of the iterator) leaves the region at hand and all
        that follow as they were on the disk, and those before as it has made them.

        Args:
            indexes: Which regions, in which order; each once.

        Yields:
            A region's index and its bytes, 1-D uint8, valid until the next is asked for.

        Raises:
            ValueError: A region twice.
            RuntimeError: A transfer failed; the region of a write that failed is undefined. Or
                another sweep passes through one of the regions, or all buffers are held by reads.
        """
        order = [self._checked(index) for index in indexes]
        if len(set(order)) < len(order):
            twice = sorted(index for index, count in Counter(order).items() if count > 1)
            raise ValueError(f"a sweep was to pass through regions {twice} more than once")
        return self._sweep(order)

    def scan(self, indexes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Pass through regions as ``sweep`` does, and write nothing; a region may come again.

        Args:
            indexes: Which regions, in which order.

        Yields:
            As ``sweep``.

        Raises:
            RuntimeError: A read failed, or all buffers are held by reads.
        """
        order = [self._checked(index) for index in indexes]
        with closing(self._reads(order)) as reads:
            for read in reads:
                yield read.index, read.wait()

    def begin_read(self, index: int) -> PendingRead:
        """Begin to read one region; returns at once, also if no buffer is free yet.

        Args:
            index: Which region.

        Returns:
            A read to wait for and to release, in any order with others. It shows what was written
            before this call, and what ``write`` is called with before it begins.
        """
        read = PendingRead(self, self._checked(index))
        with self._changed:
            self._require_open()
            self._waiting.append(read)
            self._begin_waiting()
        return read

    def write(self, index: int, data: Tensor) -> None:
        """Write one region, and return when it is on the disk. Needs no free buffer.

        Args:
            index: Which region.
            data: Contiguous tensor of any shape, dtype and device, of the region's bytes or fewer;
                the rest becomes zero.

        Raises:
            ValueError: More bytes than the region has.
            RuntimeError: The write failed, or a sweep passes through the region.
        """
        region = self._file.regions[self._checked(index)]
        flat = data.detach().reshape(-1).view(torch.uint8)
        if flat.nbytes > region.nbytes:
            raise ValueError(
                f"{flat.nbytes} bytes were to be written to region {index} of {self._file.path}, "
                f"which has {region.nbytes}"
            )
        with self._changed:
            if index in self._swept:
                raise RuntimeError(
                    f"region {index} of {self._file.path} was to be written while a sweep passes "
                    "through it, which would undo this. Write it before or after the sweep"
                )
            self._begin_write(index)
        try:
            self._write_blocks(region, flat)
        finally:
            with self._changed:
                self._end_transfer(index, is_write=True)

    def close(self) -> None:
        """Finish what is on its way, end threads, free buffers. A second call is fine."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._threads.close()
        with self._changed:
            self._free.clear()

    def wait_for(self, read: PendingRead) -> Tensor:
        """As ``PendingRead.wait``."""
        with self._changed:
            while not read.is_ready:
                self._require_open()
                if read.is_released:
                    raise RuntimeError(f"the read of region {read.index} was released before")
                if read in self._waiting and not self._moving:
                    raise RuntimeError(
                        f"region {read.index} of {self._file.path} waits for one of {self._count} "
                        "buffers, and all are held. Release a read first, or use more buffers"
                    )
                self._changed.wait()
        if read.error is not None:
            raise read.error
        if read.buffer is None or read.is_released:
            raise RuntimeError(f"the read of region {read.index} was released before")
        return read.buffer[: self._file.regions[read.index].nbytes]

    def take_back(self, read: PendingRead) -> None:
        """As ``PendingRead.release``."""
        with self._changed:
            if read.is_released:
                return
            read.is_released = True
            if read in self._waiting:
                self._waiting.remove(read)
            elif read.is_ready:
                self._give(read)
            self._changed.notify_all()

    def _sweep(self, order: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Pass through regions that are known to differ."""
        with self._changed:
            if self._swept & set(order):
                raise RuntimeError(
                    f"two sweeps pass through regions {sorted(self._swept & set(order))} of "
                    f"{self._file.path} at once. End one first, or close its iterator"
                )
            self._swept |= set(order)
        behind: list[Transfer] = []
        try:
            with closing(self._reads(order)) as reads:
                for read in reads:
                    yield read.index, read.wait()
                    self._write_back(read, behind)
                    _raise_first(behind)
            self._await(behind)
            _raise_first(behind)
        finally:
            self._await(behind)
            with self._changed:
                self._swept -= set(order)

    def _reads(self, order: list[int]) -> Generator[PendingRead, None, None]:
        """Reads in this order, begun ahead; the consumer may release each itself."""
        upcoming = iter(order)
        begun: deque[PendingRead] = deque()
        try:
            for _ in order:
                while len(begun) < self._count and (index := next(upcoming, None)) is not None:
                    begun.append(self.begin_read(index))
                yield begun[0]
                begun.popleft().release()
        finally:
            for read in begun:
                read.release()

    def _write_back(self, read: PendingRead, behind: list[Transfer]) -> None:
        """Write what the consumer made of a region, and free its buffer after that."""
        region = self._file.regions[read.index]
        with self._changed:
            self._begin_write(read.index)
            buffer, read.buffer, read.is_released = read.buffer, None, True
            if buffer is None:
                raise AssertionError(f"region {read.index} was yielded without a buffer")
            ended = partial(self._has_written, read.index, buffer)
            behind[:] = [t for t in behind if t.blocks_left or t.error]
            behind.append(Transfer(region.offset_nbytes, buffer[: region.nbytes], True, ended))
            self._threads.begin(behind[-1])

    def _write_blocks(self, region: Region, flat: Tensor) -> None:
        """Copy block after block to where it can be written from, and write it."""
        block_nbytes = min(BLOCK_NBYTES, region.nbytes)
        spare = [aligned_buffer(block_nbytes, pin=False) for _ in range(2)]
        behind: list[Transfer] = []
        try:
            for number, begin in enumerate(range(0, region.nbytes, block_nbytes)):
                self._await(behind[:-1])  # the other one may be on its way meanwhile
                _raise_first(behind[:-1])
                block = spare[number % 2][: region.nbytes - begin]
                part = flat[begin : begin + block.nbytes]
                block[: part.nbytes].copy_(part)
                block[part.nbytes :].zero_()
                behind.append(Transfer(region.offset_nbytes + begin, block, True, self._has_moved))
                self._threads.begin(behind[-1])
        finally:
            self._await(behind)
        _raise_first(behind)

    def _begin_waiting(self) -> None:
        """Begin reads for which there is a buffer."""
        for read in list(self._waiting):
            if not self._free:
                return
            if read.index in self._written:
                continue
            self._waiting.remove(read)
            region = self._file.regions[read.index]
            read.buffer = self._taken()
            self._moving[read.index] += 1
            ended = partial(self._has_read, read)
            memory = read.buffer[: region.nbytes]
            self._threads.begin(Transfer(region.offset_nbytes, memory, False, ended))

    def _taken(self) -> Tensor:
        """A free buffer, with memory for the largest region of today."""
        buffer = self._free.pop()
        nbytes = self._file.largest_nbytes
        if buffer is None or buffer.nbytes < nbytes:
            del buffer  # before there is another
            buffer = aligned_buffer(nbytes, self._pin)
        return buffer

    def _give(self, read: PendingRead) -> None:
        """Let others have the buffer of a read."""
        buffer, read.buffer = read.buffer, None
        if buffer is not None and not self._is_closed:
            self._free.append(buffer)
            self._begin_waiting()

    def _has_read(self, read: PendingRead, transfer: Transfer) -> None:
        """In a thread: a read has ended."""
        with self._changed:
            read.is_ready, read.error = True, transfer.error
            self._end_transfer(read.index, is_write=False)
            if read.is_released:
                self._give(read)

    def _has_written(self, index: int, buffer: Tensor, transfer: Transfer) -> None:
        """In a thread: what a sweep wrote back is on the disk."""
        with self._changed:
            if not self._is_closed:
                self._free.append(buffer)
            self._end_transfer(index, is_write=True)

    def _has_moved(self, transfer: Transfer) -> None:
        """In a thread: a block of ``write`` is on the disk."""
        with self._changed:
            self._changed.notify_all()

    def _begin_write(self, index: int) -> None:
        """Wait until nobody moves a region, and let no read of it begin."""
        self._require_open()
        while self._moving[index]:
            self._changed.wait()
            self._require_open()
        self._moving[index] += 1
        self._written.add(index)

    def _end_transfer(self, index: int, *, is_write: bool) -> None:
        self._moving[index] -= 1
        if not self._moving[index]:
            del self._moving[index]
        if is_write:
            self._written.discard(index)
        if not self._is_closed:
            self._begin_waiting()
        self._changed.notify_all()

    def _await(self, transfers: list[Transfer]) -> None:
        with self._changed:
            while any(transfer.blocks_left for transfer in transfers):
                self._changed.wait()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(CLOSED)

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._file.regions):
            raise IndexError(
                f"region {index} of {self._file.path} was asked for, which has "
                f"{len(self._file.regions)}"
            )
        return index


def _raise_first(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        if transfer.error is not None:
            raise transfer.error
