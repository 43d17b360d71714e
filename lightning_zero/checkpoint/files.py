"""Files of checkpoints: written beside their place and moved there, read without a copy.

[Note: whole or not at all]
A file is written under another name in the same folder, brought to the disk, and then put in its
place in one step. Whoever reads, at whatever time, and whenever a writer is killed, finds the
earlier file or the new one. A writer locks its unfinished file: one that nobody locks was left
behind by a writer that is dead, and the next one of the same target removes it.
"""

from __future__ import annotations

import argparse
import errno
import os
import pathlib
import pickle
import random
import string
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import CheckpointIO
from typing_extensions import override

from lightning_zero import _compat

try:
    import fcntl
except ImportError:  # not on this system: what a dead writer left stays
    fcntl = None  # type: ignore[assignment]

try:
    from omegaconf import AnyNode, DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata
except ImportError:  # no such hyperparameters either
    _OMEGACONF: tuple[Any, ...] = ()
else:
    _OMEGACONF = (DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata)
    _OMEGACONF += (Any, defaultdict, dict, list, int, float, str, bool)

MapLocation = Callable[..., Any] | torch.device | str | dict[str, str] | None

UNFINISHED = ".unfinished"
"""How the name of a file ends that is still being written."""
MAX_STEM_NBYTES = 160
"""Most bytes of a target's name that stand in the name of its unfinished file."""
ZIP_START = b"PK\x03\x04"
NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EBADF}
"""What file systems answer that cannot bring a folder to the disk."""

HARMLESS: tuple[Any, ...] = (
    argparse.Namespace,
    timedelta,
    type(pathlib.Path()),
    type(pathlib.PurePath()),
    *_OMEGACONF,
)
"""What users keep among hyperparameters, and that does nothing when it is made."""

Checkpoint = dict[str, Any]


