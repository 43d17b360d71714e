"""How long a step submits, waits and computes: sums of spans, per step and over a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from lightning_zero.observe.events import DeviceEvent, DeviceEvents, is_host_time
from lightning_zero.observe.recorder import Recorder, Span

Pass = Literal["forward", "backward"]
Verdict = Literal["submit-bound", "wait-bound", "compute-bound"]

PASSES: tuple[Pass, Pass] = ("forward", "backward")
FETCH_TIMERS = (
    "forward_fetch_submit",
    "forward_fetch_wait",
    "forward_prefetch_submit",
    "forward_all_gather",
    "backward_fetch_submit",
    "backward_fetch_wait",
    "backward_prefetch_submit",
    "backward_all_gather",
)
"""The eight timers of stage 3."""

SUBMITTING: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("forward_fetch_submit", "forward_prefetch_submit"),
    "backward": ("backward_fetch_submit", "backward_prefetch_submit"),
}
WAITING: Mapping[Pass, tuple[str, ...]] = {
    "forward": ("forward_fetch_wait",),
    "backward": ("backward_fetch_wait", "reduce_wait"),
}
BOUND_SHARE = 0.1
"""Part of a pass that submitting and waiting take together where computing no longer bounds it."""

HINTS: Mapping[Verdict, str] = {
    "submit-bound": "fewer and larger transfers (a larger bucket_numel)",
    "wait-bound": "transfers that start earlier (overlap_comm=True, a larger prefetch_numel), or a"
    " lower stage, which sends less",
    "compute-bound": "nothing to gain from other settings of transfers",
}


@dataclass(slots=True)
class KindSum:
    """Sum over spans, or instants, of one kind."""

    seconds: float = 0.0
    """Their durations."""

    count: int = 0
    """How many there were."""

    numel: int = 0
    """Elements that they were about."""

    def add(self, seconds: float, count: int, numel: int) -> None:
        """Add one span, or a sum of others."""
        self.seconds += seconds
        self.count += count
        self.numel += numel


@dataclass(slots=True)
class StepTimes:
    """Sums over one step, or over several."""

    steps: int = 1
    """Steps that were summed up."""

    kinds: dict[str, KindSum] = field(default_factory=dict)
    """By kind of span."""

    def add(self, other: StepTimes) -> None:
        """Add other steps."""
        self.steps += other.steps
        for kind, found in other.kinds.items():
            self.of(kind).add(found.seconds, found.count, found.numel)

    def of(self, kind: str) -> KindSum:
        """The sum of one kind, to be added to."""
        found = self.kinds.get(kind)
        if found is None:
            found = self.kinds[kind] = KindSum()
        return found

    def seconds(self, *kinds: str) -> float:
        """Duration of some kinds together; of those that did not occur, 0."""
        return sum(self.kinds[kind].seconds for kind in kinds if kind in self.kinds)


@dataclass(frozen=True, slots=True)
class PassVerdict:
    """What bounds the speed of a forward or a backward.

    A pass is compute-bound while submitting and waiting take less than a tenth of it together; else
    it is bound by the longer of the two.
    """

    total_s: float
    """Duration of the pass."""

    submit_share: float
    """Part of it, 0 to 1, in which the host starts transfers."""

    wait_share: float
    """Part of it, 0 to 1, in which nothing runs because a transfer has not ended."""

    @classmethod
    def of(cls, which: Pass, times: StepTimes) -> PassVerdict | None:
        """Verdict on a pass; None if it was not seen."""
        total_s = times.seconds(which)
        if not total_s:
            return None
        return cls(
            total_s,
            times.seconds(*SUBMITTING[which]) / total_s,
            times.seconds(*WAITING[which]) / total_s,
        )

    @property
    def verdict(self) -> Verdict:
        """The name of what bounds the pass."""
        if self.submit_share + self.wait_share < BOUND_SHARE:
            return "compute-bound"
        return "submit-bound" if self.submit_share > self.wait_share else "wait-bound"


@dataclass(slots=True)
class _OpenStep:
    """A step whose times are still coming in."""

    times: StepTimes = field(default_factory=StepTimes)
    pending: list[tuple[str, int, int, DeviceEvent, DeviceEvent]] = field(default_factory=list)


class StepTimers(Recorder):
    """Sums up spans by kind.

    On an accelerator, submitting is timed by the host and everything else by events, which are read
    when the step after has ended or later: no step waits for its own times. What is recorded before
    the first ``step_begin`` is a step of its own. A backward inside of a forward (a step that calls
    it itself) is not counted as forward.

    Args:
        device: Where the spans happen; None for the CPU.
        clock: Seconds of the host.
        events: Marks of the device; None for those of ``device``.
    """

    is_silent = False

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        events: DeviceEvents | None = None,
    ) -> None:
        if events is None and device is not None:
            events = DeviceEvents.of(device)
        self._clock = clock
        self._events = events
        self._open = _OpenStep()
        self._has_begun = False
        self._open_forwards = 0
        self._closed: deque[_OpenStep] = deque()
        self._finished: list[StepTimes] = []
        self.first: StepTimes | None = None
        """The first step, which records the order of the model."""
        self.later = StepTimes(steps=0)
        """All steps after it."""

    def begin(self, kind: str, bucket: int = -1, numel: int = 0) -> Span:
        """Note the time."""
        if kind == "forward":
            self._open_forwards += 1
        if self._events is None or is_host_time(kind):
            return kind, numel, self._clock(), None
        return kind, numel, 0.0, self._events.mark()

    def end(self, span: Span) -> None:
        """Add the span to the step under way."""
        kind, numel, begin_s, begin = span
        if begin is None or self._events is None:
            self._add(self._open.times, kind, self._clock() - begin_s, numel, self._open_forwards)
        else:
            end = self._events.mark()
            self._open.pending.append((kind, numel, self._open_forwards, begin, end))
        if kind == "forward":
            self._open_forwards -= 1

    def instant(self, kind: str, bucket: int = -1, numel: int = 0) -> None:
        """Count it."""
        self._open.times.of(kind).add(0.0, 1, numel)

    def step_begin(self) -> None:
        """Close the step before and read what the device has passed."""
        if self._has_begun or self._open.times.kinds or self._open.pending:
            self._closed.append(self._open)
            self._open = _OpenStep()
        self._has_begun = True
        while self._closed and self._is_ready(self._closed[0]):
            self._read(self._closed.popleft())

    def finish(self, *, waits: bool = True) -> None:
        """Close the last step and read all times that are still out.

        Args:
            waits: Wait for what the device has not passed yet; False after an error, to leave it
                out, and with it the step under way, which was not a whole one.
        """
        if waits and (self._open.times.kinds or self._open.pending):
            self._closed.append(self._open)
        self._open, self._has_begun = _OpenStep(), False
        if waits and self._closed and self._events is not None:
            self._events.now()
        while self._closed:
            step = self._closed.popleft()
            step.pending = [span for span in step.pending if span[-1].query()]
            self._read(step)

    def take_finished(self) -> list[StepTimes]:
        """Steps whose times are complete, in order, each given out once."""
        finished, self._finished = self._finished, []
        return finished

    def totals(self) -> StepTimes:
        """Sums over all steps whose times are complete."""
        totals = StepTimes(steps=0)
        for part in (self.first, self.later):
            if part is not None:
                totals.add(part)
        return totals

    def _add(
        self, times: StepTimes, kind: str, seconds: float, numel: int, open_forwards: int
    ) -> None:
        times.of(kind).add(seconds, 1, numel)
        if kind == "backward" and open_forwards:
            times.of("forward").add(-seconds, 0, 0)

    def _is_ready(self, step: _OpenStep) -> bool:
        if not step.pending:
            return True
        is_newest = step is self._closed[-1]
        return not is_newest and all(end.query() for *_, end in step.pending)

    def _read(self, step: _OpenStep) -> None:
        if self._events is not None:
            for kind, numel, open_forwards, begin, end in step.pending:
                self._add(step.times, kind, self._events.seconds(begin, end), numel, open_forwards)
                self._events.reuse(begin)
                self._events.reuse(end)
        self._finished.append(step.times)
        if self.first is None:
            self.first = step.times
        else:
            self.later.add(step.times)


def shown_kinds(times: StepTimes) -> list[str]:
    """Kinds of spans to show: passes, the eight timers where they run, then the others."""
    fetches = FETCH_TIMERS if any(kind in times.kinds for kind in FETCH_TIMERS) else ()
    others = sorted(
        kind
        for kind, found in times.kinds.items()
        if found.seconds and kind not in PASSES and kind not in FETCH_TIMERS
    )
    return [*PASSES, *fetches, *others]


def step_line(times: StepTimes, step: int) -> str:
    """One line about a step, in milliseconds.

    Args:
        times: Times of the step.
        step: Its number.
    """
    parts = [f"{kind} {times.seconds(kind) * 1e3:.2f}" for kind in shown_kinds(times)]
    return f"step {step} [ms]: {', '.join(parts)}"


def summary(timers: StepTimers) -> str:
    """What bounds forward and backward over a run, and the mean of every timer.

    The first step is left out where there are others: it learns the order of the model, so it
    fetches nothing ahead.
    """
    times = timers.later if timers.later.steps else timers.first
    if times is None:
        return "wall clock: no step has ended"
    left_out = " (the first is left out)" if timers.later.steps else ""
    lines = [f"wall clock of {times.steps} step(s){left_out}, rank 0, mean of a step"]
    for which in PASSES:
        found = PassVerdict.of(which, times)
        if found is not None:
            lines.append(
                f"  {which} is {found.verdict}: {found.total_s / times.steps * 1e3:.2f} ms,"
                f" {found.submit_share:.1%} submitting, {found.wait_share:.1%} waiting;"
                f" {HINTS[found.verdict]}"
            )
    lines.append(f"  {'timer':<26}{'ms':>10}{'calls':>10}{'elements':>14}")
    for kind in shown_kinds(times):
        found_sum = times.kinds.get(kind, KindSum())
        ms, calls, numel = (
            value / times.steps
            for value in (found_sum.seconds * 1e3, found_sum.count, found_sum.numel)
        )
        lines.append(f"  {kind:<26}{ms:>10.2f}{calls:>10.1f}{numel:>14,.0f}")
    return "\n".join(lines)
