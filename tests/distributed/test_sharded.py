"""Sharded checkpoints: a folder that all ranks write, and any stage and number of ranks reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ShardGroups
from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.stored import Part, StoredTensor
from lightning_zero.cli import main
from tests.distributed.test_checkpoint import BATCHES, EPOCHS, Everything, trainer
from tests.helpers.models import difference, equal, weights
from tests.helpers.spawn import run_ranks

KINDS = ("zero0", "zero1", "zero2", "zero3")


def sharded_trainer(kind: str, **options: Any) -> Any:
    return trainer(kind, strategy_options={"checkpoint": "sharded"}, **options)


def save_all(folder: Path) -> dict[str, Any]:
    """Save half a training at every stage, while it runs and after it."""
    for kind in KINDS:
        keeper = ModelCheckpoint(folder / kind, filename="half", save_top_k=-1)
        user = sharded_trainer(kind, callbacks=[keeper], enable_checkpointing=True)
        user.fit(module := Everything())
        user.save_checkpoint(folder / kind / "after.ckpt")
        one = trainer(kind)
        one.fit(again := Everything())
        one.save_checkpoint(folder / kind / "one.ckpt")
        assert equal(weights(module), weights(again))
    return {}


def resume_all(folder: Path) -> dict[Any, Any]:
    """Continue from each of them, at every stage; DDP from the consolidated files.

    Each rank has data of its own, so with another number of ranks the equal is DDP, resumed from
    the ordinary file.
    """
    is_same = int(os.environ["WORLD_SIZE"]) == 2
    path = None if is_same else folder / "zero1" / "one.ckpt"
    trainer("ddp", max_epochs=EPOCHS).fit(expected := Everything(), ckpt_path=path)
    found: dict[Any, Any] = {"losses": expected.losses[-BATCHES:]}
    for saved in KINDS:
        for reader in (*KINDS, "ddp"):
            name = "half.ckpt" if reader != "ddp" else "consolidated.ckpt"
            user = trainer(reader, max_epochs=EPOCHS)
            user.fit(module := Everything(), ckpt_path=folder / saved / name)
            gap = difference(weights(module), weights(expected))
            found[saved, reader] = gap, module.losses
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    run_ranks(save_all, 2, path)
    for kind in KINDS:
        assert (
            main(["consolidate", f"{path}/{kind}/half.ckpt", f"{path}/{kind}/consolidated.ckpt"])
            == 0
        )
    return path


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resumes_everywhere(folder, ranks):
    for found in run_ranks(resume_all, ranks, folder):
        losses = found.pop("losses")
        for case, (gap, own) in found.items():
            assert gap <= (0 if ranks == 2 else 2e-6), (case, gap)
            if ranks == 2:
                assert own == losses, case


@pytest.mark.parametrize("kind", KINDS)
def test_consolidated_file_equals_the_one_written_directly(folder, kind):
    for name in ("half", "after"):
        main(["consolidate", f"{folder}/{kind}/{name}.ckpt", f"{folder}/{kind}/{name}.one"])
        mine = torch.load(folder / kind / f"{name}.one", weights_only=True)
        other = torch.load(folder / kind / "one.ckpt", weights_only=True)
        assert list(mine["state_dict"]) == list(other["state_dict"])
        assert equal(mine["state_dict"], other["state_dict"])
        (mine,), (other,) = mine["optimizer_states"], other["optimizer_states"]
        assert mine["param_groups"] == other["param_groups"]
        assert mine["param_names"] == other["param_names"]
        assert mine["state"].keys() == other["state"].keys()
        for number, state in other["state"].items():
            assert state.keys() == mine["state"][number].keys()
            for key, value in state.items():
                assert torch.equal(value, mine["state"][number][key]), (number, key)
                assert value.stride() == mine["state"][number][key].stride()


def save_apart(folder: Path) -> str:
    """Each rank writes to a folder of its own, as on hosts that share no storage."""
    user = sharded_trainer("zero1", max_steps=1)
    user.fit(Everything())
    mine = folder / f"host{user.global_rank}"
    mine.mkdir()
    tensor = StoredTensor("a", torch.Size([4]), (1,), torch.float32)
    parts = [Part(tensor, 2 * user.global_rank, torch.ones(2))]
    group = ShardGroups.create().background()
    try:
        sharded.write(mine / "x.ckpt", mine / ".x.part", parts, sharded.snapshot({}), group)
    except RuntimeError as error:
        return str(error)
    return "none"


def test_ranks_that_share_no_storage_are_told_before_a_checkpoint_is_called_complete(tmp_path):
    for message in run_ranks(save_apart, 2, tmp_path):
        assert "rank 0 does not see what rank(s) [1] wrote" in message
    assert not any((tmp_path / f"host{rank}" / "x.ckpt").exists() for rank in range(2))
