"""Says what left the trace, and what it cost."""

from __future__ import annotations

import time
import warnings
from collections import Counter

from lightning_zero.plan.trace import Departure, TraceMode


class TraceWarning(UserWarning):
    """Steps do not follow the order of modules that was recorded; they are slower, not wrong."""


class TraceReport:
    """Counts passes that left their trace, and warns once for each cause.

    Causes are: another module, more modules, or fewer, in training or in evaluation.

    Args:
        rank: This rank; only rank 0 warns.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.passes: Counter[str] = Counter()
        """Passes so far, by their kind (``"training step"``, ``"evaluation"``)."""
        self.invalidations = 0
        """Passes that left all known traces."""
        self.fetched_on_access = 0
        """Buckets that were not there when a weight was read outside of its own module."""
        self.fetched_on_demand = 0
        """Buckets that were not even on their way when they were needed."""
        self.fetched_ahead = 0
        """Buckets that were here or on their way when they were needed."""
        self._causes: Counter[tuple[str, bool, bool]] = Counter()
        self._usual_s: dict[str, float] = {}
        self._began_s = 0.0
        self._has_told_of_ranks = False

    def begin(self) -> None:
        """A pass begins."""
        self._began_s = time.perf_counter()

    def end(self, kind: str, mode: TraceMode, departure: Departure | None) -> None:
        """A pass has ended.

        Args:
            kind: ``"training step"`` or ``"evaluation"``.
            mode: Mode in which it ended.
            departure: How it left the known traces.
        """
        took_s = time.perf_counter() - self._began_s
        self.passes[kind] += 1
        if departure is not None:
            self.invalidations += 1
            self._tell(kind, departure, took_s)
        elif mode is TraceMode.COMPLETE:
            usual_s = self._usual_s.get(kind, took_s)
            self._usual_s[kind] = usual_s + 0.2 * (took_s - usual_s)

    def ranks_differ(self, ranks: list[int]) -> None:
        """Other ranks have recorded other traces than rank 0."""
        if self._has_told_of_ranks or self._rank != 0:
            return
        self._has_told_of_ranks = True
        warnings.warn(
            f"rank(s) {ranks} run other modules than rank 0, or in another order. Each rank then"
            " fetches its parameters in its own order, which is right, and as fast as the slowest"
            " rank.",
            TraceWarning,
            stacklevel=2,
        )

    def metrics(self) -> dict[str, float]:
        """Counts for a logger."""
        return {
            "zero/trace_invalidations": float(self.invalidations),
            "zero/fetched_on_access": float(self.fetched_on_access),
            "zero/fetched_on_demand": float(self.fetched_on_demand),
            "zero/fetched_ahead": float(self.fetched_ahead),
        }

    def _tell(self, kind: str, departure: Departure, took_s: float) -> None:
        expected, found = departure.expected, departure.found
        # Modules whose order changes all the time are one cause, not one for each pair of them.
        cause = (kind, expected is None, found is None)
        self._causes[cause] += 1
        if self._causes[cause] > 1 or self._rank != 0:
            return
        usual_s = self._usual_s.get(kind)
        slowdown = f", {took_s / usual_s:.1f} times as long as usual" if usual_s else ""
        warnings.warn(
            f"{kind} {self.passes[kind]} left the recorded order of modules: expected"
            f" {expected or 'its end'}, found {found or 'its end'}. What came after was fetched on"
            f" demand; it took {took_s * 1e3:.0f} ms{slowdown}. So far {self.invalidations}"
            " pass(es) have left their order. That is slower, not wrong; this path is known now.",
            TraceWarning,
            stacklevel=2,
        )
