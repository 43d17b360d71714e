"""Steps on the host, as hooks and later options of an optimizer see them. One rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions

OFFLOADS = {
    "none": {},
    "cpu": {"offload_optimizer": "cpu"},
    "half": {"offload_optimizer": {"ratio": 0.5}},
    "nvme": {"offload_optimizer": "nvme"},
}


def engine_of(tmp_path: Any, name: str, make: Any, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4))).to(dtype)
    optimizer = make(module)
    options = dict(OFFLOADS[name])
    if name == "nvme":
        options["nvme_path"] = tmp_path
    engine = ZeroEngine(
        module, [optimizer], ZeroOptions(stage=2, bucket_numel=90, **options), ShardGroups.create()
    )
    return module, optimizer, engine


def step(module: nn.Module, optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> None:
    optimizer.zero_grad()
    with engine.step_scope():
        batch = torch.ones(2, 9, dtype=next(module.parameters()).dtype)
        engine.backward(module(batch).float().pow(2).sum())
    engine.step(optimizer)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OFFLOADS)
def test_what_a_hook_writes_after_the_step_reaches_the_model(name, dtype, tmp_path):
    module, optimizer, engine = engine_of(tmp_path, name, adamw, dtype)

    def clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.detach().clamp_(-0.05, 0.05)

    optimizer.register_step_post_hook(clamp)
    for _ in range(2):
        step(module, optimizer, engine)
        largest = max(float(p.detach().abs().max()) for p in module.parameters())
        assert 0.04 < largest < 0.0502
    engine.close()


def test_states_that_no_file_has_room_for_are_an_error(tmp_path):
    module, optimizer, engine = engine_of(tmp_path, "nvme", adamw)
    step(module, optimizer, engine)
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()
    with pytest.raises(RuntimeError, match=r"'max_exp_avg_sq' of .* the file has no room"):
        step(module, optimizer, engine)
    engine.abandon()
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_while_parameters_are_written_is_an_error(tmp_path):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    options = ZeroOptions(
        stage=3, bucket_numel=90, offload_parameters="nvme", nvme_path=tmp_path / "made"
    )
    engine = ZeroEngine(module, [optimizer], options, ShardGroups.create())
    step(module, optimizer, engine)
    (file,) = tmp_path.glob("made/*/parameters")
    with file.open("r+") as opened:
        opened.truncate(4096)
    with pytest.raises(RuntimeError, match="somebody has cut or removed it"):
        step(module, optimizer, engine)
    engine.abandon()
    assert list((tmp_path / "made").iterdir()) == []
