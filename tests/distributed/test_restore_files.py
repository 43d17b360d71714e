"""Sharded checkpoints under the names that Lightning gives and looks for, and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_zero.checkpoint import sharded
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.folders import PART, stem
from lightning_zero.checkpoint.planners import read_metadata
from lightning_zero.cli import main
from tests.helpers.layered import Layers, check_outcome, error_of, outcomes, resumed, saved, user_of
from tests.helpers.models import equal, weights
from tests.helpers.spawn import run_ranks

STAGES = (1, 3)
SHARDED = {"checkpoint": "sharded"}


def rank() -> int:
    return torch.distributed.get_rank()


def on_first(call: Any, *args: Any) -> None:
    """Call on rank 0 while the others wait."""
    if rank() == 0:
        call(*args)
    torch.distributed.barrier()


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        consolidate(path, one := Path(folder) / "one.ckpt")
        state: dict[str, torch.Tensor] = torch.load(one)["state_dict"]
    return state


# Names.


class Scored(Layers):
    """Its second epoch is the best one."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("score", torch.tensor([3.0, 1.0, 2.0, 5.0][self.trainer.current_epoch]))

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("nothing", 0.0)

    test_dataloader = Layers.val_dataloader


def run(stage: int, place: Path, save_last: Any, epochs: int, **options: Any) -> Any:
    keeper = ModelCheckpoint(
        place, "{epoch}", "score", save_top_k=2, save_last=save_last, mode="min", every_n_epochs=1
    )
    return user_of(
        stage,
        SHARDED,
        callbacks=[keeper],
        enable_checkpointing=True,
        limit_val_batches=1,
        max_epochs=epochs,
        default_root_dir=place,
        **options,
    )


def best_last_and_the_two_that_are_kept(folder):
    """ModelCheckpoint's own files, one of which is removed, and a last one that is a link."""
    ends = []
    for epochs in (2, 3, 4):
        user_of(1, max_epochs=epochs).fit(module := Layers())
        ends.append(weights(module))
    for stage, save_last in ((1, "link"), (3, "link"), (3, True)):
        place = folder / f"{stage}-{save_last}"
        user = run(stage, place, save_last, 3)
        user.fit(module := Scored())
        torch.distributed.barrier()  # it is rank 0 that removes
        assert sorted(os.listdir(place)) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
        assert [sharded.check(path) for path in sorted(place.iterdir())] == ["", "", ""]
        assert (place / "last.ckpt").is_symlink() == (save_last == "link")
        torch.distributed.barrier()
        user.validate(module, ckpt_path="best", verbose=False)
        assert equal(weights(module), ends[0])
        user.test(module, ckpt_path="last", verbose=False)
        assert equal(weights(module), ends[1])
        again = run(stage, place, save_last, 4)
        again.fit(module := Scored(), ckpt_path="last")
        assert again.global_step == 8
        assert equal(weights(module), ends[2])
        torch.distributed.barrier()
        assert sorted(os.listdir(place)) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
        assert [sharded.check(path) for path in sorted(place.iterdir())] == ["", "", ""]
        # The last one is no link now, since the newest is not among those kept.
        assert equal(weights_in(place / "last.ckpt"), ends[2])
        assert equal(weights_in(place / "epoch=2.ckpt"), ends[1])
        assert not (place / "last.ckpt").is_symlink()
        torch.distributed.barrier()


def the_newest_of_a_cluster(folder):
    """Names that Lightning looks for after a job was put off."""
    for stage in STAGES:
        place = folder / str(stage)
        for number, epochs in ((2, 1), (11, 2)):
            user = user_of(stage, SHARDED, max_epochs=epochs)
            user.fit(Layers())
            user.save_checkpoint(place / f"hpc_ckpt_{number}.ckpt")
        on_first((place / f"{stem(place / 'hpc_ckpt_12.ckpt')}0123abcd{PART}").mkdir)
        user = user_of(stage, SHARDED, max_epochs=3, default_root_dir=place)
        user.fit(Layers(), ckpt_path="hpc")
        assert user.global_step == 6
        assert user.ckpt_path == f"{place}/hpc_ckpt_11.ckpt"
        user.validate(Layers(), ckpt_path=place / "hpc_ckpt_2.ckpt", verbose=False)


# Moments.


class SaveAfter(Callback):
    """Saves after some batches, in the middle of an accumulation for example."""

    def __init__(self, place: Path, batches: tuple[int, ...]) -> None:
        self.place, self.batches = place, batches

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        if i in self.batches:
            trainer.save_checkpoint(self.place / f"{i}.ckpt")


def between_two_micro_batches(folder):
    """The gradients so far are not kept, as in plain Lightning; the training is not disturbed."""
    options = {"accumulate_grad_batches": 3}
    ends = {}
    for stage, form in ((None, {}), (1, SHARDED), (2, SHARDED), (3, SHARDED), (3, {})):
        place = folder / f"{stage}{form}"
        saver = SaveAfter(place, (3, 4))
        user = user_of(stage, form, callbacks=[saver], **options)
        user.fit(module := Layers(steps=6))
        user_of(stage, **options).fit(untouched := Layers(steps=6))
        assert equal(weights(module), weights(untouched))
        for i in (3, 4):
            user = user_of(stage, max_epochs=2, **options)
            user.fit(module := Layers(steps=6), ckpt_path=place / f"{i}.ckpt")
            ends[stage, str(form), i] = user.global_step, weights(module)
    for i in (3, 4):
        steps, expected = ends[None, "{}", i]
        for (stage, _, at), (found, values) in ends.items():
            if at == i:
                assert found == steps
                for name, value in values.items():
                    torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
                if stage == 1:  # later stages average each micro-batch before they add it
                    assert equal(values, expected)


