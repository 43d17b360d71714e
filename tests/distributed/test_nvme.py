"""States in files: the same numbers as in memory, less memory, and errors on all ranks."""

from __future__ import annotations

import copy
import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from tests.helpers.disks import small_disk
from tests.helpers.spawn import RankError, run_ranks, try_ranks

STEPS = 3
WIDTH = 37


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers.append(nn.Linear(WIDTH, 211))  # larger than any bucket
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))).to(dtype)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    first, *rest = module.parameters()
    groups = [{"params": [first], "lr": 1e-2, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}]
    return torch.optim.AdamW(groups, fused=True)


def groups_of_all_ranks() -> ShardGroups:
    if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=30))
    assert groups.world_size == int(os.environ.get("WORLD_SIZE", "1"))
    return groups


class Run:
    """A bare loop with clipping and accumulation."""

    def __init__(self, stage: int, dtype: torch.dtype, make: Any = adamw, **options: Any) -> None:
        self.module = model(dtype)
        self.dtype = dtype
        self.optimizer = make(self.module)
        groups = groups_of_all_ranks()
        options = {"bucket_numel": 1500, **options}
        self.engine = ZeroEngine(
            self.module, [self.optimizer], ZeroOptions(stage=stage, **options), groups
        )
        self.rank = groups.rank
        self.data = torch.Generator().manual_seed(7)

    def train(self, steps: int = STEPS) -> Run:
        for _ in range(steps):
            for _ in range(2):
                batch = torch.randn(4, 3, WIDTH, generator=self.data)[self.rank].to(self.dtype)
                with self.engine.step_scope():
                    self.engine.backward(self.module(batch).float().pow(2).mean())
            self.engine.clip_grad_norm_(self.optimizer, 0.05)
            self.engine.step(self.optimizer)
            self.optimizer.zero_grad()
        return self

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        with self.engine.full_params():
            weights = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        return weights, self.engine.optimizer_state_dict(self.optimizer)

    def end(self) -> tuple[dict[str, Any], dict[str, Any]]:
        found = self.result()
        self.engine.close()
        return found


def flat(found: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order of their keys."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        return [t for key in sorted(found, key=str) for t in flat(found[key])]
    return [t for each in found for t in flat(each)] if isinstance(found, (list, tuple)) else []


def is_same(a: Any, b: Any) -> bool:
    tensors = flat(a), flat(b)
    return len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))


def options_of(stage: int, device: str, folder: str | None) -> dict[str, dict[str, Any]]:
    """Ways to offload to a device."""
    some = {"device": device, "ratio": 0.5, "nvme_path": folder, "buffer_count": 2}
    every: dict[str, dict[str, Any]] = {
        "states": {"offload_optimizer": device, "nvme_path": folder},
        "some of the states": {"offload_optimizer": some},
    }
    if stage == 3:
        parameters = {"offload_parameters": device, "nvme_path": folder}
        every["parameters"] = parameters
        every["both"] = {"offload_optimizer": device, **parameters}
        every["both, gathered together"] = {"gather_by": "collective", **every["both"]}
    return every


def states_in(folder: str) -> dict[str, Any]:
    return options_of(2, "nvme", folder)["states"]


