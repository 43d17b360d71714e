"""What the observer prints, logs and writes, driven as the strategy drives it."""

from __future__ import annotations

import json
import logging
import re
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_zero.callbacks import StepObserver
from lightning_zero.observe.recorder import SILENT

CPU = torch.device("cpu")


class Logger:
    """Keeps what it is told to log."""

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


@pytest.fixture
def trainer():
    return SimpleNamespace(
        global_step=0,
        global_rank=0,
        world_size=1,
        is_global_zero=True,
        loggers=[Logger(), Logger()],
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )


def span(recorder, kind):
    recorder.end(recorder.begin(kind))


def batch(observer, recorder, trainer, steps=True):
    observer.on_batch_start()
    with observer.manual_step():
        recorder.step_begin()  # as the engine does at each forward
        span(recorder, "forward")
    with observer.automatic_step() if steps else nullcontext():
        span(recorder, "backward")
    trainer.global_step += steps


def nothing():
    pass


def test_nothing_asked_for_is_silent(trainer):
    observer = StepObserver()
    assert observer.open(trainer, CPU) is SILENT
    observer.on_batch_start()
    observer.pause()
    observer.on_train_end(lambda: pytest.fail("nobody has to be waited for"))
    observer.close()
    assert trainer.loggers[0].rows == []


def test_each_step_is_printed_and_logged_once_by_its_number(trainer, caplog):
    observer = StepObserver(wall_clock_breakdown=True)
    trainer.global_step = 5  # as after a resume
    with caplog.at_level(logging.INFO):
        recorder = observer.open(trainer, CPU)
        for _ in range(3):
            batch(observer, recorder, trainer)
        observer.on_train_end(nothing)
        observer.close()
    lines = [message for message in caplog.messages if message.startswith("step ")]
    assert [line.split(" [ms]:")[0] for line in lines] == ["step 5", "step 6", "step 7"]
    assert sum("wall clock of 2 step(s)" in message for message in caplog.messages) == 1
    for logger in trainer.loggers:
        assert [step for step, _ in logger.rows] == [5, 6, 7]
        for _, metrics in logger.rows:
            assert set(metrics) == {"zero/forward_s", "zero/backward_s"}
            assert all(0 < seconds < 1 for seconds in metrics.values())


def test_other_ranks_log_nothing(trainer):
    trainer.global_rank, trainer.is_global_zero = 1, False
    observer = StepObserver(wall_clock_breakdown=True)
    batch(observer, observer.open(trainer, CPU), trainer)
    observer.on_train_end(nothing)
    assert trainer.loggers[0].rows == []


def test_batches_that_accumulate_are_one_step(trainer, tmp_path):
    observer = StepObserver(timeline=tmp_path)
    recorder = observer.open(trainer, CPU)
    for steps in (False, True, False, True):
        batch(observer, recorder, trainer, steps)
    observer.on_train_end(nothing)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    found = [(e["name"], e["args"]["step"]) for e in events if e.get("cat") == "forward"]
    assert found == [("forward", 0), ("forward", 0), ("forward", 1), ("forward", 1)]
    assert [e["name"] for e in events if e.get("cat") == "step"] == ["step 0", "step 1"]


def test_validation_and_what_callbacks_run_are_not_recorded(trainer, tmp_path):
    observer = StepObserver(wall_clock_breakdown=True, timeline=tmp_path)
    recorder = observer.open(trainer, CPU)
    span(recorder, "forward")  # sanity check
    batch(observer, recorder, trainer)
    span(recorder, "forward")  # a callback at the end of the batch
    batch(observer, recorder, trainer, steps=False)
    observer.pause()  # a validation while gradients are accumulated
    span(recorder, "forward")
    batch(observer, recorder, trainer)
    span(recorder, "forward")  # a callback at the end of the fit
    observer.on_train_end(nothing)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 3


def test_with_manual_optimization_the_step_is_all_that_training_step_does(trainer, tmp_path):
    trainer.lightning_module.automatic_optimization = False
    observer = StepObserver(timeline=tmp_path)
    recorder = observer.open(trainer, CPU)
    observer.on_batch_start()
    with observer.manual_step():
        for _ in range(2):  # two optimizers, as of a GAN
            span(recorder, "backward")
            with observer.automatic_step():
                span(recorder, "reduce")
            trainer.global_step += 1
    span(recorder, "forward")  # a callback at the end of the batch
    observer.on_train_end(nothing)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sorted(e["cat"] for e in events if e["ph"] == "X") == [
        "backward",
        "backward",
        "reduce",
        "reduce",
        "step",
    ]


def test_error_still_writes_and_sums_up_but_waits_for_nobody(trainer, tmp_path, caplog):
    observer = StepObserver(wall_clock_breakdown=True, timeline=tmp_path)
    recorder = observer.open(trainer, CPU)
    batch(observer, recorder, trainer)
    observer.on_batch_start()
    span(recorder, "forward")  # and backward raises
    with caplog.at_level(logging.INFO):
        observer.close()
        observer.close()
    assert sum(message.startswith("wall clock of 1 step(s)") for message in caplog.messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["timeline-rank0.json"]


def test_only_ranks_of_this_run_are_merged_after_all_have_written(trainer, tmp_path, caplog):
    trainer.world_size = 3
    stale = tmp_path / "timeline-rank7.json"
    stale.write_text("{}")

    def barrier():  # rank 1 writes last, rank 2 has a disk of its own
        own = tmp_path / "timeline-rank0.json"
        (tmp_path / "timeline-rank1.json").write_text(
            own.read_text().replace('"rank": 0', '"rank": 1')
        )

    observer = StepObserver(timeline=str(tmp_path))
    batch(observer, observer.open(trainer, CPU), trainer)
    with caplog.at_level(logging.INFO):
        observer.on_train_end(barrier)
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert content["otherData"]["ranks"] == [0, 1]
    assert re.search(r"timeline of 2 of 3 rank\(s\): .*timeline\.json", caplog.text)


def test_rank_that_cannot_write_says_so_and_still_meets_the_others(trainer, tmp_path):
    folder = tmp_path / "folder"
    observer = StepObserver(timeline=folder)
    batch(observer, observer.open(trainer, CPU), trainer)
    folder.write_text("a file by now")
    met = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        observer.on_train_end(lambda: met.append(True))
    assert met
    own, merged = (str(warning.message) for warning in warned)
    assert own.startswith("rank 0 could not write its timeline")
    assert "timeline.json could not be written" in merged


def test_next_fit_begins_anew(trainer, tmp_path):
    observer = StepObserver(wall_clock_breakdown=True, timeline=tmp_path)
    for _ in range(2):
        recorder = observer.open(trainer, CPU)
        batch(observer, recorder, trainer)
        observer.on_train_end(nothing)
    assert [step for step, _ in trainer.loggers[0].rows] == [0, 1]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "forward" for event in events) == 1


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_switch_that_is_no_bool_is_refused(value):
    with pytest.raises(ValueError, match=f"must be True or False, got {value!r}"):
        StepObserver(wall_clock_breakdown=value)


@pytest.mark.parametrize("value", ["", 3, True])
def test_timeline_that_is_no_path_is_refused(value):
    with pytest.raises(ValueError, match=f"must be the path of a folder, got {value!r}"):
        StepObserver(timeline=value)


def test_timeline_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        StepObserver(timeline=file)
