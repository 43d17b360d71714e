"""What happened when, on each rank: a timeline in the trace-event format of Chrome and Perfetto.

Source:
    "Trace Event Format", the JSON object form: complete events (``X``), instants (``i``) and
    metadata (``M``), times in microseconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_zero.observe.events import DeviceEvent, DeviceEvents, is_host_time
from lightning_zero.observe.recorder import Recorder, Span

DEFAULT_STEPS = 20
MERGED_NAME = "timeline.json"
LANES = (
    "step",
    "pass",
    "forward use",
    "backward use",
    "submit",
    "wait",
    "fetch",
    "release",
    "reduce",
    "other",
)
"""Rows of a rank, from top to bottom."""

TRANSFERS = {"fetch", "reduce"}
"""Lanes of spans that do not hold each other: each of those that overlap gets a row of its own."""

ROWS = 100
"""Numbers of rows that are kept for each lane."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A span or an instant, with its place in time."""

    lane: str
    """One of ``LANES``."""

    kind: str
    """What the rooms call it."""

    bucket: int
    """Index of the bucket; -1 if it is about none or several."""

    numel: int
    """Elements that it is about."""

    step: int
    """Number of the step in which it began, from 0; -1 before the first."""

    begin_s: float
    """When it began, in seconds of the host's clock."""

    end_s: float | None
    """When it ended; None for an instant."""


class Timeline(Recorder):
    """Keeps the spans and instants of the first steps, and writes them as one file per rank.

    On an accelerator, submitting has the host's times and everything else those at which the device
    passed it.

    Args:
        rank: This rank.
        steps: How many steps are kept; later ones are not looked at.
        device: Where the spans happen; None for the CPU.
        clock: Seconds of the host.
        events: Marks of the device; None for those of ``device``.
    """

    is_silent = False

    def __init__(
        self,
        rank: int = 0,
        *,
        steps: int = DEFAULT_STEPS,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        events: DeviceEvents | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"a timeline needs at least 1 step, got steps={steps}")
        if events is None and device is not None:
            events = DeviceEvents.of(device)
        self.rank = rank
        self._max_steps = steps
        self._clock = clock
        # Ranks count their seconds from moments of their own; what they share is the time of day.
        self._day_ns = time.time_ns() - round(clock() * 1e9)
        self._events = events
        self._origin = None if events is None else events.now()
        self._step = -1
        self._is_full = False
        self._found: list[tuple[str, int, int, int, Any, Any]] = []
        self._steps: list[Any] = []

    def begin(self, kind: str, bucket: int = -1, numel: int = 0) -> Span:
        """Note the time."""
        if self._is_full:
            return None
        return kind, bucket, numel, self._step, self._mark(kind)

    def end(self, span: Span) -> None:
        """Keep the span."""
        if span is not None:
            self._found.append((*span, self._mark(span[0])))

    def instant(self, kind: str, bucket: int = -1, numel: int = 0) -> None:
        """Keep the instant."""
        if not self._is_full:
            self._found.append((kind, bucket, numel, self._step, self._mark(kind), None))

    def step_begin(self) -> None:
        """Count the steps."""
        if not self._is_full:
            self._steps.append(self._mark("step"))
            self._step += 1
            self._is_full = self._step >= self._max_steps

    def moments(self) -> list[Moment]:
        """What was kept and the device has passed, in the order in which it began."""
        found = []
        for kind, bucket, numel, step, *marks in self._found:
            begin, end = (None if mark is None else self._time(mark) for mark in marks)
            if begin is not None and (end is not None or marks[1] is None):
                found.append((kind, bucket, numel, step, begin, end))
        borders = [at for at in map(self._time, self._steps) if at is not None]
        if borders and not self._is_full:  # the last step has no successor that ends it
            borders.append(max([borders[-1], *(end or begin for *_, begin, end in found)]))
        steps = [
            Moment("step", "step", -1, 0, number, begin, end)
            for number, (begin, end) in enumerate(zip(borders, borders[1:], strict=False))
        ]
        spans = [Moment(_lane_of(each[0]), *each) for each in found]
        spans = sorted([*steps, *spans], key=_order)
        return sorted([*_in_backward(spans), *_uses_in_backward(spans)], key=_order)

    def write(self, folder: Path, *, waits: bool = True) -> Path:
        """Write ``timeline-rank<r>.json``; its times begin with 0.

        Args:
            folder: Made if it is not there.
            waits: Wait for what the device has not passed yet; False after an error.

        Returns:
            Path of the file.
        """
        if waits and self._events is not None:
            self._events.now()
        moments = self.moments()
        start_s = moments[0].begin_s if moments else 0.0
        content = {
            "traceEvents": trace_events(moments, self.rank, start_s),
            "displayTimeUnit": "ms",
            "otherData": {"rank": self.rank, "start_ns": self._day_ns + round(start_s * 1e9)},
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / rank_file(self.rank)
        path.write_text(json.dumps(content))
        return path

    def _mark(self, kind: str) -> float | DeviceEvent:
        if self._events is None or is_host_time(kind):
            return self._clock()
        return self._events.mark()

    def _time(self, mark: float | DeviceEvent) -> float | None:
        """Seconds of the host's clock; None for what the device has not passed."""
        if isinstance(mark, float) or self._events is None or self._origin is None:
            return float(mark)
        origin_s, origin = self._origin
        return origin_s + self._events.seconds(origin, mark) if mark.query() else None


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"timeline-rank{rank}.json"


def trace_events(moments: Sequence[Moment], rank: int, start_s: float) -> list[dict[str, Any]]:
    """Moments of one rank as trace events: one process, one thread for each row.

    Args:
        moments: In the order in which they began.
        rank: Becomes the process.
        start_s: What becomes time 0.
    """
    events: list[dict[str, Any]] = []
    rows: dict[str, list[list[float]]] = {}
    for moment in moments:
        row = 0
        if moment.end_s is not None:
            lane = rows.setdefault(moment.lane, [])
            row = _free_row(lane, moment.begin_s, moment.end_s, moment.lane not in TRANSFERS)
        about = {"bucket": moment.bucket} if moment.bucket >= 0 else {}
        begin = _microseconds(moment.begin_s - start_s)
        event: dict[str, Any] = {
            "name": _name(moment),
            "cat": moment.kind,
            "ph": "i" if moment.end_s is None else "X",
            "ts": begin,
            "pid": rank,
            "tid": LANES.index(moment.lane) * ROWS + row,
            "args": {**about, "numel": moment.numel, "step": moment.step},
        }
        if moment.end_s is None:
            event["s"] = "t"
        else:  # rounded like the beginnings, so that what touches does not overlap
            event["dur"] = round(_microseconds(moment.end_s - start_s) - begin, 3)
        events.append(event)
    return [*_names(rank, sorted({event["tid"] for event in events})), *events]


def merge(paths: Sequence[Path], target: Path) -> None:
    """Put the timelines of several ranks into one file, on one axis of time.

    Args:
        paths: Files that :meth:`Timeline.write` has written.
        target: The file to write.
    """
    parts = [json.loads(path.read_text()) for path in paths]
    starts = [part["otherData"]["start_ns"] for part in parts if part["traceEvents"]]
    first_ns = min(starts, default=0)
    events = []
    for part in parts:
        shift = (part["otherData"]["start_ns"] - first_ns) / 1e3
        for event in part["traceEvents"]:
            shifted = {"ts": round(event["ts"] + shift, 3)} if "ts" in event else {}
            events.append({**event, **shifted})
    ranks = sorted(part["otherData"]["rank"] for part in parts)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ranks": ranks, "start_ns": first_ns},
    }
    target.write_text(json.dumps(content))


