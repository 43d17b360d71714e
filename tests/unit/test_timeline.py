"""The timeline as a file: literal events on a clock that the test moves, and a format's rules."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.observe.timeline import LANES, Moment, Timeline, merge, trace_events
from tests.helpers.clocks import Clock, Device
from tests.helpers.traces import check_trace


@pytest.fixture
def clock():
    return Clock(100.0)


def spend(recorder, clock, kind, seconds, bucket=-1, numel=0):
    span = recorder.begin(kind, bucket, numel)
    clock.now += seconds
    recorder.end(span)


def written(timeline, folder):
    return json.loads(timeline.write(folder).read_text())


def drawn(content):
    """Events without metadata, as (row's title, name, begin, duration or None)."""
    titles = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "thread_name"
    }
    return [
        (titles[event["pid"], event["tid"]], event["name"], event["ts"], event.get("dur"))
        for event in content["traceEvents"]
        if event["ph"] != "M"
    ]


def test_one_step_becomes_these_events(tmp_path, clock):
    timeline = Timeline(1, clock=clock)
    timeline.step_begin()
    forward = timeline.begin("forward")
    gather = timeline.begin("forward_all_gather", 0, 64)
    spend(timeline, clock, "forward_fetch_submit", 0.001, 0, 64)
    spend(timeline, clock, "forward_fetch_wait", 0.002, 0, 64)
    timeline.end(gather)
    spend(timeline, clock, "use", 0.010, 0)
    timeline.instant("release", 0, 64)
    timeline.end(forward)
    backward = timeline.begin("backward")
    spend(timeline, clock, "backward_fetch_wait", 0.001, 0, 64)
    clock.now += 0.020
    timeline.instant("release", 0, 64)
    spend(timeline, clock, "reduce", 0.005, 0, 64)
    timeline.end(backward)
    content = written(timeline, tmp_path / "not" / "there")
    assert drawn(content) == [
        ("step", "step 0", 0.0, 39000.0),
        ("pass", "forward", 0.0, 13000.0),
        ("fetch", "bucket 0", 0.0, 3000.0),
        ("submit", "forward_fetch_submit bucket 0", 0.0, 1000.0),
        ("wait", "forward_fetch_wait bucket 0", 1000.0, 2000.0),
        ("forward use", "bucket 0", 3000.0, 10000.0),
        ("release", "bucket 0", 13000.0, None),
        ("pass", "backward", 13000.0, 26000.0),
        ("wait", "backward_fetch_wait bucket 0", 13000.0, 1000.0),
        ("backward use", "bucket 0", 14000.0, 20000.0),
        ("release", "bucket 0", 34000.0, None),
        ("reduce", "bucket 0", 34000.0, 5000.0),
    ]
    fetch = next(event for event in content["traceEvents"] if event["ph"] != "M")
    assert fetch["pid"] == 1
    (gathered,) = (e for e in content["traceEvents"] if e.get("cat") == "forward_all_gather")
    assert gathered["args"] == {"bucket": 0, "numel": 64, "step": 0}
    names = [e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 1"]
    assert check_trace(content) == 12


def test_bucket_that_stayed_since_forward_is_used_from_the_beginning_of_backward(tmp_path, clock):
    timeline = Timeline(clock=clock)
    timeline.step_begin()
    spend(timeline, clock, "forward", 1.0)
    backward = timeline.begin("backward")
    clock.now += 2.0
    timeline.instant("release", 4, 8)
    timeline.end(backward)
    assert ("backward use", "bucket 4", 1e6, 2e6) in drawn(written(timeline, tmp_path))


def test_unit_that_runs_again_in_backward_is_a_use_of_backward(tmp_path, clock):
    timeline = Timeline(clock=clock)
    timeline.step_begin()
    backward = timeline.begin("backward")
    spend(timeline, clock, "use", 1.0, 2)
    timeline.end(backward)
    spend(timeline, clock, "use", 1.0, 3)
    assert drawn(written(timeline, tmp_path))[-2:] == [
        ("backward use", "bucket 2", 0.0, 1e6),
        ("forward use", "bucket 3", 1e6, 1e6),
    ]


def test_transfers_that_overlap_stand_in_rows_of_their_own(tmp_path, clock):
    timeline = Timeline(clock=clock)
    spans = []
    for bucket in range(3):  # 0 and 1 overlap, 2 begins when 0 ends
        spans.append(timeline.begin("forward_all_gather", bucket))
        clock.now += 1.0
        if bucket == 1:
            timeline.end(spans[0])
    timeline.end(spans[1])
    timeline.end(spans[2])
    assert drawn(written(timeline, tmp_path)) == [
        ("fetch", "bucket 0", 0.0, 2e6),
        ("fetch (2)", "bucket 1", 1e6, 2e6),
        ("fetch", "bucket 2", 2e6, 1e6),
    ]


def test_only_the_first_steps_are_kept(tmp_path, clock):
    timeline = Timeline(steps=2, clock=clock)
    for _ in range(5):
        timeline.step_begin()
        spend(timeline, clock, "forward", 1.0)
        timeline.instant("release", 0)
    found = drawn(written(timeline, tmp_path))
    assert [name for row, name, *_ in found if row == "step"] == ["step 0", "step 1"]
    assert sum(row == "pass" for row, *_ in found) == 2
    assert sum(row == "release" for row, *_ in found) == 2
    assert timeline.begin("forward") is None


def test_span_that_has_not_ended_is_left_out(tmp_path, clock):
    timeline = Timeline(clock=clock)
    timeline.step_begin()
    timeline.begin("forward")
    assert drawn(written(timeline, tmp_path)) == [("step", "step 0", 0.0, 0.0)]


def test_timeline_without_events_is_a_file_too(tmp_path, clock):
    content = written(Timeline(clock=clock), tmp_path)
    assert check_trace(content) == 0


def test_timeline_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="at least 1 step, got steps=0"):
        Timeline(steps=0)


