"""Times of a CUDA device: measured in its queue, and nobody waits for them within a step."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_zero.observe.timeline import Timeline
from lightning_zero.observe.timers import StepTimers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUSY_CYCLES = 200_000_000
"""About 0.1 s at 2 GHz, which no host needs to queue it."""
LEAST_S = 0.02


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def keep_busy(recorder, kind):
    span = recorder.begin(kind, 0, 10)
    torch.cuda._sleep(BUSY_CYCLES)
    recorder.end(span)


def test_timers_do_not_wait_within_steps_and_measure_the_device(device):
    timers = StepTimers(device)
    keep_busy(timers, "warm_up")
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(3):
        timers.step_begin()
        keep_busy(timers, "forward_fetch_wait")
        keep_busy(timers, "forward_fetch_submit")
    queued_s = time.perf_counter() - begin_s
    assert len(timers.take_finished()) <= 1  # the warm-up
    timers.finish()
    waits = [step.seconds("forward_fetch_wait") for step in timers.take_finished()][-3:]
    submits = timers.later.seconds("forward_fetch_submit")
    assert all(wait > LEAST_S for wait in waits)
    assert queued_s < sum(waits)
    assert submits < LEAST_S


def test_timeline_stands_on_the_hosts_axis_of_time(device):
    timeline = Timeline(device=device)
    before_s = time.perf_counter()
    timeline.step_begin()
    keep_busy(timeline, "forward")
    keep_busy(timeline, "backward")
    torch.cuda.synchronize()
    after_s = time.perf_counter()
    _, forward, backward = timeline.moments()
    assert (forward.kind, backward.kind) == ("forward", "backward")
    slack_s = 0.005
    assert before_s - slack_s <= forward.begin_s <= forward.end_s - LEAST_S
    assert forward.end_s <= backward.begin_s + 1e-3
    assert backward.end_s <= after_s + slack_s
