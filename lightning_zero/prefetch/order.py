"""The order in which buckets are used, learned from the step before."""

from __future__ import annotations


class UseOrder:
    """Order of uses in one phase (training forward, backward, evaluation).

    Uses are buckets' indices, repeated as often as they are used. The order seen in one pass is
    what the next pass is expected to follow; a pass that leaves it is followed again from the next
    known use on.
    """

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._cursor = 0

    def use(self, bucket: int) -> None:
        """Note a use."""
        self._seen.append(bucket)
        try:
            self._cursor = self._expected.index(bucket, self._cursor) + 1
        except ValueError:  # not expected, or not any more
            return

    def next_use(self) -> int | None:
        """The bucket whose use comes next; None if not known."""
        return self._expected[self._cursor] if self._cursor < len(self._expected) else None

    def next_other(self, bucket: int) -> int | None:
        """The first bucket to come that is another one than this; None if not known."""
        for candidate in self._expected[self._cursor :]:
            if candidate != bucket:
                return candidate
        return None

    def restart(self) -> None:
        """Begin a new pass."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._cursor = 0