def test_merged_ranks_share_one_axis_of_time(tmp_path, clock):
    """Rank 1's clock counts from another moment; what happened together stands together."""
    other = Clock(7.0)
    ranks = [Timeline(0, clock=clock), Timeline(1, clock=other)]
    # The time of day is read when a timeline is made; a test cannot wait for it.
    ranks[1]._day_ns = ranks[0]._day_ns + round((100.0 - 7.0) * 1e9)
    spend(ranks[0], clock, "forward", 2.0)
    other.now += 0.5
    spend(ranks[1], other, "forward", 2.0)
    paths = [timeline.write(tmp_path) for timeline in ranks]
    assert [path.name for path in paths] == ["timeline-rank0.json", "timeline-rank1.json"]
    merge(paths, tmp_path / "timeline.json")
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert [(e["pid"], e["ts"], e["dur"]) for e in content["traceEvents"] if e["ph"] == "X"] == [
        (0, 0.0, 2e6),
        (1, 5e5, 2e6),
    ]
    assert content["otherData"]["ranks"] == [0, 1]
    assert check_trace(content) == 2


def test_clocks_of_processes_are_tied_to_the_time_of_day():
    first, second = Timeline(0), Timeline(1)
    assert abs(first._day_ns - second._day_ns) < 5e6


def test_device_times_stand_where_the_device_passed_them(tmp_path, clock):
    device = Device()
    device.queued_s = 50.0
    timeline = Timeline(clock=clock, events=device.events(clock))
    span = timeline.begin("forward_fetch_wait", 0, 8)
    device.queued_s += 3.0  # the host goes on at once, the device comes there later
    timeline.end(span)
    spend(timeline, clock, "forward_prefetch_submit", 0.5, 1, 8)
    assert drawn(written(timeline, tmp_path)) == [
        ("wait", "forward_fetch_wait bucket 0", 0.0, 3e6),
        ("submit", "forward_prefetch_submit bucket 1", 0.0, 5e5),
    ]


def test_after_an_error_what_the_device_has_not_passed_is_left_out(tmp_path, clock):
    device = Device()
    timeline = Timeline(clock=clock, events=device.events(clock))
    waited = device.waited
    timeline.end(timeline.begin("forward"))
    span = timeline.begin("backward")
    device.queued_s += 3.0
    timeline.end(span)
    content = json.loads(timeline.write(tmp_path, waits=False).read_text())
    assert [name for _, name, *_ in drawn(content)] == ["forward"]
    assert device.waited == waited


@given(
    st.lists(
        st.tuples(st.sampled_from(LANES), st.floats(0, 1, width=16), st.floats(0, 0.5, width=16)),
        max_size=30,
    )
)
def test_rows_never_hold_spans_that_cross(spans):
    moments = sorted(
        (Moment(lane, "kind", 0, 0, 0, begin, begin + length) for lane, begin, length in spans),
        key=lambda moment: (moment.begin_s, -moment.end_s),
    )
    content = {"traceEvents": trace_events(moments, 0, 0.0)}
    assert check_trace(content) == len(spans)
