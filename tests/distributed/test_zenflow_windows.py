"""ZenFlow where the rest waits: against a simulation, and going on from checkpoints."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.offloading import BUCKET_NUMEL, Net, make_net
from tests.helpers.spawn import run_ranks
from tests.helpers.zenflow import BETAS, DECAY, EPS, LR, Simulated

STEPS = 11
BOUND = 2e-5
"""Of a weight near 1, after all steps in fp32 instead of fp64."""
KINDS: dict[str, dict[str, Any]] = {
    "windows": {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 6},
    "cut by a selection": {"topk_ratio": 0.2, "update_interval": 3, "select_interval": 4},
    "warm-up": {
        "topk_ratio": 0.5,
        "update_interval": 2,
        "select_interval": 2,
        "full_warm_up_rounds": 3,
    },
    "averages on the host": {
        "topk_ratio": 0.3,
        "update_interval": 4,
        "select_interval": 8,
        "offload": True,
    },
    "late": {
        "topk_ratio": 0.2,
        "update_interval": 2,
        "select_interval": 7,
        "full_warm_up_rounds": 1,
        "overlap_step": True,
    },
    "auto": {
        "topk_ratio": 0.3,
        "update_interval": "auto",
        "auto_ratio": 0.6,
        "select_interval": 7,
    },
}


class Training:
    """A net and its engine, for some steps."""

    def __init__(
        self,
        groups: ShardGroups,
        kind: dict[str, Any] | None,
        stage: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.net = make_net(dtype)
        options = {"lr": LR, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **options)
        zenflow = None if kind is None else {"select_strategy": "step", **kind}
        zero = ZeroOptions(
            stage=stage, bucket_numel=BUCKET_NUMEL, offload_optimizer="cpu", zenflow=zenflow
        )
        self.engine = ZeroEngine(self.net, [self.optimizer], zero, groups)

    def run(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.engine.backward(self.net(batch(step).to(self.net.scale.dtype)))
            self.engine.clip_grad_norm_(self.optimizer, 0.1)
            self.engine.step(self.optimizer)
            self.optimizer.zero_grad()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds, on all ranks."""
        every = [
            {
                "module": self.engine.module_state_dict(),
                "optimizer": self.engine.optimizer_state_dict(self.optimizer),
            }
        ]
        dist.broadcast_object_list(every)
        return every[0]

    def load(self, saved: dict[str, Any]) -> None:
        with self.engine.loading():
            self.net.load_state_dict(saved["module"])
        self.engine.load_optimizer_state_dict(self.optimizer, saved["optimizer"])


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 7, generator=generator)


def simulated(kind: dict[str, Any]) -> tuple[Net, list[int]]:
    net = make_net(torch.float32)
    names = "topk_ratio", "update_interval", "select_interval"
    sizes = [kind[name] for name in names]
    if sizes[1] == "auto":
        sizes[1] = float(kind["auto_ratio"])
    sim = Simulated(
        net, *sizes, kind.get("full_warm_up_rounds", 0), kind.get("overlap_step", False)
    )
    for step in range(STEPS):
        net(batch(step)).backward()
        sim.step(max_norm=0.1)
        net.zero_grad()
    return net, sim.windows


def differences() -> dict[str, float]:
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        net, windows = simulated(kind)
        wanted = net.state_dict()
        start = make_net(torch.float32).state_dict()
        for stage in (1, 2, 3) if number == 1 else (2 + number % 2,):
            training = Training(groups, kind, stage)
            waited = []
            for step in range(STEPS):
                training.run(step, step + 1)
                clock = training.saved()["optimizer"]["state"][1]["zenflow"]["clock"]
                waited.append(clock[1])
            got = training.saved()["module"]
            training.engine.close()
            moved = max(float((start[n] - got[n]).abs().max()) for n in start)
            gap = max(float((wanted[n] - got[n]).abs().max()) for n in start)
            found[f"{name}: stage {stage}"] = gap if moved > 100 * BOUND else float("inf")
            if waited != windows or name == "auto" and len(set(waited)) < 3:
                raise AssertionError(f"{name}: windows of {waited}, not of {windows}")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_windows_are_those_of_the_simulation(world_size):
    for found in run_ranks(differences, world_size):
        over = {name: gap for name, gap in found.items() if not gap <= BOUND}
        assert not over, over
        assert len(found) == len(KINDS) + 2


