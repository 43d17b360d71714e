"""States in one file on a disk, by regions.

[Note: states on a disk]
The space of a file is reserved when it is made, so a full disk is an error then and not in the
middle of a step. Regions begin and end at multiples of what disks and mappings ask for, so they are
read and written past the page cache (O_DIRECT) where the file system has that: neither the time nor
the memory of a copy. Elsewhere each transfer goes to the disk at once and its cached pages are
dropped, so that a disk that fails is noticed in this step, and memory stays bounded.

Memory that lies in pages of 4 KiB is many pieces to a disk, and makes it slower: a sweep over a
virtual disk ran at 440 MiB/s, and at 1935 with buffers of huge pages. Buffers ask for them.

A region can also be mapped, for code that wants tensors and little speed: checkpoints. The system
keeps a mapping and transfers of one region coherent only up to ``flush``.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ALIGN_NBYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""Regions, buffers and blocks begin at multiples of it: what O_DIRECT and mappings ask for."""
HUGE_PAGE_NBYTES = 2 * 2**20
"""On most systems; on others it is a multiple of what is needed, or there are none."""
_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a file, in multiples of ``ALIGN_NBYTES``."""

    offset_nbytes: int
    nbytes: int

    @property
    def end_nbytes(self) -> int:
        """Where it ends in the file."""
        return self.offset_nbytes + self.nbytes


class StateFile:
    """A new file with space for states, see [Note: states on a disk].

    Transfers may run in several threads at once. Closing while one runs is fine, too.

    Args:
        path: The file, which must not be there yet; best in a ``RunFolder``.
        region_nbytes: Bytes of each region; rounded up.

    Raises:
        ValueError: A region has less than no bytes, or this system cannot reserve space.
        RuntimeError: The disk is full, or the file cannot be made.
    """

    def __init__(self, path: Path, region_nbytes: Sequence[int]) -> None:
        if not hasattr(os, "posix_fallocate") or not hasattr(os, "preadv"):
            raise ValueError("states in files need Linux (posix_fallocate, preadv)")
        self.path = path
        self.regions: list[Region] = []
        self.nbytes = 0
        """Bytes of the file."""
        self._maps: list[tuple[Region, mmap.mmap | None]] = []
        """What was added at a time, and its mapping once somebody asked for one."""
        try:
            self._cached: _Descriptor | None = _Descriptor(
                os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            )
        except OSError as error:
            raise failure("making a file", path, Region(0, sum(region_nbytes)), error) from error
        try:
            self.grow(region_nbytes)
        except BaseException:
            self._cached = None
            os.unlink(path)
            raise
        direct = _direct(path)
        self.is_direct = direct is not None
        """Whether transfers go past the page cache."""
        self._file: _Descriptor | None = direct or self._cached

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest region."""
        return max((region.nbytes for region in self.regions), default=0)

    def grow(self, region_nbytes: Sequence[int]) -> list[Region]:
        """Add regions, filled with zeros; those before stay as they are.

        Args:
            region_nbytes: Bytes of each; rounded up.

        Returns:
            The new regions, which also stand at the end of ``regions``.

        Raises:
            ValueError: A region has less than no bytes.
            RuntimeError: The disk is full. The file is as before then.
        """
        new, end = [], self.nbytes
        for nbytes in region_nbytes:
            if nbytes < 0:
                raise ValueError(f"a region of {nbytes} bytes was asked for: it has 0 or more")
            new.append(Region(end, -(-max(nbytes, 1) // ALIGN_NBYTES) * ALIGN_NBYTES))
            end = new[-1].end_nbytes
        if new:
            added = Region(self.nbytes, end - self.nbytes)
            self._reserve(added)
            self._maps.append((added, None))
        self.regions += new
        self.nbytes = end
        return new

    def read(self, offset_nbytes: int, into: Tensor) -> None:
        """Fill a tensor with what stands in the file.

        Args:
            offset_nbytes: Where in the file; with ``is_direct`` a multiple of ``ALIGN_NBYTES``.
            into: Contiguous CPU tensor; with ``is_direct`` its address and bytes, too.

        Raises:
            RuntimeError: The disk or the file system says no, or the file is shorter.
        """
        self._move("reading", offset_nbytes, into)

    def write(self, offset_nbytes: int, data: Tensor) -> None:
        """Put what stands in a tensor into the file; arguments and errors as in ``read``."""
        self._move("writing", offset_nbytes, data)

    def mapped(self, index: int) -> Tensor:
        """A region as memory that is taken only as it is touched; valid also after ``close``.

        Args:
            index: Which region.

        Returns:
            1-D uint8 of the region's bytes. It shows what transfers have written. What is written
            through it is there for transfers after ``flush``. The process dies by a signal (SIGBUS)
            if it is used after somebody has cut the file.
        """
        file, region = _open(self._cached, self.path), self.regions[index]
        for number, (part, mapping) in enumerate(self._maps):
            if part.offset_nbytes <= region.offset_nbytes < part.end_nbytes:
                if mapping is None:
                    mapping = mmap.mmap(file.number, part.nbytes, offset=part.offset_nbytes)
                    self._maps[number] = (part, mapping)
                begin = region.offset_nbytes - part.offset_nbytes
                return torch.frombuffer(
                    mapping, dtype=torch.uint8, count=region.nbytes, offset=begin
                )
        raise AssertionError(f"{region} lies in no part of {self.path}")

    def flush(self) -> None:
        """Bring what was written through ``mapped`` to the disk, and free the memory it took.

        Raises:
            RuntimeError: The disk says no.
        """
        file = _open(self._cached, self.path)
        for part, mapping in self._maps:
            if mapping is None:
                continue
            try:
                mapping.flush()
            except OSError as error:
                raise failure("writing", self.path, part, error) from error
            mapping.madvise(mmap.MADV_DONTNEED)  # else the pages count as in use
        _drop_cached(file, Region(0, 0))

    def close(self) -> None:
        """Close the file, which stays where it is; transfers and mappings go on to their end."""
        self._file = self._cached = None
        self._maps.clear()

    def _reserve(self, part: Region) -> None:
        file = _open(self._cached, self.path)
        try:
            os.posix_fallocate(file.number, part.offset_nbytes, part.nbytes)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file.number, part.offset_nbytes)
            raise failure("reserving space", self.path, part, error) from error

    def _move(self, doing: str, offset_nbytes: int, data: Tensor) -> None:
        file = _open(self._file, self.path)
        place = Region(offset_nbytes, data.nbytes)
        memory = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
        move = os.preadv if doing == "reading" else os.pwritev
        try:
            # Writing behind the end would fill what is missing with zeros.
            if os.fstat(file.number).st_size < place.end_nbytes:
                raise EOFError
            while memory:
                count = move(file.number, [memory], offset_nbytes)
                if count == 0:
                    raise EOFError
                memory, offset_nbytes = memory[count:], offset_nbytes + count
            if not self.is_direct:
                if doing == "writing":
                    os.fdatasync(file.number)
                _drop_cached(file, place)
        except (OSError, EOFError) as error:
            raise failure(doing, self.path, place, error) from error


class _Descriptor:
    """Number of an open file, which is closed when nobody uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number).atexit = False  # a thread may still use it then


def failure(doing: str, path: Path, place: Region, error: OSError | EOFError) -> RuntimeError:
    """What to raise where a file of states fails.

    Args:
        doing: What failed, as "reading".
        path: The file.
        place: Where in it.
        error: What the system said; an ``EOFError`` if the file is too short.

    Returns:
        An error that says what was found, and what to do.
    """
    code = error.errno if isinstance(error, OSError) else None
    size_nbytes = path.stat().st_size if path.is_file() else 0
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why, remedy = _no_space(path, place, code)
    elif doing in ("reading", "writing") and size_nbytes < place.end_nbytes:
        why = f"the file has only {size_nbytes} bytes: somebody has cut or removed it"
        remedy = "Keep other programs out of this folder"
    else:
        why = f"{error} (errno {code})"
        remedy = "See what the system log says of this disk, or name a folder on another one"
    return RuntimeError(
        f"{doing} {place.nbytes} bytes at {place.offset_nbytes} of {path} failed: {why}. {remedy}. "
        "The run can be resumed from its last checkpoint, which does not need this file"
    )


def _no_space(path: Path, place: Region, code: int | None) -> tuple[str, str]:
    """Why there is no space, and what helps."""
    if code == errno.EFBIG:
        return (
            f"a file of {place.end_nbytes} bytes is more than a limit allows",
            "Raise the limit (ulimit -f), or use more ranks",
        )
    if code == errno.EDQUOT:
        return (
            f"the quota of this user is used up, {place.nbytes} bytes are needed",
            "Have the quota raised, or name a folder on another disk",
        )
    space = os.statvfs(path.parent)
    free_nbytes = space.f_bavail * space.f_frsize
    return (
        f"the disk is full, {place.nbytes} bytes are needed and {free_nbytes} are free",
        "Make space, or name a folder on another disk",
    )


def aligned_buffer(nbytes: int, pin: bool) -> Tensor:
    """Memory that a file can be read into past the page cache.

    Args:
        nbytes: How much.
        pin: Page-locked, for transfers to an accelerator.

    Returns:
        1-D uint8 with arbitrary content, at a multiple of ``ALIGN_NBYTES``.
    """
    if pin or nbytes < HUGE_PAGE_NBYTES:
        memory, align = (
            torch.empty(nbytes + ALIGN_NBYTES, dtype=torch.uint8, pin_memory=pin),
            ALIGN_NBYTES,
        )
    else:
        memory, align = _huge_pages(nbytes), HUGE_PAGE_NBYTES
    begin = -memory.data_ptr() % align
    return memory[begin : begin + nbytes]


def _huge_pages(nbytes: int) -> Tensor:
    """Memory that holds so many bytes from the first multiple of a huge page on."""
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    begin, whole = -memory.data_ptr() % HUGE_PAGE_NBYTES, nbytes // HUGE_PAGE_NBYTES
    with suppress(AttributeError, OSError):  # a system without them
        mapping.madvise(mmap.MADV_HUGEPAGE, begin, whole * HUGE_PAGE_NBYTES)
    return memory


def _direct(path: Path) -> _Descriptor | None:
    """The file past the page cache; None where the file system cannot do it."""
    flag: int = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        file = _Descriptor(os.open(path, _FLAGS | flag))
        block = aligned_buffer(ALIGN_NBYTES, pin=False)
        memory = (ctypes.c_char * ALIGN_NBYTES).from_address(block.data_ptr())
        os.preadv(file.number, [memory], 0)  # some open such a file, and then cannot read it
    except OSError:
        return None
    return file


def _open(file: _Descriptor | None, path: Path) -> _Descriptor:
    if file is None:
        raise RuntimeError(f"{path} was closed, and is used again. Close it last")
    return file


def _drop_cached(file: _Descriptor, place: Region) -> None:
    """Free cached pages that are on the disk; of the whole file where it says no bytes."""
    os.posix_fadvise(file.number, place.offset_nbytes, place.nbytes, os.POSIX_FADV_DONTNEED)