def same_numbers(folder: str, ranks: int) -> list[str]:
    """Everything that differs from the run that keeps in memory what is in files here.

    One half of the ways on two ranks, the other half on one and three: each stage, dtype and kind
    of offload is in both.
    """
    wrong = []
    fp32, bf16 = torch.float32, torch.bfloat16
    ways = [
        (stage, dtype, name, options)
        for stage, dtype in ((1, fp32), (2, bf16), (3, fp32), (3, bf16))
        for name, options in options_of(stage, "nvme", folder).items()
    ]
    for stage, dtype, name, options in ways[ranks % 2 :: 2]:
        in_memory = options_of(stage, "cpu", None)[name]
        expected = Run(stage, dtype, **in_memory).train().end()
        if not is_same(Run(stage, dtype, **options).train().end(), expected):
            wrong.append(f"stage {stage}, {dtype}, {name}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_files_change_no_number_and_are_gone_afterwards(ranks, tmp_path):
    assert run_ranks(same_numbers, ranks, str(tmp_path), ranks) == [[]] * ranks
    assert list(tmp_path.iterdir()) == []


def goes_on(folder: str) -> list[str]:
    """State goes from files into memory and back, also by way of what users do between steps."""
    wrong = []
    kinds = {"memory": {"offload_optimizer": "cpu"}, "files": states_in(folder)}
    for name, make in {
        "adamw": adamw,
        "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
        "plain sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
        "nadam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    }.items():
        stage = 2 if name == "nadam" else 3
        begun = {kind: begin(stage, make, options) for kind, options in kinds.items()}
        expected = resume(stage, make, kinds["memory"], begun["memory"])
        for first, second in (("files", "memory"), ("memory", "files"), ("files", "files")):
            if not is_same(resume(stage, make, kinds[second], begun[first]), expected):
                wrong.append(f"{name}, stage {stage}, {first} to {second}")
    return wrong


def begin(stage: int, make: Any, options: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """Weights, states, and where the data is, after two steps."""
    run = Run(stage, torch.bfloat16, make, **options).train(2)
    weights, state = run.result()
    data = run.data.get_state()
    state = run.engine.groups.control.exchange_objects(state)[0]
    run.engine.close()
    return weights, state, data


def resume(stage: int, make: Any, options: dict[str, Any], begun: Any) -> Any:
    weights, state, data = copy.deepcopy(begun)
    after = Run(stage, torch.bfloat16, make, **options).train(1)
    with after.engine.loading():
        after.module.load_state_dict(weights)
    after.engine.load_optimizer_state_dict(after.optimizer, state)
    after.data.set_state(data)
    after.train(2)
    with after.engine.full_params(writeback=True), torch.no_grad():
        next(after.module.parameters()).mul_(0.5)
    return after.train(2).end()


def test_states_go_into_files_and_out_of_them(tmp_path):
    assert run_ranks(goes_on, 2, str(tmp_path)) == [[], []]


# Disks that fail.


def breaks(folder: str) -> str:
    run = Run(2, torch.float32, **states_in(folder)).train(2)
    before = run.result()[0]
    if run.rank == 1:
        (file,) = Path(folder).glob("*rank1*/states")
        os.truncate(file, 4096)
    try:
        run.train(1)
    except RuntimeError as error:
        told = str(error)
    run.engine.abandon()
    weights = [p.detach() for p in run.module.parameters()]
    is_whole = all(bool(w.isfinite().all()) for w in weights)
    moved = max(float((w - b).abs().max()) for w, b in zip(weights, before.values(), strict=True))
    return f"{told} whole={is_whole} moved={moved < 0.1}"


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(tmp_path):
    first, second = run_ranks(breaks, 2, str(tmp_path))
    assert "other ranks could not step with states in files: rank 1: RuntimeError" in first
    assert "somebody has cut or removed it" in second
    for told in (first, second):
        assert told.endswith("whole=True moved=True")
        assert "resumed from its last checkpoint" in told
    assert list(tmp_path.iterdir()) == []


def fills(folder: str, other: str) -> None:
    rank = int(os.environ["RANK"])
    place = folder if rank == 1 else other
    Run(3, torch.float32, **states_in(place))


def test_a_disk_that_is_too_small_is_an_error_on_all_ranks_before_training(tmp_path):
    with small_disk(tmp_path / "disk", 40_000) as disk:
        (tmp_path / "other").mkdir()
        outcomes = try_ranks(fills, 2, str(disk), str(tmp_path / "other"))
    assert all(isinstance(outcome, RankError) for outcome in outcomes)
    assert "other ranks could not write states: rank 1" in outcomes[0].message
    assert "the disk is full" in outcomes[1].message
    assert "bytes are needed" in outcomes[1].message


class NotApart(torch.optim.SGD):
    """Has to see all parameters at once."""

    def step(self, closure: Any = None) -> Any:
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = sum(p.grad.pow(2).sum() for p in parameters).sqrt()
        for parameter in parameters:
            parameter.grad.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "says"),
    [(NotApart, "all parameters at once"), (torch.optim.Adafactor, "states of other shapes")],
)
def test_optimizers_that_cannot_be_streamed_are_refused(kind, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        Run(
            2,
            torch.float32,
            lambda module: kind(module.parameters(), lr=0.1),
            **states_in(str(tmp_path)),
        )
    assert list(tmp_path.iterdir()) == []


# Memory.

NUMEL = 2**24
"""Elements of a model whose AdamW keeps 192 MiB of states, with fp32 masters."""
ROOM_NBYTES = 230 * 2**20
"""For parameters, gradients and their buffers at once, 32 MiB each, and the window."""


def small_room(folder: str | None) -> list[float]:
    options = {"offload_optimizer": "nvme", "nvme_path": folder} if folder else {}
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(NUMEL // 2**20)))
    module.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    if folder != "":
        taken = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (taken + ROOM_NBYTES, resource.RLIM_INFINITY))
    engine = ZeroEngine(
        module,
        [optimizer],
        ZeroOptions(stage=2, bucket_numel=2**20, **options),
        ShardGroups.create(),
    )
    losses = []
    for _ in range(3):
        with engine.step_scope():
            loss = module(torch.ones(1, 1024, dtype=torch.bfloat16)).float().pow(2).sum()
            engine.backward(loss)
        engine.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_states_that_do_not_fit_into_memory_are_trained(tmp_path):
    (expected,) = run_ranks(small_room, 1, "")
    (limited,) = try_ranks(small_room, 1, None)
    assert isinstance(limited, RankError)
    assert "memory" in limited.message
    assert run_ranks(small_room, 1, str(tmp_path)) == [expected]


# As users see it.


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, WIDTH), batch_size=2)


def test_a_fit_leaves_no_file_and_can_still_be_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ZERO_NVME_PATH", str(tmp_path / "states"))
    found = []
    for strategy in ("zero_stage_3_nvme", "zero_stage_3_offload"):
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=2,
            gradient_clip_val=0.1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(1)
        trainer.fit(Net())
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        found.append(torch.load(tmp_path / "last.ckpt", weights_only=True))
    assert list((tmp_path / "states").iterdir()) == []
    assert is_same(found[0]["state_dict"], found[1]["state_dict"])
    assert is_same(found[0]["optimizer_states"], found[1]["optimizer_states"])
