"""Copies of tensors that are too many for memory, in a file instead.

[Note: spool]
A checkpoint of one file passes through one process, which may not have the memory for all of it.
Where it would take too much of what is free, the copies lie in a file that is mapped into memory:
the system writes pages to the disk and takes them back as it needs to. The file has no name, so it
is gone with the process, however that ends. Its space is reserved first: a full disk is an error
then, and no signal in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_zero.memory.host import large_blocks_apart
from lightning_zero.memory.room import free_nbytes

MAX_SHARE = 0.5
"""Share of the free memory that copies may take; more of them go to a file."""
ALIGN_NBYTES = 64
MIN_CHUNK_NBYTES = 64 * 2**20
GROWTH = 4
"""A file grows by one part in so many, so that it takes few mappings."""
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
"""File systems whose files take memory."""

Keep = Callable[[Tensor], Tensor]


@contextmanager
def gathering(
    nbytes: int, free: int | None = None, folders: Sequence[Path] | None = None
) -> Iterator[Keep]:
    """While inside, tensors are copied: into memory, or into a file where memory is scarce.

    Args:
        nbytes: Bytes of all copies together, about.
        free: Bytes of memory that are free; None to look.
        folders: Where a file may be, the best first; None for the usual ones.

    Yields:
        A function that makes a CPU copy of a tensor, with its shape, dtype and memory order.
    """
    folder = None
    if nbytes > MAX_SHARE * (free_nbytes() if free is None else free):
        folder = folder_on_disk(usual_folders() if folders is None else folders, nbytes)
    if folder is None:
        yield copied
        return
    with large_blocks_apart():  # what is gathered comes and goes between small blocks that stay
        yield Spool(folder).copied


def copied(tensor: Tensor) -> Tensor:
    """A CPU copy of a tensor in memory."""
    detached = tensor.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.cpu()


class Spool:
    """Room for copies in a file without a name, see [Note: spool].

    Args:
        folder: Where the file is; on a disk.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (as long as the spool)
        self._chunk: mmap.mmap | None = None
        self._begin = self._end = 0
        """Bytes of the chunk that are taken, and all of it."""
        self.nbytes = 0
        """Bytes of the file."""

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor, in the file; in memory if the file cannot grow."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.numel() == 0 or tensor.dim() == 0:
            return copied(tensor)
        shape, stride = tensor.shape, torch.empty_like(tensor, device="meta").stride()
        try:
            room = self._room(tensor.numel() * tensor.element_size())
        except OSError:  # the disk is full, or there is no address space
            return copied(tensor)
        return room.view(tensor.dtype).as_strided(shape, stride).copy_(tensor.detach())

    def _room(self, nbytes: int) -> Tensor:
        """Bytes of the file, 1-D uint8, with a storage of their own."""
        if self._chunk is None or self._begin + nbytes > self._end:
            self._grow(nbytes)
        begin, self._begin = self._begin, self._begin + -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        return torch.frombuffer(self._chunk, dtype=torch.uint8, count=nbytes, offset=begin)

    def _grow(self, nbytes: int) -> None:
        wanted = max(nbytes, self.nbytes // GROWTH, MIN_CHUNK_NBYTES)
        unit = mmap.ALLOCATIONGRANULARITY
        wanted = -(-wanted // unit) * unit
        os.posix_fallocate(self._file.fileno(), self.nbytes, wanted)
        self._chunk = mmap.mmap(self._file.fileno(), wanted, offset=self.nbytes)
        self._begin, self._end = 0, wanted
        self.nbytes += wanted


def usual_folders() -> list[Path]:
    """Folders for temporary files, the best first."""
    return [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]


def folder_on_disk(folders: Sequence[Path], nbytes: int) -> Path | None:
    """The first of these folders that has so much space on a disk; None if there is none."""
    if not hasattr(os, "posix_fallocate"):
        return None
    mounts = _mounts()
    for folder in folders:
        try:
            resolved = folder.resolve(strict=True)
            space = os.statvfs(resolved)
        except OSError:
            continue
        known = [resolved, *resolved.parents]
        kind = next((mounts[parent] for parent in known if parent in mounts), None)
        if kind is None or kind in IN_MEMORY or not os.access(resolved, os.W_OK):
            continue
        if space.f_bavail * space.f_frsize > nbytes * (1 + 1 / GROWTH) + MIN_CHUNK_NBYTES:
            return resolved
    return None


def _mounts(table: Path = Path("/proc/self/mountinfo")) -> dict[Path, str]:
    """Kind of the file system that is mounted at each place."""
    try:
        lines = table.read_text().splitlines()
    except OSError:  # not on Linux
        return {}
    found = {}
    for line in lines:
        place, _, kind = line.partition(" - ")
        found[Path(place.split()[4].replace("\\040", " "))] = kind.split()[0]
    return found
