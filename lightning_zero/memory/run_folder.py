"""A folder of one rank and run for files that live as long as the process.

[Note: life of a run folder]
Each rank makes its own, with a name that no other has and a lock that the system lets go when the
process ends, however it ends. So nothing has to be agreed between ranks or runs, and two runs in
one place do not meet. Whoever makes a folder first removes those whose lock is free: a dead run
left them. A folder counts as ours only if it has our name, our user and our lock file; of such a
folder plain files are removed, and never what a link points to.

A folder has no lock yet for a moment after it was made. Another rank that looks just then may take
the lock first and remove the empty folder; the maker notices, and makes another one.

Locks are known to be seen between processes of one host. What another host has written into a
shared folder therefore stays, even if its lock seems free.

A forked child does not own the folder: it goes with the process that has made it. The child shares
the lock, so while it outlives a killed parent, the folder counts as in use.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]

PREFIX = "lightning_zero"
LOCK = "lock"
_NAME = re.compile(PREFIX + r"-rank\d+-[a-z0-9_]{8}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOCK_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_DIRECTORY", 0)
_ATTEMPTS = 100


class RunFolder:
    """A folder that is this rank's alone, and goes with it; see [Note: life of a run folder].

    Folders of dead runs of the same user and host under ``root`` are removed first.

    Args:
        root: Where the folder is made, on a local disk. It is made itself if only it is missing.
        rank: Stands in the name, for people who look.

    Raises:
        ValueError: ``root`` is not a folder that one can write to and lock files in.
    """

    def __init__(self, root: Path, rank: int) -> None:
        root = _checked(root)
        try:
            remove_dead(root)
            path, lock = _made(root, rank)
        except OSError as error:
            raise ValueError(
                f"no files for states can be made in {root}: {error.strerror or error}. "
                "Name a folder on a local disk that this process may write to"
            ) from error
        self.path = path
        """The folder, with rights for its user alone."""
        self._remove = weakref.finalize(self, _remove_own, path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder and what lies in it; what is mapped or open stays valid.

        This happens by itself when the process ends, or nobody uses the object any more.
        """
        self._remove()


def remove_dead(root: Path) -> list[str]:
    """Remove what runs that are dead have left.

    Args:
        root: Folder that run folders are made in.

    Returns:
        Names of the folders that were removed.
    """
    removed = []
    for name in os.listdir(root):
        if _NAME.fullmatch(name):
            with suppress(OSError):  # another rank is at it, or it is not ours to remove
                if _is_removed_if_dead(root, name):
                    removed.append(name)
    return removed


def _checked(root: Path | None) -> Path:
    if fcntl is None:
        raise ValueError("states in files need file locks (fcntl), which this system does not have")
    if root is None:
        raise ValueError("states in files need a folder, found None. Name one on a local disk")
    root = Path(root).absolute()
    if root.parent.is_dir():  # further up, a disk may not be mounted, and another one would fill
        with suppress(OSError):
            root.mkdir(mode=0o700, exist_ok=True)
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist and cannot be made"
        raise ValueError(
            f"states were to be kept in files under {root}, which {what}. "
            "Make the folder on every host, or name another one"
        )
    return root


def _made(root: Path, rank: int) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock, which is held."""
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-rank{rank}-", dir=root))
        try:
            lock = os.open(folder / LOCK, _LOCK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # removed as an empty folder
            continue
        try:
            if _is_locked_by(lock, folder):
                os.write(lock, _this_host().encode())
                return folder, lock
        except OSError:
            _remove_contents(folder)
            os.close(lock)
            raise
        os.close(lock)
    raise OSError(f"other processes removed {_ATTEMPTS} new folders before they were locked")


def _is_locked_by(lock: int, folder: Path) -> bool:
    """Take the lock; False if another one has it, or has removed the file meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), os.lstat(folder / LOCK))
    except (BlockingIOError, FileNotFoundError):
        return False


def _is_removed_if_dead(root: Path, name: str) -> bool:
    with _opened(root / name) as folder:
        kind = os.fstat(folder)
        if kind.st_uid != os.geteuid() or stat.S_IMODE(kind.st_mode) != 0o700:
            return False
        try:
            lock = os.open(LOCK, _LOCK_FLAGS, dir_fd=folder)
        except FileNotFoundError:  # its maker died before the lock, or is about to make it
            os.rmdir(root / name)  # only where it is empty
            return True
    try:
        if not _is_locked_by(lock, root / name):
            return False
        said = os.read(lock, 4096).decode(errors="replace")
        return not _is_elsewhere(said) and _remove_contents(root / name)
    finally:
        os.close(lock)


def _this_host() -> str:
    """Name of this host, and what is new with each start of its system."""
    started = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{PREFIX}\n{socket.gethostname()}\n{started}\n"


def _is_elsewhere(said: str) -> bool:
    """Whether a lock file is not ours, or another host's; empty is ours: its writer died early."""
    theirs, mine = said.splitlines(), _this_host().splitlines()
    if not theirs:
        return False
    if len(theirs) != len(mine) or theirs[0] != mine[0]:
        return True
    has_same_start = theirs[2] == mine[2] != ""
    return theirs[1] != mine[1] and not has_same_start


def _remove_own(folder: Path, lock: int, owner: int) -> None:
    """Remove the folder and free its lock; not in a forked child."""
    if os.getpid() == owner:
        with suppress(OSError):  # somebody else has removed it
            _remove_contents(folder)
    os.close(lock)


def _remove_contents(path: Path) -> bool:
    """Remove plain files, the lock last, and the folder if it is empty then."""
    with _opened(path) as folder:
        names = [n for n in os.listdir(folder) if n != LOCK]
        for name in [*names, LOCK]:
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(kind.st_mode):
                os.unlink(name, dir_fd=folder)
    os.rmdir(path)
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a folder, never by a link."""
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        yield folder
    finally:
        os.close(folder)