def left_late() -> list[str]:
    """A training that ends while the rest is late has its values at the end."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    wrong = []
    for stage in (2, 3):
        training = Training(groups, KINDS["late"], stage)
        training.run(0, 5)  # one of warm-up, a window that was shown, one that is late
        before = training.saved()
        late = before["optimizer"]["state"][1]["zenflow_late"]
        training.engine.close()
        weight = training.net.first.weight.detach()
        if torch.equal(before["module"]["first.weight"], late):
            wrong.append(f"stage {stage}: nothing was late")
        if not torch.equal(weight, late):
            wrong.append(f"stage {stage}: late values were lost")
    return wrong


def test_late_values_are_there_at_the_end():
    for wrong in run_ranks(left_late, 2):
        assert not wrong


def resumed() -> list[str]:
    """What is not as it would be without a break."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    wrong = []
    for number, (name, kind) in enumerate(KINDS.items()):
        stage = 2 + number % 2
        dtype = torch.bfloat16 if number % 2 else torch.float32
        whole = Training(groups, kind, stage, dtype)
        whole.run(0, STEPS)
        wanted = whole.saved()
        whole.engine.close()
        for at in (4,) if name == "late" else (0, 1, 5, 7):  # a worker takes seconds to start
            first = Training(groups, kind, stage, dtype)
            first.run(0, at)
            saved = first.saved()
            first.run(at, at + 2)  # whoever has saved goes on as if nothing had been
            first.engine.close()
            second = Training(groups, kind, 5 - stage, dtype)
            second.run(0, 3)  # whatever was there is replaced
            second.load(saved)
            second.run(at, STEPS)
            got = second.saved()
            second.engine.close()
            wrong += [f"{name} at {at}: {key}" for key in unequal(wanted, got)]
    return wrong


def unequal(wanted: dict[str, Any], got: dict[str, Any]) -> list[str]:
    found = [n for n, v in wanted["module"].items() if not torch.equal(v, got["module"][n])]
    for number, state in wanted["optimizer"]["state"].items():
        other = got["optimizer"]["state"][number]
        for key, value in state.items():
            is_same = torch.equal(value, other[key]) if isinstance(value, Tensor) else False
            if not is_same and value != other[key]:
                found.append(f"{number}.{key}")
    return found


def test_training_goes_on_exactly_within_a_window():
    for wrong in run_ranks(resumed, 2):
        assert not wrong


def with_a_killed_worker() -> tuple[str, bool, bool]:
    """Error, whether weights are those of the last window, and whether no process is left."""
    dist.init_process_group("gloo")
    training = Training(ShardGroups.create(), KINDS["late"], 2)
    training.run(0, 4)
    training.saved()  # waits for what is under way
    workers = psutil.Process().children()
    if dist.get_rank() == 1:
        workers[0].suspend()  # with its next job
    training.run(4, 5)
    before = training.net.first.weight.detach().clone()
    if dist.get_rank() == 1:
        workers[0].kill()
    error = ""
    try:
        training.run(5, 9)
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    after = training.net.first.weight.detach()
    moved = (before != after).any(dim=0)  # no column but the important ones
    training.engine.abandon()
    return error, int(moved.sum()) <= 1, not psutil.Process().children()


def test_a_killed_worker_is_an_error_on_all_ranks():
    for rank, (error, is_intact, is_clean) in enumerate(run_ranks(with_a_killed_worker, 2)):
        assert is_intact
        assert is_clean
        assert "was killed by signal 9. Weights are those of the last step" in error
        assert error.startswith("WorkerDied" if rank == 1 else "RuntimeError: other ranks could")


def by_others() -> list[str]:
    """A checkpoint of ZenFlow in a plain optimizer and back, and with another number of ranks."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    kind = KINDS["windows"]
    first = Training(groups, kind, 2)
    first.run(0, 5)
    saved = first.saved()
    first.engine.close()
    wrong = []
    net = make_net(torch.float32)
    net.load_state_dict(saved["module"])
    plain = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)
    plain.load_state_dict(saved["optimizer"])
    net(batch(5)).backward()
    plain.step()
    if not all(bool(p.isfinite().all()) for p in net.parameters()):
        wrong.append("plain AdamW does not go on")
    back = Training(groups, kind, 3)
    back.load({"module": net.state_dict(), "optimizer": plain.state_dict()})
    back.run(6, 7)
    counts = back.saved()["optimizer"]["state"][1]
    back.engine.close()
    if counts["zenflow"]["waited"] != 1 or set(counts["zenflow"]["counts"]) != {6, 7}:
        wrong.append(f"what another optimizer has kept was believed: {counts['zenflow']}")
    return wrong


def test_other_optimizers_read_the_checkpoint():
    for wrong in run_ranks(by_others, 1):
        assert not wrong
