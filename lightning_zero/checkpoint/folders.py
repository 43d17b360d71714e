"""Folders that are filled next to their place, and change places in one step.

[Note: hidden names]
What is written for ``last.ckpt`` stands next to it until it is whole, and what is to be removed is
moved there first, so whatever has a visible name is whole at any time:

``.last.ckpt.TOKEN.lock``     locked by the process that made it, for as long as it lives
``.last.ckpt.TOKEN.part``     the new folder; after the exchange, the earlier one
``.last.ckpt.TOKEN.earlier``  the earlier one, where the system cannot exchange names

The lock goes last. One that nobody holds was left by a process that was killed, and names all that
it has left. Locks of another host may look free on file systems that keep them to one host: such
leftovers go only with a later save of the same name, or after a day.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_zero.checkpoint.files import bring_to_disk, stem, try_lock

LOCK, PART, EARLIER = ".lock", ".part", ".earlier"
HIDDEN_FOLDERS = (PART, EARLIER)
FOREIGN_AGE_S = 24 * 3600.0
"""Age at which a lock of another host is taken for free if it looks free."""
_HOST_NBYTES = 256
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


class SideFolder:
    """A place for a folder next to its target, in the name of this process.

    See [Note: hidden names].

    Args:
        target: What the folder will be, or was.

    Raises:
        OSError: There is no such place, or it cannot be written to.
    """

    def __init__(self, target: Path) -> None:
        lock = -1
        while lock < 0:
            self.path = target.parent / f"{stem(target)}{secrets.token_hex(4)}{PART}"
            self._lock_path = self.path.with_suffix(LOCK)
            lock = _locked(self._lock_path)
        self._lock = lock
        self._target = target
        try:
            os.write(lock, socket.gethostname().encode()[:_HOST_NBYTES])
        except OSError:
            self.close()
            raise

    def discard_target(self) -> None:
        """Remove what has the target's name, at once for whoever looks."""
        self._target.rename(self.path)

    def close(self) -> None:
        """Remove what is left in this place, and the place."""
        _clear(self._lock_path)
        os.close(self._lock)


def put_in_place(folder: Path, target: Path) -> None:
    """Give a finished folder its name; what had the name before is in the hidden place then.

    At any time, a file or folder of that name is whole: the earlier one, or the new one. (Where the
    system cannot exchange names, there is a moment without either; both are next to it.)

    Args:
        folder: The finished folder, in a :class:`SideFolder`.
        target: Its final name, in the same file system.

    Raises:
        OSError: The names could not be changed; they are as they were.
    """
    if not os.path.lexists(target):
        folder.rename(target)
    elif not _exchange(folder, target):
        earlier = folder.with_suffix(EARLIER)
        target.rename(earlier)
        try:
            folder.rename(target)
        except OSError:
            earlier.rename(target)
            raise
    sync_folder(target.parent)


def discard(path: Path) -> None:
    """Remove a file, a link, or a folder with all in it; nothing is also fine.

    A folder that is a checkpoint is never seen in part.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        side = SideFolder(path)
    except OSError:  # not even room for a lock
        shutil.rmtree(path)
        return
    try:
        side.discard_target()
    finally:
        side.close()


def remove_leftovers(target: Path, is_spared: Callable[[Path], bool]) -> None:
    """Remove what killed processes have left next to a target, for it and for others.

    Args:
        target: What is to be written, or was.
        is_spared: Whether a hidden folder stays, and so all of its save.
    """
    start = stem(target)
    for lock_path in _locks(target.parent):
        if any(is_spared(lock_path.with_suffix(ending)) for ending in HIDDEN_FOLDERS):
            continue
        is_own = lock_path.name.startswith(start) and lock_path.stem.count(".") == start.count(".")
        with contextlib.suppress(OSError):  # another process was first
            lock = os.open(lock_path, os.O_RDWR)
            try:
                if try_lock(lock) and (is_own or _is_of_this_host(lock)):
                    _clear(lock_path)
            finally:
                os.close(lock)


def hidden_folders(parent: Path) -> list[Path]:
    """Folders that saves have left next to their targets, or are filling."""
    found = (lock.with_suffix(ending) for lock in _locks(parent) for ending in HIDDEN_FOLDERS)
    return [path for path in found if path.is_dir()]


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power failure."""
    with contextlib.suppress(OSError):  # some systems cannot open folders
        bring_to_disk(folder)


def _locks(parent: Path) -> Iterator[Path]:
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(parent))
    return (parent / name for name in names if name.startswith(".") and name.endswith(LOCK))


def _locked(lock_path: Path) -> int:
    """Descriptor of a new lock; -1 if the name is taken, or another process was faster."""
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return -1
    try_lock(lock)
    if lock_path.exists():
        return lock
    os.close(lock)  # taken for a dead one's before it was locked
    return -1


def _is_of_this_host(lock: int) -> bool:
    is_old = time.time() - os.fstat(lock).st_mtime > FOREIGN_AGE_S
    return is_old or os.pread(lock, _HOST_NBYTES, 0) == socket.gethostname().encode()


def _clear(lock_path: Path) -> None:
    """Remove all of a save, the lock last: without it, nobody would find the rest."""
    with contextlib.suppress(OSError):
        for ending in HIDDEN_FOLDERS:
            _remove(lock_path.with_suffix(ending))
        lock_path.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that cannot be done."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not Linux, or an old C library
        return False
    done = renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    return bool(done == 0)
