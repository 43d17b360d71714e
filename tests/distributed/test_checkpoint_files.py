"""Checkpoints of one file through a Trainer: who writes, what fails, and loading while training."""

from __future__ import annotations

import os
import resource
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import nn

import lightning_zero.memory.spool
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.files import ZeroCheckpointIO
from lightning_zero.params.bucket import ParamStatus
from tests.distributed.test_checkpoint import Everything
from tests.helpers.models import Language, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (1, 2, 3)


def strategy(stage, **options):
    return ZeroStrategy(stage, bucket_numel=3000, timeout=30, **options)


def error_of(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


# Which plugin.


class Own(TorchCheckpointIO):
    """A user's."""


def test_ours_is_the_default_and_a_users_own_is_respected(tmp_path):
    own = Own()
    for given, outer, inner in (
        (None, ZeroCheckpointIO, None),
        (own, Own, None),
        (AsyncCheckpointIO(), AsyncCheckpointIO, ZeroCheckpointIO),
        (AsyncCheckpointIO(own), AsyncCheckpointIO, Own),
        (AsyncCheckpointIO(AsyncCheckpointIO()), AsyncCheckpointIO, AsyncCheckpointIO),
    ):
        by_plugin = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=ZeroStrategy(3),
            plugins=[] if given is None else [given],
            logger=False,
            enable_checkpointing=False,
        ).strategy
        for holder in (by_plugin, ZeroStrategy(3, checkpoint_io=given)):
            for _ in range(2):
                found = holder.checkpoint_io
                assert type(found) is outer
                assert given is None or found is given
                assert inner is None or type(found.checkpoint_io) is inner
    assert type(found.checkpoint_io.checkpoint_io) is ZeroCheckpointIO
    found = ZeroStrategy(3, checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    found.save_checkpoint({"epoch": 1}, tmp_path / "a.ckpt")
    found.teardown()
    assert found.load_checkpoint(tmp_path / "a.ckpt") == {"epoch": 1}


# Errors.


def fill(folder, spare_nbytes):
    """Leave so little space on a disk."""
    space = os.statvfs(folder)
    (Path(folder) / "fill").write_bytes(bytes(space.f_bavail * space.f_frsize - spare_nbytes))


def resume(path):
    trainer(strategy(3), 2).fit(Language(steps=2), ckpt_path=path)


def fail(folder, disk):
    path = f"{folder}/a.ckpt"
    user = trainer(strategy(3), 2)
    user.fit(Language(steps=2))
    user.save_checkpoint(path)
    before = Path(path).read_bytes()
    found = {}
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, resource.RLIM_INFINITY))
    found["limit"] = error_of(lambda: user.save_checkpoint(path))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    found["untouched"] = (Path(path).read_bytes() == before, os.listdir(folder))
    if disk is not None:
        user.save_checkpoint(f"{disk}/a.ckpt")
        if dist.get_rank() == 0:
            fill(disk, len(before) // 2)
        dist.barrier()
        found["disk"] = error_of(lambda: user.save_checkpoint(f"{disk}/a.ckpt"))
        is_same = Path(f"{disk}/a.ckpt").read_bytes() == before
        found["disk untouched"] = (is_same, sorted(os.listdir(disk)))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(path).write_bytes(before[: len(before) // 2])
    dist.barrier()
    found["cut off"] = error_of(lambda: resume(path))
    own = f"{folder}/{dist.get_rank()}.ckpt"  # what one rank cannot read, none has read
    Path(own).write_bytes(before if dist.get_rank() == 0 else b"")
    dist.barrier()
    found["one rank"] = error_of(lambda: resume(own))
    user.save_checkpoint(path)  # nobody is left waiting
    found["whole again"] = Path(path).read_bytes() == before
    return found


@pytest.fixture
def disk(tmp_path):
    """A disk of 4 MiB; None where none may be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True
    )
    yield folder if made.returncode == 0 else None
    if made.returncode == 0:
        subprocess.run(["umount", str(folder)], check=True)


def test_what_one_rank_cannot_write_or_read_is_an_error_on_all_of_them(disk, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    writer, other = run_ranks(fail, 2, str(folder), disk)
    for found in (writer, other):
        assert found["untouched"] == (True, ["a.ckpt"])
        assert found["whole again"]
        assert f"{folder}/a.ckpt is not whole" in found["cut off"][1]
    assert writer["limit"][0] == "OSError"
    assert "File too large, so this checkpoint was not written" in writer["limit"][1]
    assert f"{folder}/a.ckpt" in writer["limit"][1]
    assert other["limit"][0] == "RuntimeError"
    assert f"could not save the checkpoint {folder}/a.ckpt; rank 0: OSError" in other["limit"][1]
    assert "0.ckpt; rank 1: RuntimeError" in writer["one rank"][1]
    assert "1.ckpt is no checkpoint" in other["one rank"][1]
    if disk is None:
        pytest.skip("the rest needs to make a small disk")
    for found in (writer, other):
        assert found["disk untouched"] == (True, ["a.ckpt", "fill"])
        assert "the disk is full" in found["disk"][1]
    assert [writer["disk"][0], other["disk"][0]] == ["OSError", "RuntimeError"]


# Loading while training.


def other_weights(dtype, seed=3):
    """Values that no training has made."""
    generator = torch.Generator().manual_seed(seed)
    state = Language().state_dict()
    return {n: torch.randn(v.shape, generator=generator).to(dtype) for n, v in state.items()}


class Noting(nn.Linear):
    """Notes how much of a model is whole while it loads."""

    notes: list = []

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        assert self.weight.isfinite().all()  # a hook may look at what was loaded
        self.notes.append(whole_count(self))


def whole_count(module):
    buckets = Noting.engine.buckets
    return sum(not b.is_resident and b.status is not ParamStatus.NOT_AVAILABLE for b in buckets)


class Loading(Language):
    """Loads state dicts before its third batch, each after the other."""

    def __init__(self, *states, make_optimizer=lambda module: still(module), **options):
        super().__init__(make_optimizer, steps=4, **options)
        for layer in self.model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = Noting
        self.states, self.errors = states, []

    def on_train_batch_start(self, batch, index):
        if index != 2:
            return
        zero = self.trainer.strategy
        Noting.engine, Noting.notes = zero.engine, []
        for number, state in enumerate(self.states):
            with zero.full_params() if number == 2 else nullcontext():
                load = partial(zero.load_model_state_dict, {"state_dict": state})
                self.errors.append(error_of(partial(load, strict=self.strict_loading)))
            if number == 1:
                self.notes = Noting.notes[:]
        self.still_whole = whole_count(self)
        self.bucket_count = len(zero.engine.buckets)
        self.saved = zero.lightning_module_state_dict()
        self.states_saved = zero.optimizer_state(zero.optimizers[0])["state"]


def still(module):
    """An optimizer that moves nothing."""
    return torch.optim.AdamW(module.parameters(), lr=0.0)


def masters_of(module):
    """How many fp32 masters follow the weights that were loaded; on rank 0, which tells all."""
    count = 0
    if dist.get_rank() == 0:
        names = [name for name, _ in module.named_parameters()]
        for number, state in module.states_saved.items():
            master = state.get("master_weight")
            if master is not None:
                assert torch.equal(master.bfloat16(), module.saved[names[number]]), names[number]
                count += 1
    told = torch.tensor(count)
    dist.broadcast(told, 0)
    return int(told)


def load_while_training(folder):
    found = {}
    for stage in STAGES:
        for precision, dtype in (("32-true", torch.float32), ("bf16-true", torch.bfloat16)):
            new = other_weights(dtype)
            first = other_weights(dtype, seed=4)
            module = Loading(first, first, new)  # once more, and in a scope
            user = trainer(strategy(stage), 2, precision=precision, max_steps=3)
            user.fit(module)
            found[stage, precision] = {
                "errors": module.errors == [("none", "")] * 3,
                "kept by a step": equal(weights(module), new),
                "saved": equal(module.saved, new if dist.get_rank() == 0 else {}),
                "at a time": stage < 3
                or 1 <= max(module.notes) <= 3 < len(Noting.engine.table.masters),
                "gone after": module.still_whole == 0,
                "masters": masters_of(module)
                == (len(list(module.parameters())) if dtype.itemsize == 2 else 0),
            }
        names = list(new)
        wrong = {**other_weights(torch.float32), "more": torch.ones(1)}
        wrong.pop(names[-1])
        wrong[names[2]] = torch.ones(7, 7)
        module = Loading(wrong)
        trainer(strategy(stage), 2).fit(module)
        said = module.errors[0][1]
        found[stage, "wrong"] = {
            "said": [f'"{names[-1]}"' in said, '"more"' in said, f"{names[2]}: copying" in said],
            "goes on": len(module.losses) == 4 and module.still_whole == 0,
        }
        part = {name: other_weights(torch.float32)[name] for name in names[:3]}
        module = Loading(part)
        module.strict_loading = False
        trainer(strategy(stage), 2, max_steps=3).fit(module)
        after, before = weights(module), weights(Language())
        found[stage, "part"] = {
            "loaded": module.errors == [("none", "")],
            "values": equal(after, {**before, **part}),
        }
        module = Language(lambda module: torch.optim.AdamW(module.parameters(), lr=module.lr), 8)
        module.lr = 0.1
        user = trainer(strategy(stage), 2, default_root_dir=folder)
        tried = Tuner(user).lr_find(module, num_training=5, update_attr=False)
        found[stage, "lr_find"] = {
            "tried": len(tried.results["lr"]) == 5 and len(module.losses) == 5,
            "back": equal(weights(module), weights(Language())),
            "no file": os.listdir(folder) == [],
        }
    return found


def test_weights_are_loaded_into_a_model_that_trains(tmp_path):
    for found in run_ranks(load_while_training, 2, str(tmp_path)):
        assert len(found) == 5 * len(STAGES)
        for name, facts in found.items():
            assert all(all(f) if isinstance(f, list) else f for f in facts.values()), (name, facts)


# Scarce memory.


class Saving(Everything):
    """Saves at the end of its training."""

    def on_train_end(self):
        self.trainer.save_checkpoint(self.path)
        self.saved = self.trainer.strategy.lightning_module_state_dict()


def save_with_little_memory(folder):
    files = []
    for share in (0.5, 0.0):
        lightning_zero.memory.spool.MAX_SHARE = share
        for stage in (0, *STAGES):
            module = Saving()
            module.path = f"{folder}/{share}-{stage}.ckpt"
            trainer(strategy(stage), 2).fit(module)
            if dist.get_rank() == 0:
                assert module.saved["model.token.weight"] is module.saved["model.head.weight"]
            files.append(module.path)
    return files


def test_a_file_is_the_same_where_memory_is_scarce(tmp_path):
    names, _ = run_ranks(save_with_little_memory, 2, str(tmp_path))
    first, *others = [torch.load(name) for name in names]
    sizes = {Path(name).stat().st_size for name in names}
    assert max(sizes) - min(sizes) < 2**12
    for other in others:
        assert equal(other["state_dict"], first["state_dict"])
        states, expected = (c["optimizer_states"][0]["state"] for c in (other, first))
        assert states.keys() == expected.keys()
        assert all(equal(states[number], expected[number]) for number in states)
