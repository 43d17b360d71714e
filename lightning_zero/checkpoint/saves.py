"""Sharded checkpoints that are written while training goes on."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.folders import remove
from lightning_zero.checkpoint.stored import Part, stored_in
from lightning_zero.comm import ShardGroups

STALE_ENDING = ".part"


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
        self.stalled_s = 0.0
        """Seconds that training has waited for copies and for earlier saves."""

    def begin(
        self, target: Path, checkpoint: dict[str, Any], parts: Callable[[], Sequence[Part]]
    ) -> None:
        """Start to write a checkpoint; to be called on all ranks.

        Args:
            target: The folder, on storage that all ranks see.
            checkpoint: What is written, with stored tensors in it; that of rank 0 counts.
            parts: Gives what this rank holds.

        Raises:
            RuntimeError: The save before has failed, or a rank cannot copy what it holds.
        """
        begin_s = time.perf_counter()
        self.wait()
        problem, rest, wanted = "", b"", set[str]()
        if self._control.rank == 0:
            try:
                wanted = {stored.key for stored in stored_in(checkpoint)}
                rest = sharded.snapshot(checkpoint)
                target.parent.mkdir(parents=True, exist_ok=True)
                _remove_stale(target)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        told = self._control.exchange_objects(
            (problem, secrets.token_hex(4), wanted), "save a sharded checkpoint"
        )
        problem, token, wanted = told[0]
        if problem:
            raise RuntimeError(f"the checkpoint {target} was not saved. Rank 0: {problem}")
        copies = [part.copied() for part in parts() if part.tensor.key in wanted]
        self._target = target
        self._thread = threading.Thread(
            target=self._write, args=(target, token, copies, rest), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.stalled_s += time.perf_counter() - begin_s

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, after the one under way is complete; if it fails, not at all."""
        self._removals.append(path)
        if self._thread is None or not self._thread.is_alive():
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
                f" {type(error).__name__}: {error}"
            ) from error
        self._remove_now()

    def _write(self, target: Path, token: str, parts: list[Part], rest: bytes) -> None:
        try:
            sharded.write(target, token, parts, rest, self._group)
        except BaseException as error:
            self._error = error

    def _remove_now(self) -> None:
        removals, self._removals = self._removals, []
        for path in removals if self._control.rank == 0 else ():
            remove(path)


def _remove_stale(target: Path) -> None:
    """Remove what killed runs have left of this target."""
    for left in target.parent.glob(f".{target.name}.*{STALE_ENDING}"):
        remove(left)
