"""Something that may fail on some ranks only, and then has to fail on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_zero.comm.api import Collectives

T = TypeVar("T")


def agreed(control: Collectives, what: str, run: Callable[[], T]) -> T:
    """Run something that does not meet other ranks; for all ranks to call.

    Args:
        control: Group over which ranks tell each other how it went.
        what: What is done, for messages.
        run: Does it.

    Returns:
        What ``run`` has returned.

    Raises:
        Exception: What ``run`` has raised here.
        RuntimeError: It has raised on other ranks only; says on which, and what.
    """
    try:
        found = run()
    except Exception as error:
        control.exchange_objects(describe(error), what)
        raise
    raise_others(control.exchange_objects("", what), what)
    return found


def describe(error: Exception) -> str:
    """An error as other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


def raise_others(every: list[str], what: str) -> None:
    """Raise what other ranks have told of.

    Args:
        every: Of each rank, an error or an empty text.
        what: What was done.

    Raises:
        RuntimeError: A rank has told of an error.
    """
    told = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
    if told:
        raise RuntimeError(f"other ranks could not {what}: {'; '.join(told)}")
