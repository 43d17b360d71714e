"""Options of offloading: what is accepted in which form, what is refused how, the ratio."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero import OffloadConfig, ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.plan.layout import ParameterSpec, plan_buckets
from lightning_zero.plan.offload import NVME_PATH_VARIABLE, OffloadPlan, hosted


@pytest.fixture(autouse=True)
def no_usual_folder(monkeypatch):
    monkeypatch.delenv(NVME_PATH_VARIABLE, raising=False)


def test_nothing_is_offloaded_unless_it_is_asked_for():
    assert ZeroOptions().offload == OffloadPlan(None, None)


@pytest.mark.parametrize(
    "value", ["cpu", {"device": "cpu"}, {}, OffloadConfig(), OffloadConfig(device="cpu")]
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_form_says_the_same(value, stage):
    found = ZeroOptions(stage=stage, offload_optimizer=value).offload
    assert found == OffloadPlan(OffloadConfig(), None)


def test_the_optimizer_follows_its_parameters_unless_something_is_said_about_it():
    found = ZeroOptions(offload_parameters={"pin_memory": False}).offload
    assert found.parameters == found.optimizer == OffloadConfig(pin_memory=False)
    found = ZeroOptions(offload_parameters="cpu", offload_optimizer={"ratio": 0.5}).offload
    assert found == OffloadPlan(OffloadConfig(ratio=0.5), OffloadConfig())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "disk"}, "offloaded to 'cpu' or 'nvme', got 'disk'"),
        ({"ratio": 0}, "above 0 and at most 1, got 0; to offload nothing, leave the option out"),
        ({"ratio": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"ratio": "0.5"}, "above 0 and at most 1, got '0.5'"),
        ({"ratio": True}, "above 0 and at most 1, got True"),
        ({"ratio": float("nan")}, "above 0 and at most 1, got nan"),
        ({"pin_memory": 1}, "pin_memory must be True or False, got 1"),
        ({"buffer_count": 1}, "buffer_count must be at least 2, got 1"),
        ({"buffer_count": 2.0}, "buffer_count must be at least 2, got 2.0"),
        ({"buffer_count": True}, "buffer_count must be at least 2, got True"),
        ({"nvme_path": "/scratch"}, "nvme_path='/scratch' has no effect where .* 'cpu': remove it"),
        ({"super_offload": 1}, "super_offload must be True or False, got 1"),
        ({"super_offload": True, "device": "nvme"}, "device='nvme' keeps states in files"),
        ({"cpuadam_cores_perc": 0.5}, "has no effect without super_offload"),
        ({"super_offload": True, "cpuadam_cores_perc": 0}, "above 0 and at most 1, got 0"),
        ({"super_offload": True, "cpuadam_cores_perc": 1.1}, "above 0 and at most 1, got 1.1"),
        ({"super_offload": True, "cpuadam_cores_perc": True}, "above 0 and at most 1, got True"),
    ],
)
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_parameters"])
def test_a_value_that_cannot_work_is_refused(name, options, words):
    with pytest.raises(ValueError, match=words):
        OffloadConfig(**options)
    with pytest.raises(ValueError, match=f"{name}: .*{words}"):
        ZeroOptions(**{name: options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload_optimizer": "gpu"}, "offload_optimizer: .*'cpu' or 'nvme', got 'gpu'"),
        ({"offload_optimizer": True}, "offload_optimizer must be 'cpu', 'nvme', None, .* got True"),
        ({"offload_parameters": 3}, "offload_parameters must be 'cpu', .* got 3"),
        ({"offload_optimizer": {"rate": 1}}, "offload_optimizer has no option 'rate'; it has"),
        ({"offload_parameters": {"ratio": 0.5}}, "ratio=0.5 has no effect in offload_parameters"),
        ({"offload_optimizer": "cpu", "stage": 0}, "offload_optimizer needs stage 1, 2 or 3"),
        (
            {"offload_parameters": "cpu", "stage": 2},
            "offload_parameters needs stage 3, got stage 2",
        ),
        (
            {"offload_optimizer": "cpu", "master_weights": False},
            "master_weights=False has no effect with offload_optimizer",
        ),
        ({"nvme_path": "/scratch"}, "nvme_path='/scratch' has no effect: nothing is offloaded"),
        ({"nvme_path": "/scratch", "offload_optimizer": "cpu"}, "nvme_path='/scratch' has no eff"),
        ({"offload_optimizer": "nvme"}, f"offload_optimizer='nvme' needs .*{NVME_PATH_VARIABLE}"),
        ({"offload_parameters": "nvme"}, "offload_parameters='nvme' needs to know where"),
    ],
)
def test_what_has_no_effect_or_lacks_something_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ZeroOptions(**options)


def test_the_folder_is_the_own_one_the_common_one_or_that_of_the_environment(monkeypatch):
    monkeypatch.setenv(NVME_PATH_VARIABLE, "/usual")
    own = {"device": "nvme", "nvme_path": "/own"}
    for said, common, expected in (
        (own, "/common", "/own"),
        ("nvme", "/common", "/common"),
        ("nvme", None, "/usual"),
    ):
        plan = ZeroOptions(offload_optimizer=said, nvme_path=common).offload
        assert plan.optimizer is not None
        assert plan.optimizer.folder == Path(expected)
    plan = ZeroOptions(offload_optimizer="nvme", offload_parameters="nvme").offload
    assert plan.optimizer == plan.parameters
    # The environment says where, not that: nothing is offloaded for it.
    assert ZeroOptions(offload_optimizer="cpu").offload.optimizer == OffloadConfig()


@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("numels", [[100] * 12, [7, 400, 30, 30, 200, 100], [5], [1000, 1]])
def test_ratio_is_met_up_to_half_a_bucket(numels, ratio):
    chosen = hosted(numels, ratio)
    share = sum(n for n, here in zip(numels, chosen, strict=True) if here)
    assert any(chosen)
    if ratio == 1.0:
        assert all(chosen)
    is_smallest = sum(chosen) == 1 and share == min(numels)
    assert abs(share - ratio * sum(numels)) <= max(numels) / 2 or is_smallest


def test_no_bucket_is_no_choice():
    assert hosted([], 0.5) == []


def test_the_choice_is_the_same_on_all_ranks():
    """It is made from the plan of the buckets alone, in which all ranks agree."""
    kind = (torch.float32, torch.device("cpu"), True, False)
    specs = [ParameterSpec(f"p{i}", (n,), (1,), kind, i) for i, n in enumerate((900, 90, 401, 7))]
    layouts = plan_buckets(
        specs, world_size=3, bucket_numel=500, align_numel=16, shard_by="element"
    )
    numels = [layout.padded_numel for layout in layouts]
    assert len(layouts) > 1
    for layout in layouts:
        assert {layout.shard_range(rank)[1] - layout.shard_range(rank)[0] for rank in range(3)} == {
            layout.shard_numel
        }
    assert 0 < sum(hosted(numels, 0.5)) < len(numels)


@pytest.mark.parametrize("ratio", [0.3, 0.6, 1.0])
def test_the_engine_steps_that_share_on_the_host(ratio):
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    options = ZeroOptions(stage=2, bucket_numel=400, offload_optimizer={"ratio": ratio})
    engine = ZeroEngine(model, [optimizer], options, ShardGroups.create())
    masters = engine.table.masters
    here = sum(m.tensor.numel() for m in masters if m.is_on_host)
    assert here / sum(m.tensor.numel() for m in masters) == pytest.approx(ratio, abs=0.05)
    engine.close()


AHEAD = {"super_offload": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 1, "offload_optimizer": AHEAD}, "super_offload needs stage 2 or 3, got stage 1"),
        ({"stage": 2, "offload_optimizer": AHEAD, "zenflow": {}}, "choose one of them"),
        ({"stage": 3, "offload_parameters": AHEAD}, "belongs to offload_optimizer"),
        (
            {
                "stage": 3,
                "offload_optimizer": AHEAD,
                "offload_parameters": {"device": "nvme", "nvme_path": "/scratch"},
            },
            "offload_parameters='nvme' keeps parameters in files",
        ),
    ],
)
def test_steps_ahead_need_states_in_host_memory(options, words):
    with pytest.raises(ValueError, match=words):
        ZeroOptions(**options)


@pytest.mark.parametrize(
    ("make", "dtype", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), torch.float32, "cannot do so for SGD: use"),
        (lambda p: type("Mine", (torch.optim.AdamW,), {})(p), torch.float32, "so for Mine: use"),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            torch.float32,
            r"does not know Adam\(amsgrad=True\)",
        ),
        (torch.optim.AdamW, torch.float64, "AdamW has parameters of fp64: train in fp32"),
    ],
)
def test_steps_ahead_are_those_of_adam(make, dtype, words):
    net = nn.Linear(3, 3, dtype=dtype)
    options = ZeroOptions(stage=2, offload_optimizer=AHEAD)
    with pytest.raises(ValueError, match=words):
        ZeroEngine(net, [make(net.parameters())], options, ShardGroups.create())
