"""Sums of spans on a clock that the test moves: literal seconds, counts, verdicts and texts."""

from __future__ import annotations

import re
import statistics
import timeit

import pytest
import torch

from lightning_zero.observe.events import DeviceEvents
from lightning_zero.observe.recorder import SILENT, Recorder, Recorders
from lightning_zero.observe.timers import (
    FETCH_TIMERS,
    KindSum,
    PassVerdict,
    StepTimers,
    StepTimes,
    step_line,
    summary,
)
from tests.helpers.clocks import Clock, Device


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timers(clock):
    return StepTimers(clock=clock)


def spend(recorder, clock, kind, seconds, bucket=-1, numel=0):
    span = recorder.begin(kind, bucket, numel)
    clock.now += seconds
    recorder.end(span)


def test_spans_of_a_step_are_summed_by_kind(timers, clock):
    timers.step_begin()
    spend(timers, clock, "forward_fetch_wait", 0.25, bucket=0, numel=100)
    spend(timers, clock, "forward_fetch_wait", 0.5, bucket=1, numel=60)
    spend(timers, clock, "reduce", 2.0, bucket=1, numel=60)
    timers.instant("release", 0, 100)
    timers.step_begin()
    (step,) = timers.take_finished()
    assert step.kinds == {
        "forward_fetch_wait": KindSum(0.75, 2, 160),
        "reduce": KindSum(2.0, 1, 60),
        "release": KindSum(0.0, 1, 100),
    }


def test_spans_that_overlap_are_counted_each_in_full(timers, clock):
    first = timers.begin("reduce", 0, 10)
    clock.now = 1.0
    second = timers.begin("reduce", 1, 20)
    clock.now = 3.0
    timers.end(first)
    timers.end(second)
    timers.finish()
    assert timers.totals().kinds == {"reduce": KindSum(5.0, 2, 30)}


def test_steps_are_given_out_once_in_order_and_summed_over_the_run(timers, clock):
    for seconds in (1.0, 2.0, 4.0):
        timers.step_begin()
        spend(timers, clock, "forward", seconds)
    timers.finish()
    assert [step.seconds("forward") for step in timers.take_finished()] == [1.0, 2.0, 4.0]
    assert timers.take_finished() == []
    assert timers.first.seconds("forward") == 1.0
    assert timers.later == StepTimes(2, {"forward": KindSum(6.0, 2, 0)})
    assert timers.totals() == StepTimes(3, {"forward": KindSum(7.0, 3, 0)})


def test_span_belongs_to_the_step_in_which_it_ends(timers, clock):
    timers.step_begin()
    span = timers.begin("reduce")
    clock.now = 1.0
    timers.step_begin()
    timers.end(span)
    timers.finish()
    assert [step.seconds("reduce") for step in timers.take_finished()] == [0.0, 1.0]


def test_empty_step_counts_and_silence_before_the_first_does_not(timers):
    timers.step_begin()
    timers.step_begin()
    assert len(timers.take_finished()) == 1
    timers.finish()
    timers.finish()
    assert timers.totals().steps == 1


def test_backward_inside_of_a_forward_is_not_counted_as_forward(timers, clock):
    """As with manual optimization, where training_step calls backward itself."""
    forward = timers.begin("forward")
    clock.now = 1.0
    for _ in range(2):
        spend(timers, clock, "backward", 3.0)
    clock.now = 7.5
    timers.end(forward)
    spend(timers, clock, "backward", 8.0)
    timers.finish()
    assert timers.totals().kinds == {
        "forward": KindSum(1.5, 1, 0),
        "backward": KindSum(14.0, 3, 0),
    }


# On a device.


