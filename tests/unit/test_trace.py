"""The trace of a pass: literal modes, switches and departures."""

from __future__ import annotations

import pytest

from lightning_zero.plan.trace import MAX_TRACES, Departure, Trace, TraceMode, Tracer, Use


def forward(*names):
    return [Use("forward", name, ord(name) - ord("a")) for name in names]


def backward(*names):
    return [Use("backward", name, ord(name) - ord("a")) for name in names]


def step(*names):
    return [*forward(*names), *backward(*reversed(names))]


def run(tracer, uses):
    """Run a pass; the mode after each use, and how it departed."""
    modes = []
    for use in uses:
        tracer.use(use)
        modes.append(tracer.mode)
    return modes, tracer.end()


R, C, INVALID = TraceMode.RECORD, TraceMode.COMPLETE, TraceMode.INVALID


def test_first_pass_is_recorded_and_all_others_are_complete():
    tracer = Tracer()
    assert run(tracer, step("a", "b")) == ([R] * 4, None)
    for _ in range(3):
        assert run(tracer, step("a", "b")) == ([C] * 4, None)
    assert dict(tracer.counts) == {"record": 1, "complete": 3}
    assert tracer.trace.of("forward") == tuple(forward("a", "b"))
    assert tracer.trace.of("backward") == tuple(backward("b", "a"))


def test_use_that_goes_on_is_one_use():
    tracer = Tracer()
    run(tracer, forward("a", "a", "b", "b", "a"))
    assert tracer.trace.uses == tuple(forward("a", "b", "a"))
    assert run(tracer, forward("a", "b", "b", "b", "a", "a")) == ([C] * 6, None)


def test_other_module_departs_and_is_known_from_then_on():
    tracer = Tracer()
    run(tracer, step("a", "b", "c"))
    found = step("a", "c")
    departure = Departure(1, forward("b")[0], forward("c")[0])
    assert run(tracer, found) == ([C, INVALID, INVALID, INVALID], departure)
    assert dict(tracer.counts) == {"record": 1, "invalid": 1}
    # What followed is expected again: the short pass, then the long one.
    assert run(tracer, found) == ([C] * 4, None)
    assert run(tracer, step("a", "b", "c")) == ([C] * 6, None)
    assert dict(tracer.counts) == {"record": 1, "invalid": 1, "complete": 2, "switch": 1}


def test_pass_that_ends_early_departs_at_its_end():
    tracer = Tracer()
    run(tracer, forward("a", "b"))
    departure = Departure(1, forward("b")[0], None)
    assert run(tracer, forward("a")) == ([C], departure)
    assert run(tracer, forward("a")) == ([C], None)


def test_pass_that_goes_on_departs_where_the_trace_ends():
    tracer = Tracer()
    run(tracer, forward("a"))
    departure = Departure(1, None, forward("b")[0])
    assert run(tracer, forward("a", "b")) == ([C, INVALID], departure)


def test_shorter_pass_that_is_known_is_no_departure():
    tracer = Tracer()
    run(tracer, forward("a", "b"))
    run(tracer, forward("a"))
    run(tracer, forward("a", "b"))
    assert run(tracer, forward("a")) == ([C], None)
    assert tracer.counts["invalid"] == 1


def test_alternating_passes_are_foreseen_after_one_turn_of_each():
    tracer = Tracer()
    generator, discriminator = step("a", "b"), step("c", "b")
    run(tracer, generator)
    assert run(tracer, discriminator)[1] is not None
    run(tracer, generator)  # nobody could know that it follows
    switches = tracer.counts["switch"]
    for turn in (discriminator, generator, discriminator, generator):
        assert tracer.trace.uses == tuple(turn)
        assert run(tracer, turn) == ([C] * 4, None)
    assert tracer.counts["switch"] == switches
    assert tracer.counts["invalid"] == 1


def test_lost_pass_guesses_on_from_the_next_known_use_in_its_direction():
    tracer = Tracer()
    run(tracer, step("a", "b", "c"))
    tracer.use(forward("a")[0])
    tracer.use(forward("c")[0])
    assert tracer.mode is INVALID
    assert list(tracer.upcoming()) == [2, 1, 0]  # backward of c, b and a
    tracer.use(backward("b")[0])
    assert list(tracer.upcoming()) == [0]
    tracer.use(forward("z")[0])
    assert list(tracer.upcoming()) == [0]


def test_dropped_pass_leaves_no_trace():
    tracer = Tracer()
    run(tracer, forward("a", "b"))
    tracer.use(forward("a")[0])
    tracer.use(forward("c")[0])
    tracer.drop()
    assert tracer.mode is C
    assert len(tracer.known) == 1
    assert run(tracer, forward("a", "b")) == ([C] * 2, None)


def test_pass_without_uses_changes_nothing():
    tracer = Tracer()
    assert tracer.end() is None
    assert tracer.mode is R
    run(tracer, forward("a"))
    assert tracer.end() is None
    assert len(tracer.known) == 1


def test_upcoming_and_next_use_follow_the_cursor():
    tracer = Tracer()
    run(tracer, forward("a", "b", "a", "c"))
    assert list(tracer.upcoming()) == [0, 1, 0, 2]
    assert [tracer.next_use(bucket) for bucket in (0, 1, 2, 3)] == [0, 1, 3, None]
    tracer.use(forward("a")[0])
    assert list(tracer.upcoming()) == [1, 0, 2]
    assert [tracer.next_use(bucket) for bucket in (0, 1, 2, 3)] == [2, 1, 3, None]


def test_traces_that_were_not_followed_for_long_are_forgotten():
    tracer = Tracer()
    names = [chr(ord("a") + place) for place in range(MAX_TRACES + 1)]
    for name in names:
        run(tracer, forward(name))
    assert len(tracer.known) == MAX_TRACES
    known = {trace.uses for trace in tracer.known}
    assert tuple(forward("a")) not in known
    assert run(tracer, forward("a"))[1] is not None


def test_digest_tells_order_direction_module_and_bucket_apart():
    same = [Trace(step("a", "b")).digest, Trace(step("a", "b")).digest]
    others = [
        Trace(step("b", "a")).digest,
        Trace(forward("a", "b")).digest,
        Trace([Use("forward", "x", 0)]).digest,
        Trace([Use("forward", "x", 1)]).digest,
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 5
    assert all(0 <= digest < 2**62 for digest in (same[0], *others))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_first_and_last_use(place):
    trace = Trace(step("a", "b", "c"))
    assert trace.next_use(place, 0) == place
    assert trace.last_use(place) == 5 - place
    assert trace.next_use(place, 6) is None
    assert trace.last_use(9) is None
