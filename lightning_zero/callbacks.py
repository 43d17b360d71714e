"""What a Trainer shows of the engine's times: printed, logged, and written as a timeline."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_zero.engine import ZeroEngine
from lightning_zero.observe.recorder import SILENT, Recorder, Recorders
from lightning_zero.observe.timeline import MERGED_NAME, Timeline, merge, rank_file
from lightning_zero.observe.timers import StepTimers, StepTimes, shown_kinds, step_line, summary
from lightning_zero.plan.zenflow import ZenFlowConfig
from lightning_zero.self_check import Report, SelfCheck


class TraceLog:
    """Logs how often steps have left their trace at stage 3, whenever it has happened again."""

    def __init__(self) -> None:
        self._logged = 0

    def log(self, trainer: Any, counts: dict[str, float]) -> None:
        """Log counts if they are news.

        Args:
            trainer: Has the loggers.
            counts: As ``ZeroStrategy.trace_counts``.
        """
        found = int(counts.get("zero/trace_invalidations", 0))
        if found > self._logged:
            for logger in trainer.loggers:
                logger.log_metrics(counts, step=trainer.global_step)
        self._logged = found


class SelfChecks:
    """A self-check for each fit; the strategy tells it where the Trainer is.

    Args:
        steps: Optimizer steps to compare; None or 0 for none.
        zenflow: Options of ZenFlow, where it is used.

    Raises:
        ValueError: This is no number of steps, or there is nothing that it could be compared with.
    """

    def __init__(self, steps: int | None = None, zenflow: ZenFlowConfig | None = None) -> None:
        is_number = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        if steps is not None and not is_number:
            raise ValueError(
                f"self_check must be a number of optimizer steps, 0 or None for none, got {steps!r}"
            )
        if steps and zenflow is not None and zenflow.is_behind:
            raise ValueError(
                f"self_check={steps} compares with plain training, and zenflow steps the rest later"
                " by its nature: check with update_interval=1 and without overlap_step, or remove"
                " one of the two"
            )
        self._steps = steps or 0
        self._trainer: Any = None
        self._engine: ZeroEngine | None = None
        self._optimizers: list[Optimizer] = []
        self._check: SelfCheck | None = None
        self.report: Report | None = None
        """The result of the latest fit."""

    def open(self, trainer: Any, engine: ZeroEngine, optimizers: list[Optimizer]) -> None:
        """A fit begins: what is compared are its first steps."""
        if self._steps:
            self._trainer, self._engine, self._optimizers = trainer, engine, optimizers
            self.report = None

    def on_batch_start(self) -> None:
        """A training batch begins; the first one has all that was loaded or written before."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._check = SelfCheck(engine, self._optimizers, self._steps, self._tell)

    def on_train_end(self) -> None:
        """The last step has ended; for all ranks to call."""
        if self._check is not None:
            self._check.finish()

    def close(self) -> None:
        """Free everything, without a word to other ranks."""
        if self._check is not None:
            self._check.close()
        self._check = self._engine = self._trainer = None
        self._optimizers = []

    def _tell(self, report: Report) -> None:
        self.report = report
        rank_zero_info(str(report))
        if self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(report.metrics(), step=self._trainer.global_step)


