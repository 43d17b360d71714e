"""How fast a disk is, to compare with how long a sweep takes.

[Note: bound of a sweep]
A sweep reads and writes each byte once. Reads and writes share the disk, so what bounds it is the
bytes of both together in a second while both are on their way; on some disks this is as much as
reads alone have, on others twice that. It is measured with blocks and threads like those of a
window, but with nothing between them: each thread moves block after block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_zero.memory.io_threads import BLOCK_NBYTES
from lightning_zero.memory.state_file import StateFile, aligned_buffer


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second, of one file."""

    read_nbytes_per_s: float
    write_nbytes_per_s: float
    both_nbytes_per_s: float
    """Of reads and writes together, while every block that is read is also written."""

    def sweep_s(self, nbytes: int) -> float:
        """Seconds that a sweep over so many bytes takes at least, with nothing to compute."""
        return 2 * nbytes / self.both_nbytes_per_s


def measure_disk_speed(file: StateFile, *, threads: int = 2) -> DiskSpeed:
    """Write, read, and do both with a whole file, which takes as many seconds as that takes.

    Args:
        file: What lies in it is lost.
        threads: How many blocks are on their way at once.

    Returns:
        What was measured. The writes come first: a disk may know that nothing was written yet, and
        answer reads without looking.

    Raises:
        RuntimeError: A read or a write failed.
    """
    blocks = range(0, file.nbytes, BLOCK_NBYTES)
    half = len(blocks) // 2  # what is written is not what is read just before
    write = [(begin, True) for begin in blocks]
    read = [(begin, False) for begin in blocks]
    both = [
        move
        for number, begin in enumerate(blocks)
        for move in ((begin, False), (blocks[(number + half) % len(blocks)], True))
    ]
    write_s, read_s, both_s = (_seconds(file, moves, threads) for moves in (write, read, both))
    return DiskSpeed(file.nbytes / read_s, file.nbytes / write_s, 2 * file.nbytes / both_s)


def _seconds(file: StateFile, moves: list[tuple[int, bool]], threads: int) -> float:
    """How long threads take for moves of blocks."""
    upcoming, lock = iter(moves), threading.Lock()
    errors: list[Exception] = []
    workers = [
        threading.Thread(target=_move, args=(file, upcoming, lock, errors)) for _ in range(threads)
    ]
    begin_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begin_s


def _move(
    file: StateFile,
    upcoming: Iterator[tuple[int, bool]],
    lock: threading.Lock,
    errors: list[Exception],
) -> None:
    block = aligned_buffer(BLOCK_NBYTES, pin=False)
    try:
        while not errors:
            with lock:
                begin, is_write = next(upcoming, (file.nbytes, False))
            if begin == file.nbytes:
                return
            part = block[: file.nbytes - begin]
            (file.write if is_write else file.read)(begin, part)
    except Exception as error:
        errors.append(error)