def after_a_fit_and_after_a_test(folder):
    for stage in STAGES:
        user = run(stage, folder / str(stage), False, 1)
        user.fit(module := Scored())
        user.save_checkpoint(folder / f"{stage}-fit.ckpt")
        user.test(module, verbose=False)
        user.save_checkpoint(folder / f"{stage}-test.ckpt")
        expected, end = weights(module), folder / str(stage) / "epoch=0.ckpt"
        paths = (end, folder / f"{stage}-fit.ckpt", folder / f"{stage}-test.ckpt")
        states = []
        for path in paths:
            assert equal(weights_in(path), expected)
            start, _, _ = resumed(path, stage, Layers())
            states.append(start[0])
        assert equal(states[0], states[1])
        assert equal(states[0], states[2])
        assert len(states[0]) == (18 if rank() == 0 else 0)


# Trust.


class Odd:
    """What is neither a tensor nor a plain value."""


class Keeps(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"odd": Odd()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.odd = state["odd"]


def objects_are_made_only_if_the_user_says_so(folder):
    user = user_of(3, SHARDED, callbacks=[Keeps()])
    user.fit(Layers())
    user.save_checkpoint(path := folder / "odd.ckpt")
    for stage in (3, 1):
        user = user_of(stage, callbacks=[keeps := Keeps()], max_epochs=2)
        error = error_of(user.fit, Layers(), ckpt_path=path)
        assert error.startswith(f"UnpicklingError: {path}/rest.pt holds objects"), error
        assert "test_restore_files.Odd" in error
        assert "weights_only=False (to trainer.fit" in error
        user = user_of(stage, callbacks=[keeps], max_epochs=2)
        user.fit(Layers(), ckpt_path=path, weights_only=False)
        assert isinstance(keeps.odd, Odd)
    if rank() == 0:
        assert main(["consolidate", str(path), str(folder / "one.ckpt")]) == 1
        assert not (folder / "one.ckpt").exists()
        assert main(["consolidate", str(path), str(folder / "one.ckpt"), "--trust"]) == 0


# Damage.


def flip_a_byte(path: Path) -> str:
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file.name


def cut_off(path: Path) -> str:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    return file.name


def remove_a_part(path: Path) -> str:
    (path / "__1_0.distcp").unlink()
    return "__1_0.distcp"


def remove_the_rest(path: Path) -> str:
    (path / "rest.pt").unlink()
    return "rest.pt"


def remove_the_marker(path: Path) -> str:
    (path / "complete.json").unlink()
    return "complete.json"


def break_the_marker(path: Path) -> str:
    os.truncate(path / "complete.json", 20)
    return "complete.json"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def add_code(path: Path) -> str:
    """With a check sum that is right, so that only the reader can refuse it."""
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(path / "ran")))
    return forge(path, ".metadata")


def add_code_to_the_rest(path: Path) -> str:
    rest = torch.load(path / "rest.pt")
    torch.save({**rest, "hostile": Hostile(path / "ran")}, path / "rest.pt")
    return forge(path, "rest.pt")


def forget_a_tensor(path: Path) -> str:
    """A list of tensors that lacks one which the rest names."""
    metadata = read_metadata(path)
    del metadata.state_dict_metadata["weights/net.a.weight"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(path, ".metadata")
    return "weights/net.a.weight"


def forge(path: Path, name: str) -> str:
    marker = path / "complete.json"
    told = json.loads(marker.read_text())
    content = (path / name).read_bytes()
    told["files"][name] = [zlib.crc32(content), len(content)]
    marker.write_text(json.dumps(told))
    return name


DAMAGES = (
    *(flip_a_byte, cut_off, remove_a_part, remove_the_rest, remove_the_marker, break_the_marker),
    *(add_code, add_code_to_the_rest, forget_a_tensor),
)


def damage_is_an_error_on_all_ranks_that_names_the_file(folder):
    saved(whole := folder / "whole.ckpt", 3, Layers(), **SHARDED)
    for damage in DAMAGES:
        path = folder / damage.__name__
        on_first(shutil.copytree, whole, path)
        on_first(lambda path=path, damage=damage: (folder / "named").write_text(damage(path)))
        named = (folder / "named").read_text()
        for stage in STAGES:
            before = weights(module := Layers())
            error = error_of(resumed, path, stage, module)
            kind = "UnpicklingError" if damage is add_code_to_the_rest else "RuntimeError"
            assert error.startswith(kind), (damage, error)
            assert str(path) in error, error
            assert named in error, error
            assert equal(weights(module), before)
            user = user_of(stage, limit_val_batches=1)
            assert error == error_of(user.validate, module, ckpt_path=path, verbose=False)
        if rank() == 0:
            assert main(["consolidate", str(path), f"{path}.one"]) == 1
            assert not Path(f"{path}.one").exists()
        assert not (path / "ran").exists()
    resumed(whole, 3, Layers())


CASES = (
    best_last_and_the_two_that_are_kept,
    the_newest_of_a_cluster,
    between_two_micro_batches,
    after_a_fit_and_after_a_test,
    objects_are_made_only_if_the_user_says_so,
    damage_is_an_error_on_all_ranks_that_names_the_file,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(outcomes, 2, CASES, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_folder_is_a_checkpoint_like_any_other(found, case):
    check_outcome(found, case)
