"""Sharded checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.folders import SideFolder, discard, remove_leftovers
from lightning_zero.checkpoint.stored import Part, stored_in
from lightning_zero.comm import ShardGroups
from lightning_zero.comm.agreed import failing_together

Parts = Callable[[], Sequence[Part]]


class ShardedSaves:
    """Writes one checkpoint at a time, in a thread of each rank.

    What is written is copied first, so training may go on at once. What goes wrong is reported by
    the next call of any method but ``remove``, on all ranks.

    Args:
        groups: The ranks that write.
    """

    def __init__(self, groups: ShardGroups) -> None:
        self._control = groups.control
        self._group = groups.background()
        self._thread: threading.Thread | None = None
        self._target = Path()
        self._error: BaseException | None = None
        self._removals: list[Path] = []

    def begin(self, target: Path, checkpoint: dict[str, Any], parts: Parts) -> None:
        """Start to write a checkpoint; to be called on all ranks.

        Args:
            target: The folder, on storage that all ranks see.
            checkpoint: What is written, with stored tensors in it; that of rank 0 counts.
            parts: Gives what this rank holds.

        Raises:
            RuntimeError: The save before has failed, or a rank cannot copy what it holds.
        """
        target = Path(os.path.abspath(target))  # the thread may see another working directory
        side: SideFolder | None = None
        try:
            with failing_together(self._control, f"save the checkpoint {target}"):
                self.wait()
                rest, wanted = b"", set[str]()
                if self._control.rank == 0:
                    wanted = {stored.key for stored in stored_in(checkpoint)}
                    rest = sharded.snapshot(checkpoint)
                    with sharded.explained(target):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        remove_leftovers(target, sharded.is_complete)
                        side = SideFolder(target)
            folder, wanted = self._control.exchange_objects(
                (None if side is None else side.path, wanted), "save a sharded checkpoint"
            )[0]
            with failing_together(self._control, f"copy what belongs to the checkpoint {target}"):
                copies = [part.copied() for part in parts() if part.tensor.key in wanted]
        except BaseException:
            if side is not None:
                side.close()
            raise
        self._target = target
        self._thread = threading.Thread(
            target=self._write,
            args=(target, folder, copies, rest, side),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, after the one under way is complete; if it fails, not at all."""
        self._removals.append(path)
        is_done = self._thread is None or not self._thread.is_alive()
        if is_done and self._error is None:
            self._remove_now()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until all is written.

        Args:
            timeout: Longest wait; None for no limit but that of the transfers.

        Raises:
            RuntimeError: The last save has failed.
        """
        if self._thread is None:
            return
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError(f"the checkpoint {self._target} was not complete in time")
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._removals.clear()  # what was to be replaced is the newest there is
            raise RuntimeError(
                f"the checkpoint {self._target} was not saved; earlier ones are as they were."
                f" {error}"
            ) from error
        self._remove_now()

    def _write(
        self, target: Path, folder: Path, parts: list[Part], rest: bytes, side: SideFolder | None
    ) -> None:
        try:
            sharded.write(target, folder, parts, rest, self._group)
        except BaseException as error:
            self._error = error
        finally:
            if side is not None:
                side.close()
                if self._error is None:
                    remove_leftovers(target, lambda _: False)

    def _remove_now(self) -> None:
        removals, self._removals = self._removals, []
        for path in removals if self._control.rank == 0 else ():
            discard(path)
