"""Something that may fail on some ranks only, and then has to fail on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_zero.comm.api import Collectives


class KeptError:
    """An error of one rank, kept until all of them know of it; nothing more is done after it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def run(self, run: Callable[[], None]) -> None:
        """Do something that may fail, if nothing has failed so far."""
        if self._error is not None:
            return
        try:
            run()
        except Exception as error:
            self._error = error

    def raise_kept(self) -> None:
        """Raise what was kept, if there is anything."""
        if self._error is not None:
            raise self._error


@contextmanager
def failing_together(
    collectives: Collectives | None, what: str, told: str = "could not {}; "
) -> Iterator[None]:
    """An error that any rank meets inside is raised on all ranks; for all of them to enter.

    Args:
        collectives: Group of the ranks; None for one that is alone.
        what: What they do, for the ranks that could do their part.
        told: How the error of those ranks begins, with a place for ``what``.

    Raises:
        RuntimeError: Another rank has met an error.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    text = "" if problem is None else f"{type(problem).__name__}: {problem}"
    every = [text] if collectives is None else collectives.exchange_objects(text, what)
    if problem is not None:
        raise problem
    failed = [f"rank {rank}: {theirs}" for rank, theirs in enumerate(every) if theirs]
    if failed:
        raise RuntimeError(f"{told.format(what)}{'; '.join(failed)}")