def _order(moment: Moment) -> tuple[float, float, int]:
    """Sorts by begin: instants belong to what was before, and what holds others stands first."""
    ends_s = float("inf") if moment.end_s is None else moment.end_s
    return moment.begin_s, -ends_s, LANES.index(moment.lane)


def _in_backward(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Units that run in backward, to compute activations again, are uses of backward."""
    ends_s = float("-inf")
    for moment in moments:
        if moment.kind == "backward" and moment.end_s is not None:
            ends_s = moment.end_s
        is_inside = moment.kind == "use" and moment.begin_s < ends_s
        yield replace(moment, lane="backward use") if is_inside else moment


def _uses_in_backward(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Uses of buckets in backward, where no unit runs: from when one is needed until it goes.

    A bucket that stayed since forward is taken as used from the beginning of backward.
    """
    backward: Moment | None = None
    needed_s: dict[int, float] = {}
    here_s: dict[int, float] = {}
    for moment in moments:
        if moment.kind in ("forward", "backward"):
            backward = moment if moment.kind == "backward" else None
            needed_s = {}
        elif moment.lane == "fetch" and moment.end_s is not None:
            here_s[moment.bucket] = moment.end_s
        elif moment.kind == "backward_fetch_wait" and moment.end_s is not None:
            needed_s[moment.bucket] = max(moment.end_s, here_s.get(moment.bucket, 0.0))
        elif moment.kind == "release" and backward is not None:
            begin_s = needed_s.pop(moment.bucket, backward.begin_s)
            yield replace(
                moment,
                lane="backward use",
                kind="backward_use",
                begin_s=begin_s,
                end_s=moment.begin_s,
            )


def _lane_of(kind: str) -> str:
    if kind in ("forward", "backward"):
        return "pass"
    if kind == "use":
        return "forward use"
    if kind.endswith("_all_gather"):
        return "fetch"
    last = kind.rsplit("_", 1)[-1]
    return last if last in LANES else "other"


def _free_row(rows: list[list[float]], begin_s: float, end_s: float, may_nest: bool) -> int:
    """The first row of a lane where a span fits; rows hold the ends of what is open in them."""
    for number, open_ends in enumerate(rows):
        while open_ends and open_ends[-1] <= begin_s:
            open_ends.pop()
        if not open_ends or (may_nest and open_ends[-1] >= end_s):
            open_ends.append(end_s)
            return number
    rows.append([end_s])
    return len(rows) - 1


def _name(moment: Moment) -> str:
    if moment.kind == "step":
        return f"step {moment.step}"
    what = moment.kind if moment.lane in ("pass", "submit", "wait", "other") else ""
    where = f"bucket {moment.bucket}" if moment.bucket >= 0 else ""
    return " ".join(filter(None, (what, where))) or moment.kind


def _names(rank: int, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Metadata: what the process and its threads are called, and in which order they stand."""
    process = {"name": f"rank {rank}"}, {"sort_index": rank}
    named = [
        {"name": name, "ph": "M", "pid": rank, "args": args}
        for name, args in zip(("process_name", "process_sort_index"), process, strict=True)
    ]
    for row in rows:
        lane, extra = LANES[row // ROWS], row % ROWS
        title = f"{lane} ({extra + 1})" if extra else lane
        for name, args in (
            ("thread_name", {"name": title}),
            ("thread_sort_index", {"sort_index": row}),
        ):
            named.append({"name": name, "ph": "M", "pid": rank, "tid": row, "args": args})
    return named


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
