"""A disk that is full: the save fails on all ranks, and costs nothing that was there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.valid import check_checkpoint, newest_valid
from tests.helpers.crash import RANKS, Wide, step_of
from tests.helpers.disks import small_disk
from tests.helpers.models import equal, trainer, weights
from tests.helpers.spawn import run_ranks

DISK_NBYTES = 11 * 2**20
"""Three checkpoints fit, of 3.2 MB each."""
STEPS = 8
FREE_NBYTES = (0, 100_000, 2_000_000, 3_100_000)
"""Room for not even a lock, a file, the part of one rank, all but the end."""
BALLAST = ".ballast"


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", DISK_NBYTES) as place:
        yield place


class Filling(Wide):
    """Leaves so much space on the disk before the second save, whose failure ends the fit."""

    def __init__(self, disk: Path | None = None, free_nbytes: int = 0) -> None:
        super().__init__()
        self.disk, self.free_nbytes = disk, free_nbytes

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 3 and self.disk is not None:
            self.trainer.strategy._form.finish()
            if self.global_rank == 0:
                fill(self.disk, self.free_nbytes)
            self.trainer.strategy.barrier()


def fill(disk: Path, free_nbytes: int) -> None:
    with (disk / BALLAST).open("wb") as file:
        file.truncate(0)
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - free_nbytes)


def fit(folder: Path, form: str, module: Wide, **options: Any) -> None:
    """Save every 2 steps and keep the newest alone."""
    keeper = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=2, monitor="step", mode="max", save_top_k=1
    )
    user = trainer(
        ZeroStrategy(3, checkpoint=form, timeout=20),
        RANKS,
        callbacks=[keeper],
        enable_checkpointing=True,
        max_epochs=-1,
        max_steps=STEPS,
    )
    user.fit(module, **options)


def fill_and_go_on(disk: Path) -> dict[Any, Any]:
    trainer(ZeroStrategy(3, timeout=20), RANKS, max_epochs=-1, max_steps=STEPS).fit(whole := Wide())
    found: dict[Any, Any] = {}
    for form in ("sharded", "consolidated"):
        for free_nbytes in FREE_NBYTES:
            folder = disk / form
            case: dict[str, Any] = {"error": "", "kind": ""}
            found[form, free_nbytes] = case
            try:
                fit(folder, form, Filling(disk, free_nbytes))
            except Exception as error:
                case["error"], case["kind"] = str(error), type(error).__name__
            torch.distributed.barrier()
            case["left"] = sorted(os.listdir(folder))
            case["used_nbytes"] = used_nbytes(disk)
            case["problems"] = [check_checkpoint(path) for path in folder.iterdir()]
            newest = newest_valid(folder)
            case["step"] = newest and step_of(newest)
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                (disk / BALLAST).unlink()
            torch.distributed.barrier()
            fit(folder, form, module := Wide(), ckpt_path=newest)
            torch.distributed.barrier()  # rank 0 removes what was replaced
            case["ends"] = equal(weights(module), weights(whole))
            case["after"] = sorted(os.listdir(folder))
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(folder)
            torch.distributed.barrier()
    return found


def used_nbytes(disk: Path) -> int:
    """Without the ballast."""
    usage = shutil.disk_usage(disk)
    return usage.used - (disk / BALLAST).stat().st_blocks * 512


def test_a_full_disk_costs_nothing_that_was_there(disk):
    ranks = run_ranks(fill_and_go_on, RANKS, disk)
    for found in ranks:
        for (form, free_nbytes), case in found.items():
            where = form, free_nbytes, case
            assert case["kind"] in ("RuntimeError", "OSError"), where
            assert "step=4.ckpt" in case["error"], where
            assert "disk is full" in case["error"], where
            assert case["left"] == ["step=2.ckpt"], where  # the one that was to be replaced
            assert case["problems"] == [""], where
            assert case["step"] == 2, where
            assert case["used_nbytes"] < 3_400_000, where  # of one checkpoint
            assert case["ends"], where
            # Lightning keeps the one that a run has resumed from.
            assert case["after"] == ["step=2.ckpt", "step=8.ckpt"], where
