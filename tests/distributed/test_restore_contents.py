"""Checkpoints that hold less, other names or more than the model: frozen, compiled, hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_zero.checkpoint.consolidate import consolidate
from tests.helpers.layered import Layers, check_outcome, error_of, outcomes, resumed, saved, user_of
from tests.helpers.models import equal, weights
from tests.helpers.spawn import run_ranks

FORMS = ((1, "sharded"), (3, "sharded"), (3, "consolidated"))
NO_FROZEN = {"exclude_frozen_parameters": True}


def one_file(path: Path) -> dict[str, Any]:
    """What a checkpoint of either form holds."""
    if path.is_dir():
        rank = torch.distributed.get_rank()
        consolidate(path, path := path.with_name(f"{path.name}.{rank}.one"), weights_only=False)
    return torch.load(path, weights_only=False)


def trained(layers: str = "abc", epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    """Weights after a training that is not interrupted."""
    user = user_of(1, max_epochs=epochs)
    user.fit(module := Layers(layers, **options))
    return weights(module)


def validated(path: Path, stage: int, module: Layers, **options: Any) -> dict[str, Tensor]:
    """Weights as an evaluation has loaded them."""
    user_of(stage, options, limit_val_batches=1).validate(module, ckpt_path=path, verbose=False)
    return weights(module)


# Without frozen parameters.


class Reader(Layers):
    """Also reads at other times than in a fit."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, frozen="b", **options)


def frozen_parameters_are_left_out(folder):
    uninterrupted, half = trained(frozen="b"), trained(frozen="b", epochs=1)
    for stage, form in FORMS:
        path = folder / f"{stage}-{form}"
        saved(path, stage, Reader(), checkpoint=form, **NO_FROZEN)
        held = one_file(path)["state_dict"]
        assert sorted(held) == ["net.a.bias", "net.a.weight", "net.c.bias", "net.c.weight"]
        _, notices, _ = resumed(path, stage, module := Reader(), strategy_options=NO_FROZEN)
        assert notices == []
        assert equal(weights(module), uninterrupted)
        other_base = Reader(seed=9)
        own = {name: value for name, value in weights(other_base).items() if ".b." in name}
        assert equal(validated(path, stage, other_base, **NO_FROZEN), {**half, **own})
        for reader, told in (
            (Reader("abcd"), "missing ['net.d.weight', 'net.d.bias'], unexpected []"),
            (Reader("ab"), "missing [], unexpected ['net.c.bias', 'net.c.weight']"),
        ):
            error = error_of(resumed, path, stage, reader, strategy_options=NO_FROZEN)
            assert error.startswith("RuntimeError: the checkpoint does not fit Reader"), error
            assert told in error, error
            assert "strict_loading=False" in error
        error = error_of(resumed, path, stage, Reader())
        assert error.startswith("RuntimeError"), error
        assert "net.b.weight" in error, error


# torch.compile.


def compiled(module: Layers) -> Layers:
    module.net["b"] = torch.compile(module.net["b"], backend="eager")
    return module


def compiled_and_not(folder):
    uninterrupted, half = trained(), trained(epochs=1)
    for stage, form in FORMS:
        for name, writer, readers in (
            ("plain", Layers, (lambda: compiled(Layers()),)),
            ("compiled", lambda: compiled(Layers()), (Layers, lambda: compiled(Layers()))),
        ):
            path = folder / f"{stage}-{form}-{name}"
            saved(path, stage, writer(), checkpoint=form)
            file = one_file(path)
            assert equal(file["state_dict"], half)
            assert file["optimizer_states"][0]["param_names"] == [list(half)]
            for reader in readers:
                start, notices, _ = resumed(path, stage, module := reader())
                assert notices == []
                assert len(start[0]) == (18 if torch.distributed.get_rank() == 0 else 0)
                values = {n.replace("_orig_mod.", ""): v for n, v in weights(module).items()}
                assert equal(values, uninterrupted)
    _, _, user = resumed(folder / "3-consolidated-compiled", None, module := Layers())
    assert equal(weights(module), uninterrupted)


