"""ZenFlow against plain training: the same numbers where nothing waits, and a bound where it does.

The trainings are those of ``test_offload.py``: where the rest is stepped in each step, columns on
the device and columns on the host together are what the optimizer alone would have made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ShardGroups
from lightning_zero.optim import bucket_steps
from lightning_zero.optim.zenflow.home import PickingHome
from tests.distributed.test_offload import AT_STAGE_3, CASES, STAGES
from tests.helpers.late_link import LateLink
from tests.helpers.offloading import Case, gap, late_copies, make_net, trained
from tests.helpers.spawn import run_ranks

OTHERS = ("SGD", "NAdam", "amsgrad", "foreach", "state in groups", "unknown class", "zeroed in")
"""Trainings by optimizers that are not plain Adam."""
ADAM = {
    name: case
    for name, case in (CASES | AT_STAGE_3).items()
    if not any(other in name for other in OTHERS) or name == "zeroed in place, bf16"
}
EVERYWHERE = ("fused AdamW", "fused AdamW, bf16")
OPTIONS: list[dict[str, Any]] = [
    {"topk_ratio": 0.3, "select_strategy": "step", "select_interval": 2},
    {"topk_ratio": 1.0},
    {"topk_ratio": 0.0, "select_strategy": "epoch"},
    {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 1, "offload": True},
    {"topk_ratio": 0.1, "full_warm_up_rounds": 2, "steps_per_epoch": 1},
]


def with_zenflow(case: Case, options: Mapping[str, Any]) -> Case:
    zenflow = {"update_interval": 1, **options}
    return replace(case, offload={"offload_optimizer": "cpu", **case.offload, "zenflow": zenflow})


@contextmanager
def own_steps() -> Iterator[None]:
    """Plain offload inside steps all by our op, which rounds the same wherever an element lies.

    Torch's fused form rounds the last elements of a tensor in another way than those before.
    """
    gains = bucket_steps._gains
    bucket_steps._gains = lambda master: True
    try:
        yield
    finally:
        bucket_steps._gains = gains


@contextmanager
def counted_picks() -> Iterator[list[bool]]:
    """Of each look at picked columns, whether they held."""
    found: list[bool] = []
    picked = PickingHome.picked

    def counting(home: PickingHome, bucket: Any, slot: int) -> Any:
        columns = picked(home, bucket, slot)
        found.append(columns is not None)
        return columns

    PickingHome.picked = counting
    try:
        yield found
    finally:
        PickingHome.picked = picked


def difference(
    case: Case, options: Mapping[str, Any], stage: int, groups: ShardGroups, is_late: bool
) -> tuple[float, bool]:
    """What ZenFlow changes in a training with offload, and whether it was trained at all."""
    with own_steps():
        plain = trained(case, stage, groups, is_offloaded=True)
    late = LateLink(torch.device("cpu"))
    with late_copies(late) if is_late else nullcontext():
        found = trained(with_zenflow(case, options), stage, groups, is_offloaded=True)
    start = make_net(case.dtype).state_dict()
    is_trained = groups.rank > 0 or any(not found[name].equal(v) for name, v in start.items())
    return gap(plain, found), is_trained and (not is_late or late.late_count > 0)


def all_cases(world_size: int) -> tuple[dict[str, tuple[float, bool]], float]:
    """Of each training what is changed, and in how many steps columns were on the device."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = {}
    held: list[bool] = []
    for number, (name, case) in enumerate(ADAM.items()):
        stages: tuple[int, ...] = STAGES
        if name not in EVERYWHERE:
            stages = (2 + number % 2,) if world_size < 3 else ()
        if name in AT_STAGE_3:
            stages = (3,) if stages else ()
        for stage in stages:
            options = OPTIONS[(number + stage) % len(OPTIONS)]
            key = f"{name}: stage {stage} {options}"
            with counted_picks() as picks:
                found[key] = difference(case, options, stage, groups, world_size > 1)
            held += picks
    return found, sum(held) / len(held)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_changes_where_nothing_waits(world_size):
    for found, held in run_ranks(all_cases, world_size, world_size):
        over = {key: result for key, result in found.items() if result != (0.0, True)}
        assert found
        assert held > 0.5 if world_size > 1 else held == 0  # a CPU has nothing to pick from
        assert not over, "\n".join(f"{key}: {result}" for key, result in over.items())