# Writing.


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place for a new file that takes the place of ``path`` when the block ends without an error.

    See [Note: whole or not at all].

    Args:
        path: The file to be written, new or there already; its folder has to be there.

    Yields:
        Another file in the same folder, empty, to be written to under this name.

    Raises:
        IsADirectoryError: There is a folder of this name.
        OSError: The file could not be written; there is no trace of it, and ``path`` is untouched.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(
            errno.EISDIR, "a checkpoint of one file cannot take the place of a folder", str(path)
        )
    unfinished, lock = _begin(path)
    try:
        yield unfinished
        bring_to_disk(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(lock)
    bring_to_disk(path.parent)
    for leftover in leftovers(path):
        _remove_if_dead(leftover)


def leftovers(path: Path) -> list[Path]:
    """Unfinished files of a target, of writers that are dead or at work."""
    start = stem(path)
    with suppress(OSError):
        names = sorted(os.listdir(path.parent))
        return [path.parent / n for n in names if n.startswith(start) and n.endswith(UNFINISHED)]
    return []


def stem(path: Path) -> str:
    """How the names of what is written next to a target begin: with a dot, and never too long.

    Without underscores: Lightning takes every name with ``hpc_ckpt_`` in it for a checkpoint.
    """
    name = path.name.replace("_", "-")
    if len(os.fsencode(name)) > MAX_STEM_NBYTES:
        name = f"{name[: MAX_STEM_NBYTES // 4]}-{zlib.crc32(os.fsencode(path.name)):08x}"
    return f".{name}."


def _begin(path: Path) -> tuple[Path, int]:
    """A new unfinished file, and the descriptor that locks it."""
    while True:
        code = "".join(random.SystemRandom().choices(string.ascii_lowercase, k=10))
        unfinished = path.parent / f"{stem(path)}{code}{UNFINISHED}"
        try:
            lock = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        try_lock(lock)
        if unfinished.exists():  # else another writer took it for a dead one's before the lock
            return unfinished, lock
        os.close(lock)


def try_lock(file: int) -> bool:
    """Lock a file; False if another process has, or if the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_dead(unfinished: Path) -> None:
    with suppress(OSError):  # one that is gone by now, or of another user
        file = os.open(unfinished, os.O_RDWR)
        try:
            if try_lock(file):
                unfinished.unlink()
        finally:
            os.close(file)


def bring_to_disk(path: Path) -> None:
    """Have the content of a file, or the names in a folder, survive a loss of power."""
    is_folder = path.is_dir()
    file = -1
    try:
        file = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        os.fsync(file)
    except OSError as error:
        if not is_folder or error.errno not in NOT_FOR_FOLDERS:
            raise
    finally:
        if file >= 0:
            os.close(file)


def save_file(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint straight into a local file; what is not on the CPU passes it in pieces.

    Args:
        checkpoint: Anything that ``torch.save`` writes.
        path: The file; see :func:`replacing`.

    Raises:
        OSError: The disk is full, or cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        try:
            with unfinished.open("wb") as file:  # of a path, torch would write the random name
                torch.save(checkpoint, file)
        except (RuntimeError, OSError) as error:
            raise write_error(path, error) from error


def write_error(path: Path, error: Exception) -> Exception:
    """What to raise where a checkpoint could not be written.

    Args:
        path: The checkpoint.
        error: What was raised; torch hides the error of the disk behind one of its own.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    if found is None:
        return RuntimeError(f"{path}: this checkpoint could not be written. {error}")
    why = "the disk is full" if found.errno == errno.ENOSPC else found.strerror or str(found)
    return OSError(
        found.errno,
        f"{why}, so this checkpoint was not written, and an earlier one of its name is untouched",
        str(path),
    )


# Reading.


def read_file(
    path: str | os.PathLike[str],
    map_location: MapLocation = "cpu",
    weights_only: bool | None = None,
    mmap: bool = True,
) -> Checkpoint:
    """Read a local checkpoint file.

    Args:
        path: The file.
        map_location: As for ``torch.load``.
        weights_only: False makes any object that the file names, and so runs any code that is in
            it. Else tensors, plain Python values and a few harmless types are read, and what was
            allowed with ``torch.serialization.add_safe_globals``.
        mmap: Map the file instead of reading it: tensors take memory only where they are used or
            written to, and the file is left as it is.

    Returns:
        What the file holds.

    Raises:
        FileNotFoundError: There is no such file.
        pickle.UnpicklingError: The file holds objects that ``weights_only`` keeps out.
        RuntimeError: This is no checkpoint, or a part of one, or it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a checkpoint of one file was expected", str(path))
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))
    with path.open("rb") as file:
        is_zip = file.read(len(ZIP_START)) == ZIP_START
    try:
        return _load(path, map_location, weights_only, mmap=mmap and is_zip)
    except Exception as error:
        refused = _refused(path if is_zip else None, error)
        raise _explained(str(path), path, is_zip, refused, error) from error


def _load(
    source: Path | IO[bytes], map_location: MapLocation, weights_only: bool | None, mmap: bool
) -> Checkpoint:
    with torch.serialization.safe_globals(_new_harmless()):
        loaded = torch.load(
            source, map_location=map_location, weights_only=weights_only, mmap=mmap or None
        )
    if not isinstance(loaded, dict):
        raise TypeError(f"a checkpoint is a dict, and this is a {type(loaded).__name__}")
    return loaded


def _explained(
    label: str, source: Path | IO[bytes], is_zip: bool, refused: list[str], error: Exception
) -> Exception:
    """An error that says which file cannot be read, why, and what to do."""
    nbytes = source.stat().st_size if isinstance(source, Path) else source.seek(0, os.SEEK_END)
    if refused:
        return pickle.UnpicklingError(
            f"{label} holds objects that could run code when they are read: {', '.join(refused)}."
            " Allow these types with torch.serialization.add_safe_globals([...]) if they are"
            " harmless; or pass weights_only=False (to trainer.fit, validate, test or predict),"
            " only if you trust who wrote the file."
        )
    if not is_zip and not isinstance(error, (TypeError, ImportError, AttributeError)):
        what = f"is no checkpoint: torch.save has not written these {nbytes} bytes"
    elif is_zip and not zipfile.is_zipfile(source):
        what = (
            f"is not whole, {nbytes} bytes are there: it was cut off while it was written or"
            " copied, or was changed since. Take an earlier checkpoint, or copy it again"
        )
    else:
        what = "could not be read"
    return RuntimeError(f"{label} {what}. {type(error).__name__}: {str(error)[:200]}")


def _refused(zip_path: Path | None, error: Exception) -> list[str]:
    """Names of what was refused in a file; empty if that was not the reason."""
    if not isinstance(error, pickle.UnpicklingError):
        return []
    if zip_path is not None:
        with suppress(Exception):
            with torch.serialization.safe_globals(_new_harmless()):
                found = torch.serialization.get_unsafe_globals_in_checkpoint(zip_path)
            reason = str(error).partition("WeightsUnpickler error:")[2]
            return sorted(found) or [reason.partition("Check the doc")[0].strip()]
    words = str(error).split()
    return [words[words.index("GLOBAL") + 1]] if "GLOBAL" in words[:-1] else []


def _new_harmless() -> list[Any]:
    """What is not allowed yet; leaving the scope of ``safe_globals`` would forbid the rest."""
    known = torch.serialization.get_safe_globals()
    return [kind for kind in HARMLESS if kind not in known]


# For Lightning.


class ZeroCheckpointIO(CheckpointIO):
    """Writes checkpoints so that a file is whole or not there, and reads them without a copy.

    Local files are written without a second copy in memory (see :func:`replacing`), and mapped when
    they are read. Any other URL goes through fsspec; ``storage_options`` are the options of its
    file system. ``weights_only`` is on unless the user says False, see :func:`read_file`.
    """

    @override
    def save_checkpoint(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(
                "storage_options are the options of an fsspec file system, a dict, not"
                f" {type(storage_options).__name__}"
            )
        files, place = url_to_fs(os.fspath(path), **(storage_options or {}))
        if isinstance(files, LocalFileSystem):
            if storage_options:
                raise TypeError(
                    f"storage_options={dict(storage_options)!r} have no effect on a local file"
                    f" ({place}): leave them out"
                )
            save_file(checkpoint, Path(place))
            return
        files.makedirs(os.path.dirname(place), exist_ok=True)
        with files.transaction, files.open(place, "wb") as file:  # nothing appears after an error
            torch.save(checkpoint, file)

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = "cpu",
        weights_only: bool | None = None,
    ) -> Checkpoint:
        files, place = url_to_fs(os.fspath(path))
        if isinstance(files, LocalFileSystem):
            return read_file(place, map_location, weights_only)
        if not files.exists(place):
            raise FileNotFoundError(errno.ENOENT, "there is no such checkpoint", os.fspath(path))
        with files.open(place, "rb") as file:
            is_zip = file.read(len(ZIP_START)) == ZIP_START
            file.seek(0)
            try:
                return _load(file, map_location, weights_only, mmap=False)
            except Exception as error:
                refused = _refused(None, error)
                raise _explained(os.fspath(path), file, is_zip, refused, error) from error

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        files, place = url_to_fs(os.fspath(path))
        if files.exists(place):
            files.rm(place, recursive=True)


def usable_io(io: CheckpointIO | None) -> CheckpointIO:
    """A user's plugin for files, writing through ours if it wraps another; ours without one."""
    if io is None:
        return ZeroCheckpointIO()
    _compat.give_inner_io(io, ZeroCheckpointIO())
    return io
