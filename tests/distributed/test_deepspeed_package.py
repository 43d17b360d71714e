"""Checkpoints of the DeepSpeed package itself, and ranks of ours that go on from one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.deepspeed import import_deepspeed, read_deepspeed
from tests.helpers.deepspeed_folders import Layout, Odd, batches_of, trained
from tests.helpers.models import trainer
from tests.helpers.spawn import run_ranks

RANKS, STEPS = 2, 3
BF16 = {"bf16": {"enabled": True}}
RUNS = {
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 3": {"zero_optimization": {"stage": 3}},
    "sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 8}},
    "dealt out": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "aligned": {"zero_optimization": {"stage": 1, "parameter_alignment": True}},
    "bf16 stage 2": {"zero_optimization": {"stage": 2}, **BF16},
    "bf16 stage 3": {"zero_optimization": {"stage": 3}, **BF16},
    "bf16 optimizer": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
    "old file format": {
        "zero_optimization": {"stage": 2},
        "checkpoint": {"serialization": False},
    },
}


def train_with_deepspeed(folder, runs):
    """Train and save with DeepSpeed; gives fp32 weights of each run, as DeepSpeed tells them."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(RANKS))
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    rank = int(os.environ["RANK"])
    found = {}
    for name, config in runs.items():
        module = Odd(with_scalar=False)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=module.configure_optimizers(),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
                "steps_per_print": 10**9,
                **config,
            },
        )
        for tokens in batches_of(rank, STEPS):
            engine.backward(engine(tokens))
            engine.step()
        engine.save_checkpoint(f"{folder}/{name}", client_state={"mine": {"a": 1}})
        weights = {}
        for key, parameter in module.named_parameters():
            full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            if full is not None:
                weights[key] = full.detach().clone()
        found[name] = weights
        engine.destroy()
    dist.barrier()
    return found


def train_with_torch():
    """The same in plain torch on all ranks; whole values of the model and the optimizer."""
    modules = [Odd(with_scalar=False) for _ in range(RANKS)]
    optimizers = [module.configure_optimizers() for module in modules]
    for tokens in zip(*(batches_of(rank, STEPS) for rank in range(RANKS)), strict=True):
        for module, optimizer, batch in zip(modules, optimizers, tokens, strict=True):
            optimizer.zero_grad()
            module(batch).backward()
        for parameters in zip(*(module.parameters() for module in modules), strict=True):
            if parameters[0].requires_grad:
                mean = sum(parameter.grad / RANKS for parameter in parameters)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return modules[0], optimizers[0]


def test_every_value_that_the_package_writes_is_read(tmp_path):
    pytest.importorskip("deepspeed")
    told = run_ranks(train_with_deepspeed, RANKS, str(tmp_path), RUNS)[0]
    module, optimizer = train_with_torch()
    names = {parameter: name for name, parameter in module.named_parameters()}
    for run, config in RUNS.items():
        found = read_deepspeed(tmp_path / run)
        state = found["state_dict"]
        assert list(state) == list(module.state_dict()), run
        assert state["head.weight"] is state["token.weight"], run
        assert len(told[run]) == 7, run
        if run != "dealt out":  # where DeepSpeed tells the values of other parameters
            for name, value in told[run].items():
                assert torch.equal(state[name], value), (run, name)
        [own] = found["optimizer_states"]
        assert own["param_names"] == [
            [names[p] for p in group["params"]] for group in optimizer.param_groups
        ], run
        assert (found["global_step"], found["mine"]) == (STEPS, {"a": 1})
        is_exact = "bf16" not in config
        bounds = {"rtol": 0, "atol": 0.0 if is_exact else 0.03}
        for name, value in module.state_dict().items():
            if is_exact or not name.startswith("still."):
                torch.testing.assert_close(state[name], value, **bounds, msg=f"{run}: {name}")
        for number, states in optimizer.state_dict()["state"].items():
            for key, value in states.items():
                torch.testing.assert_close(
                    own["state"][number][key], value, **bounds, msg=f"{run}: {number} {key}"
                )


def go_on(path, stage):
    module = Odd(batches=2)
    user = trainer(ZeroStrategy(stage=stage), RANKS)
    user.fit(module, ckpt_path=path)
    user.save_checkpoint(f"{path}.{stage}")
    return module.lowest_step, user.global_step


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_ours_go_on_from_an_import(stage, tmp_path):
    module, optimizer = trained(STEPS)
    Layout(3, 3).write(tmp_path / "run", module, optimizer)
    path = tmp_path / "one.ckpt"
    import_deepspeed(tmp_path / "run", path)
    assert run_ranks(go_on, RANKS, str(path), stage) == [(3, 5)] * RANKS
