"""What is offloaded has to fit into host memory: all ranks say so before any of it is taken."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.spawn import run_ranks

MIB = 2**20
NUMEL = 20 * 1000 * 1000


def made(room_mib: int, offload: dict[str, object]) -> tuple[str, int]:
    """What is said where only the last of two ranks has a limit; MiB that were taken by then."""
    dist.init_process_group("gloo")
    layers = [nn.utils.skip_init(nn.Linear, 1000, 1000, bias=False) for _ in range(20)]
    model = nn.Sequential(*layers).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = ShardGroups.create()
    groups.control.exchange_objects(None)  # threads are started, which take room, too
    before = taken_nbytes()
    if dist.get_rank() == 1:
        limit = before + room_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    options = ZeroOptions(stage=2, offload_optimizer=offload)
    try:
        ZeroEngine(model, [optimizer], options, groups, broadcast=False)
    except RuntimeError as error:
        return str(error), (taken_nbytes() - before) // MIB
    return "made", 0


def taken_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(
    ("room_mib", "offload", "is_enough"),
    [(130, {}, False), (130, {"ratio": 0.1}, True), (400, {}, True)],
)
def test_what_does_not_fit_is_an_error_before_it_is_taken(room_mib, offload, is_enough):
    """14 bytes for each of 10 million elements of a rank, and buffers: 0.14 GiB."""
    for rank, (message, taken_mib) in enumerate(run_ranks(made, 2, room_mib, offload)):
        if is_enough:
            assert message == "made"
            continue
        assert "does not fit into the memory of host" in message
        assert (
            "one of them would take 0.14 GiB, and 0.13 GiB are free until the limit" in message
        ), message
        assert f"Rank {rank} would take, in GiB: master weights 0.04, optimizer sta" in message
        assert "offload_optimizer={'ratio': 0.5}" in message
        assert taken_mib < 20