def test_device_times_are_read_when_the_step_after_has_ended(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    for _ in range(2):
        timers.step_begin()
        span = timers.begin("forward_fetch_wait", 0, 10)
        device.queued_s += 0.5
        timers.end(span)
    device.done_s = device.queued_s  # even so, times of the newest step are left alone
    timers.step_begin()
    (step,) = timers.take_finished()
    assert step.kinds == {"forward_fetch_wait": KindSum(0.5, 1, 10)}
    assert device.waited == 0


def test_device_that_lags_behind_is_never_waited_for_within_steps(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    for _ in range(5):
        timers.step_begin()
        span = timers.begin("backward")
        device.queued_s += 1.0
        timers.end(span)
    assert timers.take_finished() == []
    device.done_s = 2.0
    timers.step_begin()
    assert [step.seconds("backward") for step in timers.take_finished()] == [1.0, 1.0]
    assert device.waited == 0
    timers.finish()
    assert device.waited == 1
    assert [step.seconds("backward") for step in timers.take_finished()] == [1.0, 1.0, 1.0]


def test_marks_are_used_again(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    for _ in range(50):
        timers.step_begin()
        for _ in range(3):
            timers.end(timers.begin("forward_all_gather"))
        device.done_s = device.queued_s
    assert device.made <= 3 * 2 * 3  # three steps at most are open at a time


def test_backward_inside_of_a_forward_on_a_device(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    forward = timers.begin("forward")
    device.queued_s += 1.0
    backward = timers.begin("backward")
    device.queued_s += 3.0
    timers.end(backward)
    timers.end(forward)
    timers.finish()
    assert timers.totals().seconds("forward") == 1.0
    assert timers.totals().seconds("backward") == 3.0


def test_submitting_is_timed_by_the_host_on_a_device_too(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    spend(timers, clock, "backward_prefetch_submit", 0.125, numel=7)
    assert device.made == 0
    timers.finish()
    assert timers.totals().kinds == {"backward_prefetch_submit": KindSum(0.125, 1, 7)}


def test_after_an_error_what_the_device_has_not_passed_is_left_out(clock):
    device = Device()
    timers = StepTimers(clock=clock, events=device.events(clock))
    for seconds in (1.0, 2.0):
        span = timers.begin("forward")
        device.queued_s += seconds
        timers.end(span)
    device.done_s = 1.0
    timers.step_begin()
    timers.finish(waits=False)
    assert device.waited == 0
    assert timers.totals().kinds == {"forward": KindSum(1.0, 1, 0)}


def test_step_that_an_error_ended_is_not_counted(timers, clock):
    for seconds in (1.0, 2.0):
        timers.step_begin()
        spend(timers, clock, "forward", seconds)
    timers.finish(waits=False)
    assert timers.totals() == StepTimes(1, {"forward": KindSum(1.0, 1, 0)})


def test_cpu_has_no_device_events():
    assert DeviceEvents.of(torch.device("cpu")) is None
    assert DeviceEvents.of(torch.device("cuda")) is not None


# Verdicts.


@pytest.mark.parametrize(
    ("submit_s", "prefetch_s", "wait_s", "verdict"),
    [
        (0.0, 0.0, 0.0, "compute-bound"),
        (0.3, 0.3, 0.3, "compute-bound"),  # 9 % together
        (0.3, 0.3, 0.5, "submit-bound"),  # 11 %, more of it submitting
        (0.2, 0.2, 0.6, "wait-bound"),
        (0.6, 0.5, 0.0, "submit-bound"),
        (0.0, 0.0, 5.0, "wait-bound"),
        (1.0, 1.0, 1.9, "submit-bound"),
    ],
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_verdict_names_the_longer_of_submitting_and_waiting(
    which, submit_s, prefetch_s, wait_s, verdict
):
    times = StepTimes()
    times.of(which).add(10.0, 1, 0)
    times.of(f"{which}_fetch_submit").add(submit_s, 1, 0)
    times.of(f"{which}_prefetch_submit").add(prefetch_s, 1, 0)
    times.of(f"{which}_fetch_wait").add(wait_s, 1, 0)
    times.of(f"{which}_all_gather").add(9.0, 1, 0)  # what travels meanwhile bounds nothing
    found = PassVerdict.of(which, times)
    assert found.verdict == verdict
    assert found.submit_share == pytest.approx((submit_s + prefetch_s) / 10)
    assert found.wait_share == pytest.approx(wait_s / 10)


def test_waiting_for_reductions_bounds_backward_only():
    times = StepTimes()
    times.of("forward").add(1.0, 1, 0)
    times.of("backward").add(1.0, 1, 0)
    times.of("reduce_wait").add(0.5, 1, 0)
    assert PassVerdict.of("forward", times).verdict == "compute-bound"
    assert PassVerdict.of("backward", times).verdict == "wait-bound"


def test_pass_that_was_not_seen_has_no_verdict():
    assert PassVerdict.of("forward", StepTimes()) is None


# Texts.


def test_line_of_a_step_holds_all_eight_timers_in_milliseconds(timers, clock):
    spend(timers, clock, "forward", 0.040)
    spend(timers, clock, "backward", 0.080)
    spend(timers, clock, "forward_fetch_wait", 0.0015)
    spend(timers, clock, "reduce", 0.01)
    timers.instant("release")
    timers.finish()
    (step,) = timers.take_finished()
    assert step_line(step, 7) == (
        "step 7 [ms]: forward 40.00, backward 80.00,"
        " forward_fetch_submit 0.00, forward_fetch_wait 1.50, forward_prefetch_submit 0.00,"
        " forward_all_gather 0.00,"
        " backward_fetch_submit 0.00, backward_fetch_wait 0.00, backward_prefetch_submit 0.00,"
        " backward_all_gather 0.00, reduce 10.00"
    )


def test_line_of_a_step_without_fetches_leaves_their_timers_out(timers, clock):
    spend(timers, clock, "forward", 0.040)
    spend(timers, clock, "backward", 0.080)
    timers.finish()
    (step,) = timers.take_finished()
    assert step_line(step, 0) == "step 0 [ms]: forward 40.00, backward 80.00"


def test_summary_says_what_bounds_each_pass_without_the_first_step(timers, clock):
    for waited_s in (9.0, 0.04, 0.06):
        timers.step_begin()
        spend(timers, clock, "forward", 0.1)
        spend(timers, clock, "backward", 0.2)
        spend(timers, clock, "forward_fetch_wait", waited_s, numel=500)
        spend(timers, clock, "backward_fetch_submit", 0.002)
    timers.finish()
    lines = summary(timers).splitlines()
    assert lines[0] == "wall clock of 2 step(s) (the first is left out), rank 0, mean of a step"
    assert lines[1].startswith(
        "  forward is wait-bound: 100.00 ms, 0.0% submitting, 50.0% waiting; "
    )
    assert "prefetch_numel" in lines[1]
    assert lines[2].startswith(
        "  backward is compute-bound: 200.00 ms, 1.0% submitting, 0.0% waiting; "
    )
    cells = {line.split()[0]: line.split()[1:] for line in lines[4:]}
    assert list(cells) == ["forward", "backward", *FETCH_TIMERS]
    assert cells["forward_fetch_wait"] == ["50.00", "1.0", "500"]
    assert cells["backward_fetch_submit"] == ["2.00", "1.0", "0"]


def test_summary_of_one_step_is_of_that_step(timers, clock):
    spend(timers, clock, "forward", 0.1)
    timers.finish()
    assert summary(timers).startswith("wall clock of 1 step(s), rank 0")


def test_summary_without_steps_says_so(timers):
    timers.finish()
    assert summary(timers) == "wall clock: no step has ended"


def test_submit_bound_hints_at_larger_buckets(timers, clock):
    spend(timers, clock, "forward", 0.1)
    spend(timers, clock, "forward_prefetch_submit", 0.05)
    timers.finish()
    assert re.search(r"forward is submit-bound.*bucket_numel", summary(timers))


# Several listeners, and none.


class Log(Recorder):
    """Writes down what it hears."""

    is_silent = False

    def __init__(self, name, log):
        self.name, self.log = name, log

    def begin(self, kind, bucket=-1, numel=0):
        self.log.append((self.name, "begin", kind, bucket, numel))
        return f"{self.name}:{kind}"

    def end(self, span):
        self.log.append((self.name, "end", span))

    def instant(self, kind, bucket=-1, numel=0):
        self.log.append((self.name, "instant", kind, bucket, numel))

    def step_begin(self):
        self.log.append((self.name, "step"))


def test_all_listeners_hear_everything_each_with_its_own_span():
    log = []
    both = Recorders([Log("a", log), Log("b", log)])
    assert not both.is_silent
    both.step_begin()
    both.end(both.begin("use", 3, 40))
    both.instant("release", 3, 40)
    assert log == [
        ("a", "step"),
        ("b", "step"),
        ("a", "begin", "use", 3, 40),
        ("b", "begin", "use", 3, 40),
        ("b", "end", "b:use"),
        ("a", "end", "a:use"),
        ("a", "instant", "release", 3, 40),
        ("b", "instant", "release", 3, 40),
    ]


def test_paused_listeners_hear_only_the_end_of_what_has_begun():
    log = []
    paused = Recorders([Log("a", log)])
    span = paused.begin("use")
    paused.pause()
    unheard = paused.begin("forward_fetch_wait")
    paused.instant("release")
    paused.end(unheard)
    paused.end(span)
    assert log == [("a", "begin", "use", -1, 0), ("a", "end", "a:use")]
    paused.resume()
    paused.instant("release")
    assert log[-1] == ("a", "instant", "release", -1, 0)


def test_step_ends_a_pause():
    log = []
    paused = Recorders([Log("a", log)])
    paused.pause()
    paused.step_begin()
    paused.instant("release")
    assert log == [("a", "step"), ("a", "instant", "release", -1, 0)]


def test_silence_gives_nothing_to_hold():
    assert SILENT.is_silent
    assert SILENT.begin("use", 1, 2) is None


@pytest.mark.parametrize(("kind", "limit_s"), [("silent", 1e-6), ("timers", 5e-6)])
def test_a_span_costs_little(kind, limit_s):
    recorder = SILENT if kind == "silent" else StepTimers()

    def spans():
        for _ in range(200):
            recorder.end(recorder.begin("forward_fetch_wait", 3, 1000))

    costs = timeit.repeat(spans, number=1, repeat=101)
    assert statistics.median(costs) / 200 < limit_s
