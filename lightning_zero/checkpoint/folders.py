"""Folders that change places in one step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


def put_in_place(folder: Path, target: Path) -> None:
    """Give a finished folder its name; what had the name before is removed.

    At any time, a file or folder of that name is whole: the earlier one, or the new one. (Where the
    system cannot exchange names, there is a moment without either; the earlier one is next to it.)

    Args:
        folder: The finished folder.
        target: Its final name, in the same file system.
    """
    if not os.path.lexists(target):
        folder.rename(target)
        sync_folder(target.parent)
        return
    if target.is_symlink():  # the name is to mean the new folder, and what it led to stays
        target.unlink()
        folder.rename(target)
        sync_folder(target.parent)
        return
    if not _exchange(folder, target):
        earlier = folder.with_name(folder.name + ".earlier")
        target.rename(earlier)
        folder.rename(target)
        folder = earlier
    sync_folder(target.parent)
    remove(folder)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all in it; nothing is also fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power failure."""
    with contextlib.suppress(OSError):  # some systems cannot open folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
