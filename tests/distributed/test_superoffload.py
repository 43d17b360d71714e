"""SuperOffload against plain offload: the same bits, whatever comes between backward and step.

The trainings are those of ``test_offload.py``, which do about all that can be done there. Each runs
twice: once as it is, and once with a worker that steps ahead whatever has come of it before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.optim.superoffload import Speculation, SuperMaster, SuperOffloadUpdater
from tests.distributed.test_offload import AT_STAGE_3
from tests.distributed.test_zenflow import ADAM, EVERYWHERE, own_steps
from tests.helpers.late_link import LateLink
from tests.helpers.offloading import (
    BUCKET_NUMEL,
    Case,
    Run,
    fused_adamw,
    gap,
    late_copies,
    make_net,
    outcome,
    trained,
)
from tests.helpers.one_worker import one_worker
from tests.helpers.spawn import run_ranks

BF16 = torch.bfloat16
SUPER = {"device": "cpu", "super_offload": True}


def ahead(case: Case) -> Case:
    usual = case.offload.get("offload_optimizer", "cpu")
    options = {} if isinstance(usual, str) else usual
    return replace(case, offload={**case.offload, "offload_optimizer": {**options, **SUPER}})


@contextmanager
def always_ahead() -> Iterator[None]:
    """Inside, whatever was wrong the last time is tried again."""
    usual = SuperMaster.on_arrived

    def on_arrived(master: SuperMaster) -> None:
        master._trusts, master._expected_arrivals = True, 0
        usual(master)

    SuperMaster.on_arrived = on_arrived
    try:
        yield
    finally:
        SuperMaster.on_arrived = usual


@contextmanager
def counted(total: Speculation) -> Iterator[None]:
    """Add up what comes of steps in engines that are closed inside."""
    close = ZeroEngine.close

    def counting(engine: ZeroEngine) -> None:
        if isinstance(engine.updater, SuperOffloadUpdater):
            total.confirmed += engine.updater.counts.confirmed
            total.undone += engine.updater.counts.undone
        close(engine)

    ZeroEngine.close = counting
    try:
        yield
    finally:
        ZeroEngine.close = close


def difference(
    case: Case, stage: int, groups: ShardGroups, is_late: bool, is_forced: bool
) -> tuple[float, bool]:
    """What SuperOffload changes in a training with offload, and whether anything was trained."""
    with own_steps():
        plain = trained(case, stage, groups, is_offloaded=True)
    with ExitStack() as scopes:
        scopes.enter_context(
            late_copies(LateLink(torch.device("cpu"))) if is_late else nullcontext()
        )
        scopes.enter_context(always_ahead() if is_forced else nullcontext())
        found = trained(ahead(case), stage, groups, is_offloaded=True)
    start = make_net(case.dtype).state_dict()
    is_trained = groups.rank > 0 or any(not found[name].equal(v) for name, v in start.items())
    return gap(plain, found), is_trained


def all_cases(world_size: int) -> tuple[dict[str, tuple[float, bool]], list[Speculation]]:
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found, totals = {}, [Speculation(), Speculation()]
    with one_worker():
        for number, (name, case) in enumerate(ADAM.items()):
            stages = (3, 3) if name in AT_STAGE_3 else (2 + number % 2, 3 - number % 2)
            for is_forced, stage in enumerate(stages):
                with counted(totals[is_forced]):
                    key = f"{name}: stage {stage}{' forced' * is_forced}"
                    found[key] = difference(case, stage, groups, world_size > 1, bool(is_forced))
            if name in EVERYWHERE:  # most are clipped, this one is not
                case = replace(case, max_norm=1e6)
                with counted(totals[0]):
                    found[f"{name}, free"] = difference(case, 2, groups, world_size > 1, False)
    return found, totals


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_bit_changes(world_size):
    for found, (usual, forced) in run_ranks(all_cases, world_size, world_size):
        over = {key: result for key, result in found.items() if result != (0.0, True)}
        assert len(found) > 2 * len(ADAM)
        assert not over, "\n".join(f"{key}: {result}" for key, result in over.items())
        assert usual.confirmed > 100
        assert forced.confirmed > 10
        assert forced.undone > 500


class Accidents:
    """Two hundred steps, some of which overflow, are clipped, or never come."""

    def __init__(self, dtype: torch.dtype, offload: Any, groups: ShardGroups) -> None:
        net = make_net(dtype)
        optimizer = fused_adamw(net)
        options = ZeroOptions(stage=2, bucket_numel=BUCKET_NUMEL, offload_optimizer=offload)
        self.run = Run(net, optimizer, ZeroEngine(net, [optimizer], options, groups))
        self.generator = torch.Generator().manual_seed(7)

    def chance(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def all_steps(self) -> dict[str, Tensor]:
        net, optimizer, engine = self.run.net, self.run.optimizer, self.run.engine
        for _ in range(200):
            for group in optimizer.param_groups:
                group["lr"] *= 0.995
            for _ in range(1 + (self.chance() < 0.1)):  # without no_sync: found out too late
                batch = torch.randn(4, 7, generator=self.generator).to(net.scale.dtype)
                factor = float("inf") if self.chance() < 0.1 else 1.0
                engine.backward(net(batch) * factor)
            norm = engine.clip_grad_norm_(optimizer, 2.0 if self.chance() < 0.8 else 0.05)
            self.run.seen.append(norm)
            if not torch.tensor(norm).isfinite():
                if self.chance() < 0.5:  # as a loss scaler says it to fused optimizers, and others
                    optimizer.found_inf = torch.tensor(1.0)
                    engine.step(optimizer)
                    del optimizer.found_inf
                else:
                    engine.step(optimizer, lambda: None)
            elif self.chance() > 0.05:
                engine.step(optimizer)
            optimizer.zero_grad()
        found = outcome(self.run)
        engine.close()
        return found


def accidents() -> list[tuple[float, int, int]]:
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = []
    for dtype in (torch.float32, BF16):
        with own_steps():
            wanted = Accidents(dtype, "cpu", groups).all_steps()
        training, total = Accidents(dtype, SUPER, groups), Speculation()
        with counted(total):
            got = training.all_steps()
        found.append((gap(wanted, got), total.confirmed, total.undone))
    return found


def test_two_hundred_steps_with_overflow_and_clipping():
    (found,) = run_ranks(accidents, 1)
    for difference, confirmed, undone in found:
        assert difference == 0.0
        assert confirmed > 100
        assert undone > 50
    assert len(found) == 2


def one_step(run: Run, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    run.engine.backward(run.net(torch.randn(4, 7, generator=generator).to(run.net.scale.dtype)))


def training(groups: ShardGroups, stage: int, dtype: torch.dtype = BF16) -> Run:
    net = make_net(dtype)
    optimizer = fused_adamw(net)
    options = ZeroOptions(stage=stage, bucket_numel=BUCKET_NUMEL, offload_optimizer=SUPER)
    return Run(net, optimizer, ZeroEngine(net, [optimizer], options, groups))


def steps(run: Run, begin: int, end: int) -> None:
    for step in range(begin, end):
        one_step(run, step)
        run.engine.step(run.optimizer)
        run.optimizer.zero_grad()


def saved(run: Run) -> list[Any]:
    states = run.engine.optimizer_state_dict(run.optimizer)
    every = [[run.engine.module_state_dict(), states]]
    dist.broadcast_object_list(every)
    return every[0]


def saves_and_windows() -> list[str]:
    """What is wrong with saves between backward and step, and with accumulation."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    wrong = []
    with one_worker():
        for stage in (2, 3):
            whole = training(groups, stage)
            counts = whole.engine.updater.counts
            steps(whole, 0, 4)
            before, taken = saved(whole), counts.undone
            one_step(whole, 4)  # is stepped ahead
            between = saved(whole)
            if str(before) != str(between):
                wrong.append(f"stage {stage}: a save shows what was stepped ahead")
            if counts.undone == taken:
                wrong.append(f"stage {stage}: nothing was stepped ahead")
            whole.engine.step(whole.optimizer)
            whole.optimizer.zero_grad()
            steps(whole, 5, 8)
            second = training(groups, 5 - stage)
            steps(second, 0, 2)
            one_step(second, 2)  # whatever was there, and under way, is replaced
            with second.engine.loading():
                second.net.load_state_dict(between[0])
            second.engine.load_optimizer_state_dict(second.optimizer, between[1])
            second.optimizer.zero_grad()
            steps(second, 4, 8)
            if gap(outcome(whole), outcome(second)):
                wrong.append(f"stage {stage}: does not go on as it was")
            second.engine.close()
            taken, right = counts.undone, counts.confirmed
            for step in range(8, 12):
                with whole.engine.no_sync():
                    one_step(whole, step)
                one_step(whole, step + 100)
                whole.engine.step(whole.optimizer)
                whole.optimizer.zero_grad()
            if counts.undone > taken or counts.confirmed < right + 12:
                wrong.append(f"stage {stage}: accumulation {counts}")
            one_step(whole, 12)
            values = [p.clone() for p in whole.engine.trained.shown().values()]
            whole.engine.close()  # a backward without a step changes nothing
            if not values:
                wrong.append(f"stage {stage}: nothing is here")
    return wrong


