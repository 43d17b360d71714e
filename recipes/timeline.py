"""Draw a timeline that ``ZeroStrategy(timeline=...)`` has written.

python recipes/timeline.py FOLDER                    steps 2 and 3, to FOLDER/timeline.png
python recipes/timeline.py FOLDER --steps 5 6 --out picture.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console

Event = dict[str, Any]
Interval = tuple[float, float]

COLOURS = {  # by category of the event, or its end
    "step": "#e8e8e8",
    "forward": "#c6d4e8",
    "backward": "#e3d3ea",
    "use": "#4c78a8",
    "backward_use": "#9467bd",
    "submit": "#f2b134",
    "fetch_wait": "#d62728",
    "reduce_wait": "#f78f8f",
    "forward_all_gather": "#54a24b",
    "backward_all_gather": "#88d27a",
    "reduce": "#b07a55",
    "release": "#333333",
}
WORDS = {
    "use": "use in forward",
    "backward_use": "use in backward",
    "submit": "submit",
    "fetch_wait": "wait for a fetch",
    "reduce_wait": "wait for a reduction",
    "forward_all_gather": "fetch in forward",
    "backward_all_gather": "fetch in backward",
    "reduce": "reduce",
    "release": "release",
}
LABEL_SHARE = 0.012
"""Part of the width that a bar needs to have its bucket written on it."""


def category(event: Event) -> str:
    """The colour's key."""
    kind = str(event["cat"])
    if kind in COLOURS:
        return kind
    return next((key for key in ("fetch_wait", "submit") if kind.endswith(key)), "step")


def of_steps(events: list[Event], first: int, last: int) -> list[Event]:
    """Events of some steps; times in milliseconds since the first of them began."""
    inside = [e for e in events if e["ph"] != "M" and first <= e["args"]["step"] <= last]
    if not inside:
        raise SystemExit(f"there is nothing in the timeline of steps {first} to {last}")
    start = min(event["ts"] for event in inside)
    return [
        {**event, "ts": (event["ts"] - start) / 1e3, "dur": event.get("dur", 0.0) / 1e3}
        for event in inside
    ]


def union(events: list[Event], *categories: str) -> list[Interval]:
    """Times at which at least one span of some categories runs, in order."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if category(event) in categories
    )
    joined: list[Interval] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: list[Interval]) -> float:
    """Sum of the lengths of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(some: list[Interval], others: list[Interval]) -> float:
    """Length of what two lists of intervals have in common."""
    pairs = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return sum(max(0.0, end - begin) for begin, end in pairs)


def overlap_text(events: list[Event], rank: int) -> str:
    """How much of the fetching and reducing of a rank is hidden behind computing."""
    own = [event for event in events if event["pid"] == rank]
    uses = union(own, "use", "backward_use")
    parts = []
    for word, categories in (
        ("fetching", ("forward_all_gather", "backward_all_gather")),
        ("reducing", ("reduce",)),
    ):
        spans = union(own, *categories)
        total = length(spans)
        share = f", {common(spans, uses) / total:.0%} of it while buckets are used" if total else ""
        parts.append(f"{word} {total:.1f} ms{share}")
    waited = length(union(own, "fetch_wait", "reduce_wait"))
    return f"rank {rank}: {'; '.join(parts)}; waiting {waited:.1f} ms"


def draw(events: list[Event], titles: dict[tuple[int, int], str]) -> Figure:
    """Draw one row for each lane of each rank.

    Args:
        events: Of the steps to show, in milliseconds.
        titles: What the rows are called, by rank and number of the row.

    Returns:
        The picture.
    """
    rows = sorted({(event["pid"], event["tid"]) for event in events})
    places, place = {}, 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        place += 1.6 if before and before[0] != row[0] else 1.0
        places[row] = place
    # A step lasts until the next one begins, which may be after a validation.
    inner = [event for event in events if event["cat"] != "step"]
    width = max(event["ts"] + event["dur"] for event in inner or events)
    figure = Figure(figsize=(18, 0.42 * place + 1.6), layout="constrained")
    axes = figure.subplots()
    for event in events:
        y, colour = places[event["pid"], event["tid"]], COLOURS[category(event)]
        if event["ph"] == "i":
            axes.plot(event["ts"], y, marker="|", markersize=11, color=colour)
            continue
        axes.broken_barh(
            [(event["ts"], event["dur"])],
            (y - 0.4, 0.8),
            facecolors=colour,
            edgecolor="white",
            linewidth=0.4,
        )
        is_pass = category(event) in ("step", "forward", "backward")
        label = event["name"] if is_pass else str(event["args"].get("bucket", ""))
        shown = min(event["dur"], width - event["ts"])
        if shown > width * LABEL_SHARE * max(1, len(label) / 3):
            axes.text(
                event["ts"] + shown / 2,
                y,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="black" if is_pass else "white",
                clip_on=True,
            )
    axes.set_yticks(list(places.values()), [f"rank {rank}  {titles[rank, t]}" for rank, t in rows])
    axes.set_ylim(place + 0.7, 0.3)
    axes.set_xlim(0, width)
    axes.set_xlabel("ms; numbers are buckets")
    axes.grid(axis="x", linewidth=0.3)
    found = {category(event) for event in events}
    axes.legend(
        handles=[Patch(color=COLOURS[c], label=word) for c, word in WORDS.items() if c in found],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(WORDS),
        frameon=False,
    )
    return figure


def main() -> None:
    """Read, draw and say how much of the transfers is hidden."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="what ZeroStrategy(timeline=...) was given")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(2, 3), metavar=("FIRST", "LAST"), help="from 0"
    )
    parser.add_argument("--out", type=Path, help="the picture; FOLDER/timeline.png if left out")
    options = parser.parse_args()
    content = json.loads((options.folder / "timeline.json").read_text())
    events = of_steps(content["traceEvents"], *options.steps)
    titles = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    target = options.out or options.folder / "timeline.png"
    draw(events, titles).savefig(target, dpi=110)
    console = Console()
    for rank in content["otherData"]["ranks"]:
        console.print(overlap_text(events, rank), soft_wrap=True, highlight=False)
    console.print(f"picture: {target}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
