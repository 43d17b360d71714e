"""A checkpoint that all ranks write at once: a folder, in the layout of an ordinary one.

[Note: what is in the folder]
``__R_0.distcp``   the parts that rank R held, as torch.distributed.checkpoint writes them
``__R.sum``        check sum of that file
``.metadata``      which file holds which elements
``rest.pt``        everything else: what ``torch.load`` gives is the checkpoint of plain Lightning
                   with descriptions where tensors are stored
``complete.json``  written last: a folder without it is not a checkpoint

[Note: never half]
Ranks write into a hidden folder next to the target. When every rank's file is on the disk and the
marker is written, the hidden folder and an earlier checkpoint of that name change places in one
step, and the earlier one is removed. A run that is killed leaves the earlier one, or the new one.
Only rank 0 moves and removes: another rank that gives up, because a third one is gone, must not
take files from a folder that rank 0 is about to put in its place.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_zero.checkpoint.files import read_file, replacing, write_error
from lightning_zero.checkpoint.folders import put_in_place, sync_folder
from lightning_zero.checkpoint.planners import METADATA_FILE, PartReader, PartSavePlanner
from lightning_zero.checkpoint.stored import Part, described, from_description
from lightning_zero.comm import Collectives, ProcessGroup

FORMAT = 1
MARKER = "complete.json"
REST = "rest.pt"
SUM_ENDING = ".sum"
_CHUNK_NBYTES = 2**22


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder that was, or was to be, a sharded checkpoint."""
    return path.is_dir()


def snapshot(checkpoint: dict[str, Any]) -> bytes:
    """What a checkpoint holds besides stored tensors, as bytes that training does not change."""
    buffer = io.BytesIO()
    torch.save(described(checkpoint), buffer)
    return buffer.getvalue()


def is_complete(path: Path) -> bool:
    """Whether a save into this folder has come to its end; :func:`check` looks into the files."""
    return (path / MARKER).exists()


def write(
    target: Path,
    folder: Path,
    parts: Sequence[Part],
    rest: bytes,
    group: ProcessGroup | None,
) -> None:
    """Write a checkpoint; to be called on all ranks, in any thread.

    Args:
        target: Where it belongs, on storage that all ranks see.
        folder: A hidden folder next to it, where it is written; it may be left there, or an earlier
            checkpoint, for rank 0 to remove.
        parts: What this rank writes, in host memory.
        rest: See :func:`snapshot`; that of rank 0 counts.
        group: Group over which ranks tell each other what they wrote; None for one process.

    Raises:
        RuntimeError: A rank could not write; on all ranks. The target is as it was.
    """
    try:
        save_parts(
            {},
            storage_writer=_Writer(target, folder, rest),
            planner=PartSavePlanner(parts),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        told = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes.items())
        raise RuntimeError("; ".join(told)) from error


def read(path: Path, weights_only: bool | None, control: Collectives) -> dict[str, Any]:
    """The checkpoint in a folder; to be called on all ranks.

    Args:
        path: The folder.
        weights_only: See :func:`lightning_zero.checkpoint.files.read_file`.
        control: Ranks share the work of checking the files.

    Returns:
        As of an ordinary file, with a ``StoredTensor`` where that has a tensor that was sharded.

    Raises:
        RuntimeError: The folder is not complete, or damaged; on all ranks.
    """
    problems = control.exchange_objects(
        check(path, control.rank, control.world_size), "check a checkpoint"
    )
    for problem in problems:
        if problem:
            raise RuntimeError(problem)
    return open_folder(path, weights_only)


def open_folder(path: Path, weights_only: bool | None = None) -> dict[str, Any]:
    """As :func:`read`, in one process and without a check of the files."""
    rest = read_file(path / REST, weights_only=weights_only)
    found: dict[str, Any] = from_description(rest, PartReader(path))
    return found


def check(path: Path, rank: int = 0, world_size: int = 1) -> str:
    """Why a folder is no valid checkpoint; empty if it is one.

    Args:
        path: The folder.
        rank: Looks into every ``world_size``-th file, from this one on.
        world_size: Ranks that share the files.
    """
    marker = path / MARKER
    try:
        told = json.loads(marker.read_text())
        sums: dict[str, list[int]] = told["files"]
    except FileNotFoundError:
        return (
            f"{path} is no complete checkpoint: {MARKER}, which is written last, is not there. The"
            " run that wrote it was ended before it was done, or it is no sharded checkpoint at"
            " all. Use an earlier checkpoint."
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{marker} cannot be read: {error}. Use an earlier checkpoint."
    if told.get("format") != FORMAT:
        return (
            f"{path} has format {told.get('format')!r}, but this version of lightning_zero reads"
            f" format {FORMAT}: load it with the version that wrote it, or a newer one."
        )
    for name, expected in sorted(sums.items())[rank::world_size]:
        try:
            found = list(_sum_of(path / name))
        except OSError as error:
            return f"{path / name} cannot be read: {error}. Use an earlier checkpoint."
        if found != expected:
            return (
                f"{path / name} is damaged: it has {found[1]} bytes and check sum {found[0]}, but"
                f" {expected[1]} bytes with check sum {expected[0]} were written. Use an earlier"
                " checkpoint."
            )
    return ""


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Says of an error while a checkpoint is written whether the disk is full."""
    try:
        yield
    except Exception as error:
        raise write_error(target, error) from error


class _Writer(FileSystemWriter):
    """Adds check sums, the rest and the marker, and moves the folder to its place."""

    def __init__(self, target: Path, folder: Path, rest: bytes) -> None:
        super().__init__(folder)
        self.folder = folder
        self._target, self._rest = target, rest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See the base class; done when the files are on the disk, with their check sums."""
        with explained(self._target):
            done = super().write_data(plan, planner)
            prefix = plan.storage_data.prefix
            sums = {file.name: _sum_of(file) for file in self.folder.glob(f"{prefix}*.distcp")}
            with replacing(self.folder / f"{prefix.rstrip('_')}{SUM_ENDING}") as part:
                part.write_text(json.dumps(sums))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 when all ranks have written."""
        with explained(self._target):
            self._check_all_are_here(len(results))
            super().finish(metadata, results)
            with replacing(self.folder / REST) as part:
                part.write_bytes(self._rest)
            sums: dict[str, Any] = {}
            for file in self.folder.glob(f"*{SUM_ENDING}"):
                sums |= json.loads(file.read_text())
            sums |= {name: _sum_of(self.folder / name) for name in (REST, METADATA_FILE)}
            with replacing(self.folder / MARKER) as part:
                part.write_text(json.dumps({"format": FORMAT, "files": sums}, indent=1))
            sync_folder(self.folder)
            put_in_place(self.folder, self._target)

    def _check_all_are_here(self, world_size: int) -> None:
        ranks = range(world_size)
        missing = [r for r in ranks if not (self.folder / f"__{r}{SUM_ENDING}").exists()]
        if missing:
            raise RuntimeError(
                f"rank 0 does not see what rank(s) {missing} wrote to {self.folder}: a sharded"
                " checkpoint needs a folder on storage that all ranks share. Save to one, or use"
                " checkpoint='consolidated', which only rank 0 writes."
            )


def _sum_of(file: Path) -> tuple[int, int]:
    """Check sum and bytes of a file."""
    value = nbytes = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_NBYTES):
            value, nbytes = zlib.crc32(chunk, value), nbytes + len(chunk)
    return value, nbytes
