"""Threads that move regions between a file and memory, block by block."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_zero.memory.state_file import StateFile

BLOCK_NBYTES = 8 * 2**20
"""What a thread moves in one call: all threads work on the region that is needed next."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A region on its way between the file and memory."""

    offset_nbytes: int
    memory: Tensor
    """1-D uint8, aligned."""
    is_write: bool
    ended: Callable[[Transfer], None]
    """Called once, in a thread, when it is done or has failed."""
    error: Exception | None = None
    blocks_left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


Work = queue.SimpleQueue[tuple[Transfer, int, int] | None]
"""Blocks of transfers, from where to where; None ends a thread."""


class IoThreads:
    """Threads that carry out transfers, in the order in which these began.

    A daemon thread ends with ``close``, or when nobody uses the object any more; what has begun is
    carried out first. A forked child has none of the threads, and must not use the object.

    Args:
        file: What to read and write.
        count: How many blocks are on their way at once.
    """

    def __init__(self, file: StateFile, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} threads for files were asked for: at least 1 is needed")
        self._work: Work = queue.SimpleQueue()
        threads = [
            threading.Thread(
                target=_carry_out, args=(self._work, file), name=f"states-{n}", daemon=True
            )
            for n in range(count)
        ]
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._work, threads)

    def begin(self, transfer: Transfer) -> None:
        """Carry a transfer out behind those that began before; returns at once."""
        nbytes = transfer.memory.nbytes
        begins = range(0, nbytes, BLOCK_NBYTES)
        transfer.blocks_left = len(begins)
        for begin in begins:
            self._work.put((transfer, begin, min(begin + BLOCK_NBYTES, nbytes)))

    def close(self) -> None:
        """Wait for what has begun, and end the threads."""
        self._end()


def _end(work: Work, threads: list[threading.Thread]) -> None:
    for _ in threads:
        work.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the last user went away in a thread
            thread.join()


def _carry_out(work: Work, file: StateFile) -> None:
    while (block := work.get()) is not None:
        transfer, begin, end = block
        del block
        if transfer.error is None:
            try:
                move = file.write if transfer.is_write else file.read
                move(transfer.offset_nbytes + begin, transfer.memory[begin:end])
            except Exception as error:
                transfer.error = error
        with transfer.lock:
            transfer.blocks_left -= 1
            has_ended = transfer.blocks_left == 0
        if has_ended:
            transfer.ended(transfer)
        del transfer  # else the thread keeps memory alive while it waits
