"""Offload on real devices: the same numbers, and the device's memory is free of states."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.spawn import run_ranks

GPUS = torch.cuda.device_count()
WIDTH, LAYERS, STEPS = 512, 12, 4
NUMEL = WIDTH * WIDTH * LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


def train(
    stage: int, dtype: torch.dtype, **options: Any
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Weights after a few steps, and the device's bytes between two steps and at most."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    module = nn.Sequential(*layers).to("cuda", dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    zero = ZeroOptions(stage=stage, bucket_numel=WIDTH * WIDTH, **options)
    engine = ZeroEngine(module, [optimizer], zero, ShardGroups.create())
    data = torch.Generator().manual_seed(engine.groups.rank)
    nbytes = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            batch = torch.randn(8, WIDTH, generator=data).to("cuda", dtype)
            with engine.step_scope():
                engine.backward(module(batch).float().pow(2).mean())
        engine.clip_grad_norm_(optimizer, 0.5)
        engine.step(optimizer)
        if step == STEPS - 1:
            nbytes["between"] = torch.cuda.memory_allocated()
            nbytes["most"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    with engine.full_params():
        weights = [parameter.detach().cpu().clone() for parameter in module.parameters()]
    engine.close()
    del engine, optimizer, module
    torch.cuda.empty_cache()
    return weights, nbytes


def all_ways(folder: str) -> dict[str, Any]:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    if GPUS > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (1, 2, 3):
            ways: dict[str, dict[str, Any]] = {
                "none": {},
                "cpu": {"offload_optimizer": "cpu"},
                "twin": {"offload_optimizer": {"ratio": 0.5}},
                "nvme": {"offload_optimizer": "nvme", "nvme_path": folder},
            }
            if stage == 3:
                ways["params"] = {"offload_parameters": "cpu"}
                ways["params on nvme"] = {"offload_parameters": "nvme", "nvme_path": folder}
            for name, options in ways.items():
                found[f"{dtype} {stage} {name}"] = train(stage, dtype, **options)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("states")
    return run_ranks(all_ways, GPUS, str(folder), timeout_s=280)


def test_numbers_are_those_without_offload(found):
    """The host and the device round an Adam step differently, by an ulp of the update each."""
    for of_rank in found:
        for name, (weights, _) in of_rank.items():
            expected, _ = of_rank[f"{name.rsplit(' ', 3 if 'params on' in name else 1)[0]} none"]
            bound = 1e-6 if "float32" in name else 2**-8
            for mine, theirs in zip(weights, expected, strict=True):
                assert float((mine.float() - theirs.float()).abs().max()) <= bound, name


def test_states_are_not_on_the_device(found):
    """Stage 2 keeps the parameters alone between steps, stage 3 with parameters away nothing."""
    slack = 2**21 + 8 * 1024 * LAYERS
    for of_rank in found:
        assert of_rank["torch.bfloat16 2 cpu"][1]["between"] <= 2 * NUMEL + slack
        assert of_rank["torch.bfloat16 2 nvme"][1]["between"] <= 2 * NUMEL + slack
        assert of_rank["torch.bfloat16 3 params"][1]["between"] <= slack
        assert of_rank["torch.bfloat16 3 params on nvme"][1]["between"] <= slack
        # A window of buckets: the one that is used, two ahead, and two whose gradients leave.
        bucket_nbytes = 2 * WIDTH * WIDTH
        assert of_rank["torch.bfloat16 3 params"][1]["most"] <= 8 * bucket_nbytes + slack