class StepObserver:
    """Times the optimizer steps of a fit; the strategy tells it where the Trainer is.

    What runs outside of steps (validation, a callback that generates text) is not recorded.

    Args:
        wall_clock_breakdown: Print and log the times of each step, and sum them up at the end.
        timeline: Folder for timelines of the first steps; None for none.

    Raises:
        ValueError: A value is of the wrong type, or the folder is a file.
    """

    def __init__(
        self, wall_clock_breakdown: bool = False, timeline: str | Path | None = None
    ) -> None:
        if not isinstance(wall_clock_breakdown, bool):
            raise ValueError(
                f"wall_clock_breakdown must be True or False, got {wall_clock_breakdown!r}"
            )
        if timeline is not None and (not isinstance(timeline, (str, Path)) or not str(timeline)):
            raise ValueError(f"timeline must be the path of a folder, got {timeline!r}")
        self._has_timers = wall_clock_breakdown
        self._folder = None if timeline is None else Path(timeline)
        if self._folder is not None and self._folder.exists() and not self._folder.is_dir():
            raise ValueError(
                f"timeline={str(timeline)!r} is a file: name a folder, in which each rank writes"
                " a timeline of its own"
            )
        self._trainer: Any = None
        self._listeners: _TrainerSteps | None = None
        self._timers: StepTimers | None = None
        self._timeline: Timeline | None = None
        self._global_step: int | None = None
        self._numbers: deque[int] = deque()

    def open(self, trainer: Any, device: torch.device) -> Recorder:
        """A fit begins.

        Args:
            trainer: The Trainer.
            device: Where its model is.

        Returns:
            What the engine tells its times to; silent if nothing was asked for.
        """
        if not self._has_timers and self._folder is None:
            return SILENT
        self._trainer, self._global_step = trainer, None
        self._numbers.clear()
        self._timers = StepTimers(device) if self._has_timers else None
        self._timeline = None
        if self._folder is not None:
            self._timeline = Timeline(trainer.global_rank, device=device)
        listeners = (self._timers, self._timeline)
        self._listeners = _TrainerSteps([each for each in listeners if each is not None])
        self._listeners.pause()
        return self._listeners

    def on_batch_start(self) -> None:
        """A training batch begins, and with it a step unless gradients are being accumulated."""
        if self._listeners is None:
            return
        # Counted as Lightning counts what it logs itself: from 0, before the step.
        step = self._trainer.global_step
        if step == self._global_step:
            self._listeners.resume()
            return
        self._global_step = step
        self._listeners.begin_step()
        self._numbers.append(step)
        self._show_finished()

    def automatic_step(self) -> AbstractContextManager[None]:
        """Around an optimizer step: with automatic optimization, what comes after it is no step."""
        return self._step(is_automatic=True)

    def manual_step(self) -> AbstractContextManager[None]:
        """Around ``training_step``: with manual optimization, what comes after it is no step."""
        return self._step(is_automatic=False)

    def pause(self) -> None:
        """What comes is not part of a step, until a training batch begins."""
        if self._listeners is not None:
            self._listeners.pause()

    def on_train_end(self, barrier: Callable[[], object]) -> None:
        """The last step has ended; for all ranks to call.

        Args:
            barrier: Waits for all ranks.
        """
        if self._listeners is None:
            return
        timeline, trainer = self._timeline, self._trainer
        self.close(waits=True)
        if timeline is None or self._folder is None:
            return
        barrier()
        if trainer.is_global_zero:
            files = [self._folder / rank_file(rank) for rank in range(trainer.world_size)]
            found = [file for file in files if file.exists()]
            merged = self._folder / MERGED_NAME
            try:
                merge(found, merged)
            except OSError as error:
                warnings.warn(f"{merged} could not be written: {error}", stacklevel=2)
                return
            rank_zero_info(
                f"timeline of {len(found)} of {len(files)} rank(s): {merged} (open it in"
                " https://ui.perfetto.dev or chrome://tracing)"
            )

    def close(self, *, waits: bool = False) -> None:
        """Sum up, and write this rank's timeline; nothing to do if that was done before.

        Args:
            waits: Wait for times that the device has not passed yet; False after an error.
        """
        if self._listeners is None:
            return
        self._listeners.pause()
        self._listeners = None
        if self._timers is not None:
            self._timers.finish(waits=waits)
            self._show_finished()
            rank_zero_info(summary(self._timers))
        if self._timeline is not None and self._folder is not None:
            try:
                self._timeline.write(self._folder, waits=waits)
            except OSError as error:  # other ranks go on: this one must not stop alone
                warnings.warn(
                    f"rank {self._timeline.rank} could not write its timeline: {error}",
                    stacklevel=2,
                )
        self._timers = self._timeline = self._trainer = None

    @contextmanager
    def _step(self, is_automatic: bool) -> Iterator[None]:
        yield
        trainer = self._trainer
        if trainer and trainer.lightning_module.automatic_optimization == is_automatic:
            self.pause()

    def _show_finished(self) -> None:
        if self._timers is None:
            return
        for times in self._timers.take_finished():
            step = self._numbers.popleft()
            rank_zero_info(step_line(times, step))
            if self._trainer.is_global_zero:
                for logger in self._trainer.loggers:
                    logger.log_metrics(metrics(times), step=step)


def metrics(times: StepTimes) -> dict[str, float]:
    """Durations of a step for a logger, in seconds, by names such as ``zero/forward_s``."""
    return {f"zero/{kind}_s": times.seconds(kind) for kind in shown_kinds(times)}


class _TrainerSteps(Recorders):
    """Steps are those of the optimizer, which the Trainer counts; the engine sees forwards."""

    def step_begin(self) -> None:
        """Not a step of the optimizer."""

    def begin_step(self) -> None:
        """A step of the optimizer begins."""
        super().step_begin()
