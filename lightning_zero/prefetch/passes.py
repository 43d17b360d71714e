"""Which pass is under way, what it is expected to use next, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_zero.plan.trace import Tracer, Use
from lightning_zero.prefetch.report import TraceReport

TRAINING, EVALUATION = "training step", "evaluation"


class Passes:
    """Follows training steps and evaluations, each kind by traces of its own.

    A training step goes from the beginning of its forward to the beginning of the next pass, or to
    the optimizer step; so its backward is a part of it. An evaluation is one forward.

    Args:
        numels: Elements of each bucket that comes and goes, by index.
        rank: This rank.
    """

    def __init__(self, numels: Mapping[int, int], rank: int) -> None:
        self.tracers = {TRAINING: Tracer(), EVALUATION: Tracer()}
        self.report = TraceReport(rank)
        self.kind: str | None = None
        """Kind of the pass under way; None between passes."""
        self._numels = dict(numels)

    def restart(self, numels: Mapping[int, int]) -> None:
        """The buckets have changed: what was known of the order of passes holds no more.

        Args:
            numels: Elements of each bucket that comes and goes, by index.
        """
        self.end()
        self._numels = dict(numels)
        for tracer in self.tracers.values():
            tracer.forget()

    def begin(self, kind: str) -> None:
        """A pass begins; one under way has ended before."""
        self.kind = kind
        self.report.begin()

    def end(self) -> bool:
        """The pass under way is over; returns whether there was one."""
        kind, self.kind = self.kind, None
        if kind is None:
            return False
        tracer = self.tracers[kind]
        mode = tracer.mode
        departure = tracer.end()
        self.report.end(kind, mode, departure)
        return True

    def drop(self) -> None:
        """Forget the pass under way: it was interrupted."""
        self.kind = None
        for tracer in self.tracers.values():
            tracer.drop()

    def use(self, module: str, bucket: int, is_backward: bool) -> bool:
        """A module uses a bucket; returns whether it did not just do so."""
        use = Use("backward" if is_backward else "forward", module, bucket)
        return self._tracer(is_backward).use(use)

    def upcoming(self, is_backward: bool) -> Iterator[int]:
        """Buckets that come next, in order, repeated as often as they are used."""
        return self._tracer(is_backward).upcoming()

    def next_use(self, bucket: int) -> int | None:
        """Place of a bucket's next use in the trace; None if it is not known."""
        return self._tracer(False).next_use(bucket)

    def is_near(self, bucket: int, reuse_numel: int, is_backward: bool) -> bool:
        """Whether a bucket is used again before more than some elements of others."""
        tracer = self._tracer(is_backward)
        if tracer.next_use(bucket) is None:
            return False
        between_numel = 0
        seen: set[int] = set()
        for index in tracer.upcoming():
            if index == bucket:
                return True
            if index not in seen:
                seen.add(index)
                between_numel += self._numels[index]
                if between_numel > reuse_numel:
                    return False
        return False

    def digest(self) -> int:
        """A number that ranks share if they have recorded the same traces."""
        return self.tracers[TRAINING].digest() ^ self.tracers[EVALUATION].digest()

    def compare(self, digests: Sequence[int]) -> None:
        """Take note of the digests of all ranks."""
        differ = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if differ:
            self.report.ranks_differ(differ)

    def _tracer(self, is_backward: bool) -> Tracer:
        return self.tracers[TRAINING if is_backward or self.kind is None else self.kind]
