"""What the two processes send each other."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zero.worker.jobs import Job


@dataclass(frozen=True, slots=True)
class NewArena:
    """To the worker: memory, whose descriptor comes by the other socket, in the same order."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Do:
    """To the worker: a job."""

    number: int
    job: Job


@dataclass(frozen=True, slots=True)
class Done:
    """From the worker: a job has ended."""

    number: int
    duration_s: float
    error: str = ""
    """Trace of the error that it has ended with."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: it has been started."""

    cores: tuple[int, ...]
    """Those that it may run on."""