def test_saves_and_windows():
    for wrong in run_ranks(saves_and_windows, 2):
        assert not wrong


def killed() -> list[str]:
    """A worker that is gone is an error on all ranks, and weights are those of the last step."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = []
    for when in ("before backward", "after backward"):
        run = training(groups, 2)
        steps(run, 0, 3)
        before = run.engine.module_state_dict()
        own = run.engine.updater._steps._worker.pid
        if when == "before backward" and groups.rank == 1:
            os.kill(own, signal.SIGKILL)
        one_step(run, 3)
        if when == "after backward" and groups.rank == 1:
            os.kill(own, signal.SIGKILL)
        try:
            steps(run, 4, 6)
        except RuntimeError as error:
            found.append(str(error))
        after = run.engine.module_state_dict()
        if any(not torch.equal(before[name], value) for name, value in after.items()):
            found.append("weights have changed")
        run.engine.abandon()
        try:
            os.kill(own, 0)
            found.append("the worker is still there")
        except ProcessLookupError:
            pass
    return found


def test_a_worker_that_is_killed_is_an_error_on_all_ranks():
    here, there = run_ranks(killed, 2)
    assert len(here) == len(there) == 2
    for own, other in zip(there, here, strict=True):
        assert "was killed by signal 9" in own
        assert "rank 1" in other
        assert "was killed by signal 9" in other


def cores() -> list[str]:
    """The trainer leaves the worker's cores alone, and gets them back."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    wrong = []
    allowed = os.sched_getaffinity(0)
    run = training(groups, 2)
    trainer = set().union(*(os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")))
    steps(run, 0, 1)  # the worker answers: it has found its cores
    worker = os.sched_getaffinity(run.engine.updater._steps._worker.pid)
    if len(allowed) > 1 and (trainer & worker or trainer | worker != allowed):
        wrong.append(f"{trainer} and {worker} of {allowed}")
    run.engine.close()
    if os.sched_getaffinity(0) != allowed:
        wrong.append("cores were not given back")
    return wrong


def test_cores_are_shared():
    assert run_ranks(cores, 1) == [[]]
