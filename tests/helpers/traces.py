"""The rules of the trace-event format that viewers rely on."""

from __future__ import annotations

import itertools
import json
from typing import Any

from lightning_zero.observe.timeline import LANES, ROWS, TRANSFERS

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check_trace(content: dict[str, Any]) -> int:
    """Check a file's content; returns the number of its events, without metadata."""
    json.dumps(content, allow_nan=False)
    rows = {}
    named = set()
    count = 0
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        count += 1
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        assert isinstance(event["cat"], str)
        if event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
        assert (event["pid"], event["tid"]) in named
    for (_, tid), events in rows.items():
        is_transfer = LANES[tid // ROWS] in TRANSFERS
        spans = [(e["ts"], round(e["ts"] + e["dur"], 3)) for e in events if e["dur"] > 0]
        for (begin, end), (other_begin, other_end) in itertools.combinations(spans, 2):
            is_apart = end <= other_begin or other_end <= begin
            is_inside = begin <= other_begin <= other_end <= end
            is_around = other_begin <= begin <= end <= other_end
            assert is_apart or (not is_transfer and (is_inside or is_around))
    return count
