"""One worker for many trainings: a process takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_zero.optim import workers
from lightning_zero.worker import HostWorker


class _Kept(HostWorker):
    """Is closed by whoever has made it, not by the engines that use it."""

    def close(self) -> None: ...

    def end(self) -> None:
        super().close()


@contextmanager
def one_worker() -> Iterator[HostWorker]:
    """Engines that are made inside share this one."""
    made = _Kept("tests")

    def instead(name: str, cores: Sequence[int] = (), pin_memory: bool = False) -> Any:
        return made

    usual = workers.HostWorker
    workers.HostWorker = instead
    try:
        yield made
    finally:
        workers.HostWorker = usual
        made.end()
