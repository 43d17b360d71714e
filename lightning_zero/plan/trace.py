"""The trace: which buckets a step uses, in which order, learned from the steps before.

[Note: trace]
``RECORD``: the first pass is written down. ``COMPLETE``: a frozen :class:`Trace` tells what comes
next. ``INVALID``: the pass under way has left every known trace; its buckets come on demand, and
since all of it is written down, it is a known trace from the next pass on. A pass that leaves the
expected trace for another known one (a GAN's other turn, a shorter text) only switches.
"""

from __future__ import annotations

import enum
import hashlib
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

MAX_TRACES = 16
"""Known traces of one kind of pass; the one that was not followed for longest is forgotten."""


class TraceMode(enum.Enum):
    """How much is known about the pass under way."""

    RECORD = "record"
    """Nothing is known yet; this pass is the first."""

    COMPLETE = "complete"
    """The pass follows a known trace."""

    INVALID = "invalid"
    """The pass has left all known traces."""


class Use(NamedTuple):
    """A module uses a bucket."""

    direction: str
    """``"forward"`` or ``"backward"``."""

    module: str
    """Fully qualified name of the module that uses it."""

    bucket: int
    """Index of the bucket."""

    def __str__(self) -> str:
        return f"{self.direction} of {self.module or 'the root module'!r} (bucket {self.bucket})"


class Departure(NamedTuple):
    """A pass left the trace that it was expected to follow."""

    position: int
    """How many uses were as expected."""

    expected: Use | None
    """The next use of the trace; None if it had ended."""

    found: Use | None
    """What was used instead; None if the pass had ended."""


class Trace:
    """A frozen order of uses.

    Args:
        uses: In the order in which they came; none equals the one before it.
    """

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = tuple(uses)
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, use in enumerate(self.uses):
            self._places[use.bucket].append(place)

    def next_use(self, bucket: int, start: int) -> int | None:
        """Place of the first use of a bucket at or after a place; None if there is none."""
        places = self._places.get(bucket, [])
        found = bisect_left(places, start)
        return places[found] if found < len(places) else None

    def last_use(self, bucket: int) -> int | None:
        """Place of the last use of a bucket; None if it is never used."""
        places = self._places.get(bucket)
        return places[-1] if places else None

    def of(self, direction: str) -> tuple[Use, ...]:
        """The uses of one direction, in order."""
        return tuple(use for use in self.uses if use.direction == direction)

    @cached_property
    def digest(self) -> int:
        """A number of 62 bits that two ranks share if they have the same trace."""
        text = repr([tuple(use) for use in self.uses]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2

    def __len__(self) -> int:
        return len(self.uses)


class Tracer:
    """Follows the passes of one kind: training steps, or forwards of evaluation."""

    def __init__(self) -> None:
        self.mode = TraceMode.RECORD
        self._departure: Departure | None = None
        self.counts: Counter[str] = Counter()
        """Passes that ended in a mode, by its value, and ``"switch"`` for changes of trace."""
        self._known: OrderedDict[tuple[Use, ...], Trace] = OrderedDict()
        self._successor: dict[tuple[Use, ...], tuple[Use, ...]] = {}
        self._last: tuple[Use, ...] | None = None
        self._expected: Trace | None = None
        self._cursor = 0
        self._seen: list[Use] = []

    @property
    def trace(self) -> Trace | None:
        """The trace that is followed; None where none is known."""
        return self._expected

    @property
    def known(self) -> tuple[Trace, ...]:
        """All known traces, the one followed last at the end."""
        return tuple(self._known.values())

    @property
    def cursor(self) -> int:
        """Place of the use that is expected next."""
        return self._cursor

    def use(self, use: Use) -> bool:
        """Note a use of the pass under way; returns whether it is another one than the last."""
        seen = self._seen
        if seen and seen[-1] == use:
            return False
        seen.append(use)
        expected = self._expected
        if expected is None:
            return True
        if self.mode is TraceMode.INVALID:
            self._resume(use)
        elif self._cursor < len(expected) and expected.uses[self._cursor] == use:
            self._cursor += 1
        else:
            self._depart(use)
        return True

    def end(self) -> Departure | None:
        """The pass is over.

        Returns:
            How it has left the known traces; None if it has followed one, or was the first.
        """
        if not self._seen:
            return None
        uses = tuple(self._seen)
        expected = self._expected
        if self.mode is TraceMode.COMPLETE and expected and self._cursor < len(expected):
            self._depart(None)
        departure = self._departure
        self.counts[self.mode.value] += 1
        if uses not in self._known:
            self._known[uses] = Trace(uses)
            while len(self._known) > MAX_TRACES:
                forgotten, _ = self._known.popitem(last=False)
                self._successor.pop(forgotten, None)
        self._known.move_to_end(uses)
        if self._last is not None:
            self._successor[self._last] = uses
        self._last = uses
        self._begin()
        return departure

    def drop(self) -> None:
        """Forget the pass under way; it was not a whole one."""
        self._begin()

    def forget(self) -> None:
        """Forget all traces; the next pass is the first."""
        self._known.clear()
        self._successor.clear()
        self._last = None
        self._begin()

    def upcoming(self) -> Iterator[int]:
        """Buckets of the uses to come, in order, repeated as often as they are used."""
        if self._expected is not None:
            for place in range(self._cursor, len(self._expected)):
                yield self._expected.uses[place].bucket

    def next_use(self, bucket: int) -> int | None:
        """Place of a bucket's next use; None if it is not used again, or nothing is known."""
        return None if self._expected is None else self._expected.next_use(bucket, self._cursor)

    def digest(self) -> int:
        """A number that ranks share if they know the same traces; 0 if they know none."""
        total = 0
        for trace in self._known.values():
            total ^= trace.digest
        return total

    def _begin(self) -> None:
        """Expect what followed on the last pass when it was seen before."""
        self._seen = []
        self._cursor = 0
        self._departure = None
        guess = None
        if self._last is not None:
            guess = self._known.get(self._successor.get(self._last, self._last))
            guess = guess or self._known.get(self._last)
        self._expected = guess
        self.mode = TraceMode.RECORD if guess is None else TraceMode.COMPLETE

    def _depart(self, found: Use | None) -> None:
        """The pass goes another way than the expected trace."""
        expected = self._expected
        if expected is None:
            raise AssertionError("nothing was expected")
        seen = tuple(self._seen)
        for trace in reversed(self._known.values()):
            is_other_way = trace.uses[: len(seen)] == seen
            if is_other_way and (found is not None or len(trace) == len(seen)):
                self._expected = trace
                self._cursor = len(seen)
                self.counts["switch"] += 1
                return
        at_end = self._cursor >= len(expected)
        awaited = None if at_end else expected.uses[self._cursor]
        self._departure = Departure(self._cursor, awaited, found)
        self.mode = TraceMode.INVALID
        if found is not None:
            self._resume(found)

    def _resume(self, use: Use) -> None:
        """A guess of what comes next: go on where the trace has this use later on."""
        if self._expected is None:
            return
        uses = self._expected.uses
        place = self._expected.next_use(use.bucket, self._cursor)
        while place is not None and uses[place].direction != use.direction:
            place = self._expected.next_use(use.bucket, place + 1)
        if place is not None:
            self._cursor = place + 1
