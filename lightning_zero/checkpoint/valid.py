"""Which checkpoints are whole: of either form, without making any object that they name."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.folders import hidden_folders

ENDING = ".ckpt"
_OBJECTS = "/data.pkl"


def check_checkpoint(path: str | os.PathLike[str]) -> str:
    """Why a file or folder is no whole checkpoint; empty if it is one.

    All bytes are read and compared with the check sums that were written with them.

    Args:
        path: A file of ``torch.save``, or the folder of a sharded checkpoint.
    """
    path = Path(path)
    if path.is_symlink() and not path.exists():
        return f"{path} leads to {os.readlink(path)}, which is not there. Use another checkpoint."
    if path.is_dir():
        return sharded.check(path)
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            has_sums = any(record.CRC for record in records)  # see torch's set_crc32_options
            damaged = file.testzip() if has_sums else None
    except FileNotFoundError:
        return f"{path} is not there."
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        return f"{path} is no checkpoint, or not whole: {error}. Use an earlier checkpoint."
    if damaged is not None:
        return f"{path} is damaged: {damaged} does not have its check sum. Use an earlier one."
    if not any(record.filename.endswith(_OBJECTS) for record in records):
        return f"{path} is no checkpoint: torch.save has not written it."
    return ""


def newest_valid(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in a folder that was written last, among those that are whole.

    For runs that continue by themselves: ``trainer.fit(model, ckpt_path=newest_valid(folder))``.
    Call it before training begins, when no run writes there; every rank finds the same.

    Args:
        folder: Where checkpoints are, of either form; names that do not end with ``.ckpt`` are
            passed over. It need not exist.

    Returns:
        Its path, or that of a link to it; None if there is none, and training starts anew. Where
        the file system cannot exchange names and a run was killed in the moment between two names,
        it may be a hidden folder, which stays until the next checkpoint is complete.
    """
    folder = Path(folder)
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder)
    visible = [folder / n for n in names if n.endswith(ENDING) and not n.startswith(".")]
    for path in (*_newest_first(visible), *_newest_first(hidden_folders(folder))):
        if not check_checkpoint(path):
            return path
    return None


def _newest_first(paths: list[Path]) -> Iterator[Path]:
    """By the time at which the last byte was written; links last, names settle what is equal."""
    found: list[tuple[int, bool, str]] = []
    for path in paths:
        with suppress(OSError):  # a link to nothing, or a folder that was never complete
            written = path / sharded.MARKER if path.is_dir() else path
            found.append((written.stat().st_mtime_ns, not path.is_symlink(), str(path)))
    return (Path(name) for _, _, name in sorted(found, reverse=True))
