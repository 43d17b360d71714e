"""Tables of the README that are measured: a test compares, a command writes them anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
END = "<!-- end -->"


def written(name: str) -> str:
    """The table as it stands in the README."""
    return _around(name)[1]


def main(name: str, measure: Callable[[], str]) -> None:
    """``--write`` measures a table and puts it into the README.

    Args:
        name: What the comment before the table says.
        measure: Returns the table.
    """
    if sys.argv[1:] != ["--write"]:
        sys.exit("give --write to measure and to change the README")
    table = measure()
    before, _, after = _around(name)
    README.write_text(before + table + after)
    sys.stdout.write(table)


def _around(name: str) -> tuple[str, str, str]:
    """What comes before the table, the table, and what comes after it."""
    mark = f"<!-- {name} -->\n"
    before, begin, rest = README.read_text().partition(mark)
    inside, end, after = rest.partition(END)
    assert begin, f"README.md has no line {mark!r}"
    assert end, f"README.md has no line {END!r}"
    return before + begin, inside, end + after
