"""Offload in a Trainer and in Fabric: losses, weights, checkpoints, averages and checks as without.

The host steps in torch's fused form where the user has chosen none, so optimizers here are fused;
native ops are left out, which may round otherwise.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_zero import ZeroEMA, ZeroStrategy, full_params
from lightning_zero.fabric import ZeroStrategy as FabricStrategy
from lightning_zero.ops.loader import CHOICE
from lightning_zero.plan.offload import NVME_PATH_VARIABLE
from tests.helpers.models import (
    Language,
    Tokens,
    equal,
    fused_adamw,
    sgd_momentum,
    trainer,
    weights,
)
from tests.helpers.spawn import run_ranks

CPU = {"offload_optimizer": "cpu"}
TWIN = {"offload_optimizer": {"ratio": 0.5}}
ALL = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
PLACES: tuple[tuple[int, dict[str, Any]], ...] = ((1, CPU), (2, TWIN), (3, ALL))
SAVED_AFTER, STEPS = 2, 4


class Scheduled(Language):
    """A schedule, and fused AdamW; may lose a step to an infinite loss on one rank."""

    def __init__(self, bad_index: int = -1, **options: Any) -> None:
        super().__init__(fused_adamw, **{"steps": STEPS, "with_scheduler": True, **options})
        self.bad_index = bad_index

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        is_bad = index == self.bad_index and self.global_rank == self.trainer.world_size - 1
        return loss * float("inf") if is_bad else loss


class Players(Language):
    """Two optimizers in manual optimization, one of which steps every other time."""

    def __init__(self) -> None:
        super().__init__(steps=STEPS)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [fused_adamw(self.model.blocks), fused_adamw(self.model.head)]

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers()[: 1 + index % 2]:
            self.toggle_optimizer(optimizer)
            loss = self.model(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def fit(
    strategy: ZeroStrategy, module: Language, *callbacks: Callback, path: Any = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a training on all ranks, of which all checkpoints are kept."""
    saves = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if "plugins" in options:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options["plugins"] = MixedPrecision("16-mixed", "cpu", scaler)
    run = trainer(strategy, world_size, callbacks=list(callbacks), **saves, **options)
    run.fit(module, ckpt_path=path)
    return module.losses, weights(module)


def zero(stage: int, **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage, bucket_numel=3000, timeout=30, **options)


def is_same(a: Any, b: Any) -> bool:
    return a[0] == b[0] and len(a[0]) > 0 and equal(a[1], b[1])


def fits() -> dict[Any, Any]:
    """Trainings with and without offload."""
    os.environ[CHOICE] = "reference"
    found: dict[Any, Any] = {}
    accumulated = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    for stage, places in PLACES:
        for name, make, options in (
            ("accumulated", Scheduled, accumulated),
            ("bf16-true", Scheduled, {"precision": "bf16-true", **accumulated}),
            ("16-mixed", lambda: Scheduled(bad_index=1), {"plugins": None}),
            ("two optimizers", Players, {}),
        ):
            expected = fit(zero(stage), make(), **options)
            found[stage, name] = is_same(expected, fit(zero(stage, **places), make(), **options))
        checked = zero(stage, self_check=2, **places)
        fit(checked, Scheduled(), **accumulated)
        report = checked.self_check_report
        found[stage, "self_check"] = report is not None and report.steps == 2 and not report.faults
        expected = fit(zero(stage), Scheduled(), ZeroEMA(0.75))
        found[stage, "average"] = is_same(
            expected, fit(zero(stage, **places), Scheduled(), ZeroEMA(0.75))
        )
    return found


def test_fits_end_in_the_same_numbers():
    for found in run_ranks(fits, 2):
        assert all(found.values()), found


def saved(folder: Path, name: str, strategy: ZeroStrategy) -> None:
    save = ModelCheckpoint(
        folder / name, filename="{step}", save_top_k=-1, every_n_train_steps=SAVED_AFTER
    )
    fit(strategy, Scheduled(), save, max_steps=SAVED_AFTER)


def written(folder: Path) -> None:
    os.environ[CHOICE] = "reference"
    saved(folder, "none", zero(2))
    saved(folder, "cpu", zero(1, **CPU))
    saved(folder, "all", zero(3, checkpoint="sharded", **ALL))


READERS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("none", 3, ALL),
    ("none", 2, TWIN),
    ("cpu", 2, {}),
    ("cpu", 3, ALL),
    ("all", 1, {}),
    ("all", 2, TWIN),
)


def resumed(folder: Path) -> dict[Any, bool]:
    """What goes on from a file equals what goes on from the same file without offload."""
    os.environ[CHOICE] = "reference"
    expected: dict[str, Any] = {}
    found = {}
    for name, stage, places in READERS:
        path = str(folder / name / f"step={SAVED_AFTER}.ckpt")
        if name not in expected:
            expected[name] = fit(zero(2), Scheduled(), path=path)
        found[name, stage, str(places)] = is_same(
            expected[name], fit(zero(stage, **places), Scheduled(), path=path)
        )
    found["alike"] = all(is_same(expected["none"], other) for other in expected.values())
    return found


def test_trainings_go_on_into_and_out_of_offload(tmp_path):
    run_ranks(written, 2, tmp_path)
    for world_size in (1, 2):
        for found in run_ranks(resumed, world_size, tmp_path):
            assert all(found.values()), (world_size, found)


def by_fabric(strategy: FabricStrategy) -> tuple[list[float], dict[str, torch.Tensor]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = Language().model
    model, optimizer = fabric.setup(module, fused_adamw(module))
    losses = []
    for batch in Tokens(fabric.global_rank, 3):
        loss = model(batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with full_params(model):
        return losses, weights(model)


def said(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if "offload" in str(w.message)]


def loops(folder: str) -> dict[Any, Any]:
    os.environ |= {CHOICE: "reference", NVME_PATH_VARIABLE: folder}
    found: dict[Any, Any] = {}
    for stage, places in PLACES:
        pair = [FabricStrategy(stage, bucket_numel=3000, **p) for p in ({}, places)]
        found["same", stage] = is_same(*map(by_fabric, pair))
    sgd = {"make_optimizer": sgd_momentum, "steps": 1}
    options = {"cpu": CPU, "all": ALL, "nvme": {"offload_optimizer": "nvme"}, "none": {}}
    found["said"] = {
        name: said(lambda p=places: fit(zero(3, **p), Language(**sgd)))
        for name, places in options.items()
    }
    found["said"]["fabric"] = said(lambda: by_fabric(FabricStrategy(2, **CPU)))
    return found


@pytest.fixture(scope="module")
def of_loops(tmp_path_factory):
    return run_ranks(loops, 2, str(tmp_path_factory.mktemp("states")))


def test_fabric_ends_in_the_same_numbers(of_loops):
    for found in of_loops:
        assert all(found["same", stage] for stage, _ in PLACES), found


def test_a_model_on_the_cpu_is_told_once_that_nothing_is_saved(of_loops):
    of_rank_0, of_rank_1 = (found["said"] for found in of_loops)
    assert not any(of_rank_1.values())
    for name, subject in (
        ("cpu", "offload_optimizer has"),
        ("all", "offload_optimizer and offload_parameters has"),
        ("fabric", "offload_optimizer has"),
    ):
        (message,) = of_rank_0[name]
        assert message.startswith(f"{subject} no effect on a model on the CPU but copies"), name
    assert not of_rank_0["none"]
    assert not of_rank_0["nvme"]
