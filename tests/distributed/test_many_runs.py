"""A process that trains again and again, as a search for hyperparameters does."""

from __future__ import annotations

import psutil
import torch

from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, equal, trainer, weights
from tests.helpers.spawn import run_ranks

RUNS = 4


def threads_after_runs(folder):
    """Threads and open files of this process after each run, and the weights that came out."""
    found = {}
    for stage in (1, 3):
        for form in ("consolidated", "sharded"):
            counts, ends = [], []
            for run in range(RUNS):
                module = Language(steps=2)
                strategy = ZeroStrategy(stage, checkpoint=form)
                runner = trainer(strategy, 2)
                runner.fit(module)
                runner.save_checkpoint(folder / f"{stage}-{form}-{run}")  # takes groups again
                runner.validate(module, verbose=False)
                process = psutil.Process()
                counts.append((process.num_threads(), process.num_fds()))
                ends.append(weights(module))
            found[stage, form] = counts, ends, strategy.sent_nbytes
    return found


def test_runs_leave_no_threads_and_connections_behind(tmp_path):
    for found in run_ranks(threads_after_runs, 2, tmp_path):
        for key, (counts, ends, sent_nbytes) in found.items():
            assert counts[-1] == counts[1], (key, counts)
            assert all(equal(end, ends[0]) for end in ends)
            assert sent_nbytes > 0


def interleaved():
    """Two strategies whose runs take turns, each with its own model."""
    modules = [Language(steps=2), Language(steps=2)]
    runners = [trainer(ZeroStrategy(stage), 2) for stage in (2, 3)]
    for _ in range(2):
        for runner, module in zip(runners, modules, strict=True):
            runner.fit_loop.max_epochs = runner.current_epoch + 1
            runner.fit(module)
    return [weights(module) for module in modules]


def test_runs_of_two_strategies_take_turns():
    first, second = run_ranks(interleaved, 2)
    for ours in (first, second):
        assert equal(ours[0], ours[1])
        assert not any(value.isnan().any() for value in ours[0].values() if torch.is_tensor(value))
