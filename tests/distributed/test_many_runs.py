"""A process that trains again and again, as a search for hyperparameters does."""

from __future__ import annotations

import gc

import psutil
import torch
from lightning.fabric import Fabric

from lightning_zero import ZeroStrategy, full_params
from lightning_zero.fabric import ZeroStrategy as FabricZero
from lightning_zero.fabric.loans import LEAST_COLLECTED
from tests.helpers.models import Language, TinyGPT, Tokens, adamw, equal, trainer, weights
from tests.helpers.spawn import run_ranks

RUNS = 4
SET_UPS = 4


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


def set_up_again_and_again(stage, how, set_ups=SET_UPS):
    """Threads and open files after each set-up with Fabric, and the weights that came out."""
    counts, ends, kept = [], [], []
    for _ in range(set_ups):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricZero(stage))
        fabric.launch()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = TinyGPT()
        model, optimizer = fabric.setup(module, adamw(module))
        for batch in Tokens(fabric.global_rank, 2):
            optimizer.zero_grad()
            fabric.backward(model(batch))
            optimizer.step()
        with full_params(model):
            ends.append(weights(model))
        if how == "released":
            fabric.strategy.release(model)
        elif how == "torn down":
            fabric.strategy.teardown()
        elif how == "held on one rank":
            kept[:] = [model] if fabric.global_rank else []
        elif how == "in the middle of a step":
            model(batch).backward()
        del model, optimizer, module
        if how != "left to the collector":
            gc.collect()
        process = psutil.Process()
        counts.append((process.num_threads(), process.num_fds()))
    return counts, ends


WAYS = ("dropped", "released", "torn down", "held on one rank", "in the middle of a step")


def every_way_of_setting_up():
    found = {how: set_up_again_and_again(3, how) for how in WAYS}
    return found, set_up_again_and_again(1, "left to the collector", LEAST_COLLECTED + 3)


def test_set_ups_with_fabric_leave_no_threads_and_connections_behind():
    """Groups end where all ranks have dropped their model, or are used again."""
    for found, (counts, _) in run_ranks(every_way_of_setting_up, 2):
        for how, (counts_of_it, ends) in found.items():
            assert max(counts_of_it[3:]) <= max(counts_of_it[:3]), (how, counts_of_it)
            assert all(equal(end, ends[0]) for end in ends), how
        most = [
            first + LEAST_COLLECTED * (second - first)
            for first, second in zip(*counts[:2], strict=True)
        ]
        assert max(threads for threads, _ in counts) <= most[0], counts
        assert max(files for _, files in counts) <= most[1], counts


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
