"""How many names stand in one message."""

from __future__ import annotations

from collections.abc import Iterable

MAX_NAMED = 5
"""Names that a message lists if nothing else is said."""


def some(names: Iterable[str], most: int = MAX_NAMED) -> str:
    """The first of some names, and how many there are besides.

    Args:
        names: As they are to be shown.
        most: How many are listed.
    """
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")