# Hooks.


class Hooked(Layers):
    """Drops a layer, renames another one and adds something; takes the names back."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("net.c.")]:
            del state[name]
        for name in [name for name in state if name.startswith("net.b.")]:
            state["other" + name.removeprefix("net.b")] = state.pop(name)
        state["added"] = torch.arange(3.0)
        checkpoint["note"] = {"of": self.net["a"].bias.shape, "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith("other")]:
            state["net.b" + name.removeprefix("other")] = state.pop(name)
        self.note, self.added = checkpoint["note"], state.pop("added")


def hooks_change_what_is_saved_and_loaded(folder):
    half = trained(epochs=1)
    for stage, form in FORMS:
        path = folder / f"{stage}-{form}"
        saved(path, stage, Hooked(), checkpoint=form)
        held = one_file(path)["state_dict"]
        names = ["added", "net.a.bias", "net.a.weight", "other.bias", "other.weight"]
        assert sorted(held) == names
        assert torch.equal(held["other.weight"], half["net.b.weight"])
        module = Hooked(seed=9)
        own = {name: value for name, value in weights(module).items() if ".c." in name}
        assert equal(validated(path, stage, module), {**half, **own})
        assert torch.equal(module.added, torch.arange(3.0))
        assert torch.equal(module.note["tensor"], torch.ones(2))
        start, notices, _ = resumed(path, stage, Hooked())
        assert notices == []
        assert len(start[0]) == (18 if torch.distributed.get_rank() == 0 else 0)


class Looks(Layers):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.a.weight"].abs()


class LooksAtFile(Layers):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.sum = checkpoint["state_dict"]["net.a.weight"].full().sum()
        checkpoint["state_dict"]["net.a.weight"].abs()


def hooks_are_told_where_there_is_no_tensor(folder):
    for stage in (1, 3):
        error = error_of(saved, folder / "none", stage, Looks(), checkpoint="sharded")
        told = "AttributeError: 'weights/net.a.weight' of a sharded checkpoint"
        assert error.startswith(told), error
        assert "has no 'abs': use checkpoint='consolidated'" in error
        assert not (folder / "none").exists()
        saved(path := folder / f"{stage}", stage, Layers(), checkpoint="sharded")
        error = error_of(resumed, path, stage, module := LooksAtFile())
        assert "its full() reads the tensor" in error, error
        assert torch.equal(module.sum, one_file(path)["state_dict"]["net.a.weight"].sum())


# Weights alone.


def weights_alone(folder):
    half = trained(epochs=1)
    for stage, form in FORMS:
        place = folder / f"{stage}-{form}"
        keeper = ModelCheckpoint(place, filename="kept", save_weights_only=True)
        options = {"checkpoint": form}
        user = user_of(stage, options, callbacks=[keeper], enable_checkpointing=True)
        user.fit(Layers())
        user.save_checkpoint(place / "after.ckpt", weights_only=True)
        for name in ("kept.ckpt", "after.ckpt"):
            file = one_file(place / name)
            assert equal(file["state_dict"], half)
            assert not file.keys() & {"optimizer_states", "callbacks", "lr_schedulers"}
            assert equal(validated(place / name, stage, Layers(seed=9)), half)
            error = error_of(resumed, place / name, stage, Layers())
            assert error.startswith("KeyError"), error
            assert "optimizer" in error


CASES = (
    frozen_parameters_are_left_out,
    hooks_change_what_is_saved_and_loaded,
    hooks_are_told_where_there_is_no_tensor,
    weights_alone,
    compiled_and_not,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(outcomes, 2, CASES, tmp_path_factory.mktemp("contents"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_a_checkpoint_holds_comes_back(found, case):
    check_outcome(found, case)
