"""Offload in bytes: what stays on the device, what the host holds, and what the host must have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.cli import main
from lightning_zero.host_room import host_need
from lightning_zero.memory.measure import ModelStateBytes
from lightning_zero.plan.memory import model_state_nbytes
from lightning_zero.shares import model_shares

WIDTH, LAYERS = 64, 8
NUMEL = LAYERS * WIDTH * WIDTH
CPU = torch.device("cpu")


def make_model(dtype):
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def options_of(stage, **offload):
    return ZeroOptions(stage=stage, bucket_numel=WIDTH * WIDTH, **offload)


@pytest.mark.parametrize(
    ("stage", "dtype", "offload", "device", "host"),
    [  # bytes per element: parameters, gradients, optimizer
        (2, "bfloat16", {"offload_optimizer": "cpu"}, (2, 0, 0), (0, 2, 12)),
        (1, "float32", {"offload_optimizer": "cpu"}, (4, 0, 0), (0, 4, 12)),
        (3, "bfloat16", {"offload_parameters": "cpu"}, (0, 0, 0), (2, 2, 12)),
        (3, "float32", {"offload_parameters": "cpu"}, (0, 0, 0), (4, 4, 8)),
        (2, "float32", {"offload_optimizer": {"ratio": 0.5}}, (4, 2, 4), (0, 2, 6)),
    ],
)
def test_what_is_offloaded_is_not_on_the_device(stage, dtype, offload, device, host):
    model = make_model(getattr(torch, dtype))
    optimizer = AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], options_of(stage, **offload), ShardGroups.create())
    engine.backward(model(torch.ones(1, WIDTH, dtype=getattr(torch, dtype))).sum())
    engine.step(optimizer)
    found = engine.measure()
    shares = model_shares(engine, [optimizer])
    engine.close()
    for states, expected in ((found, device), (found.host, host)):
        assert states is not None
        per_element = (
            states.parameters_nbytes / NUMEL,
            states.gradients_nbytes / NUMEL,
            states.optimizer_nbytes / NUMEL,
        )
        assert per_element == pytest.approx(expected, abs=0.01)
    on_host = sum(share.host_nbytes for share in shares.states)
    assert on_host == pytest.approx(sum(host) * NUMEL, rel=0.01)
    everywhere = sum(share.rank_nbytes for share in shares.states)
    assert everywhere == pytest.approx((sum(host) + sum(device)) * NUMEL, rel=0.01)
    assert "on host, MiB" in str(shares)
    if offload != {"offload_optimizer": {"ratio": 0.5}}:
        what = "params" if "offload_parameters" in offload else "cpu"
        expected = model_state_nbytes(NUMEL, stage, 1, dtype == "bfloat16", what)
        near = pytest.approx(expected.host.total_nbytes, rel=0.01)
        assert expected.total_nbytes == pytest.approx(found.total_nbytes, abs=100)
        assert found.host.total_nbytes == near
        need = host_need(model.parameters(), [optimizer], options_of(stage, **offload), 1, CPU)
        assert need.total_nbytes - need.buffers_nbytes == near


def test_parameters_on_the_host_leave_a_window_of_buckets_on_the_device():
    model = make_model(torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    window = {"max_live_numel": 2 * WIDTH * WIDTH, "prefetch_numel": WIDTH * WIDTH}
    options = options_of(3, offload_parameters="cpu", prefetch=window)
    engine = ZeroEngine(model, [optimizer], options, ShardGroups.create())
    live = []
    for layer in model:
        layer.register_forward_hook(
            lambda *_: live.append(engine.measure().parameters_nbytes / (4 * WIDTH * WIDTH))
        )
    for _ in range(2):
        engine.backward(model(torch.ones(1, WIDTH)).sum())
        engine.step(optimizer)
        optimizer.zero_grad()
    engine.close()
    assert len(live) == 2 * LAYERS
    assert 1 <= max(live) <= 3.01


def test_without_offload_nothing_is_on_the_host():
    model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    engine = ZeroEngine(model, [optimizer], options_of(2), ShardGroups.create())
    assert engine.measure().host is None
    assert "on host" not in str(model_shares(engine, [optimizer]))
    engine.close()


@pytest.mark.parametrize(
    ("stage", "mixed", "offload", "expected"),
    [
        (1, True, "cpu", ModelStateBytes(128, 0, 0, ModelStateBytes(0, 32, 192))),
        (2, True, "cpu", ModelStateBytes(128, 0, 0, ModelStateBytes(0, 32, 192))),
        (3, True, "cpu", ModelStateBytes(32, 0, 0, ModelStateBytes(0, 32, 192))),
        (3, True, "params", ModelStateBytes(0, 0, 0, ModelStateBytes(32, 32, 192))),
        (2, False, "cpu", ModelStateBytes(256, 0, 0, ModelStateBytes(0, 64, 192))),
        (3, False, "params", ModelStateBytes(0, 0, 0, ModelStateBytes(64, 64, 128))),
    ],
)
def test_formula_of_offloaded_states(stage, mixed, offload, expected):
    assert model_state_nbytes(64, stage, 4, mixed, offload) == expected


@pytest.mark.parametrize(("stage", "offload"), [(0, "cpu"), (0, "params"), (2, "params")])
def test_formula_of_a_stage_that_cannot_offload_is_refused(stage, offload):
    with pytest.raises(ValueError, match=f"stage {stage} cannot offload '{offload}'"):
        model_state_nbytes(64, stage, 4, True, offload)


def test_plan_tells_what_is_in_host_memory(capsys):
    common = ["plan", "--numel", "1073741824", "--world-size", "4", "--offload"]
    assert main([*common, "cpu"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    numbers = [[word for word in row if word != "│"] for row in rows]
    assert ["2", "2.000", "0.000", "0.000", "2.000", "3.500"] in numbers
    assert [row[0] for row in numbers if row[0].isdigit()] == ["1", "2", "3"]
    assert main([*common, "params"]) == 0
    assert "4.000" in capsys.readouterr().out


def test_page_locked_memory_is_counted_in_powers_of_two():
    with torch.device("meta"):
        model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    plain, pinned, unpinned = (
        host_need(
            model.parameters(),
            [optimizer],
            ZeroOptions(stage=2, bucket_numel=5000, offload_optimizer={"pin_memory": pin}),
            1,
            torch.device(device),
        )
        for device, pin in (("cpu", True), ("cuda", True), ("cuda", False))
    )
    assert pinned.gradients_nbytes == pytest.approx(plain.gradients_nbytes * 16384 / 10000)
    assert unpinned == plain
    assert pinned.masters_nbytes == plain.masters_nbytes == 4 * NUMEL  # stays on the host


@pytest.mark.parametrize(("dtype", "of_copy"), [(torch.bfloat16, 2), (torch.float32, 0)])
def test_steps_ahead_need_undo_records(dtype, of_copy):
    model = make_model(dtype)
    optimizer = AdamW(model.parameters())
    plain, ahead = (
        host_need(
            model.parameters(),
            [optimizer],
            options_of(2, offload_optimizer={"super_offload": is_super}),
            1,
            CPU,
        )
        for is_super in (False, True)
    )
    assert ahead.undo_nbytes == 12 * NUMEL
    assert ahead.total_nbytes - plain.total_nbytes == (12 + of_copy) * NUMEL
    assert "undo records" in str(ahead)


def test_files_need_a_window_of_buckets_alone():
    model = make_model(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    options = options_of(2, offload_optimizer="nvme", nvme_path="/")
    need = host_need(model.parameters(), [optimizer], options, 1, CPU)
    assert need.states_nbytes == 4 * WIDTH * WIDTH * 12
    assert need.masters_nbytes == 0
    assert need.gradients_nbytes == 2 * NUMEL
