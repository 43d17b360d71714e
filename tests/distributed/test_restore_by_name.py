"""Optimizer state goes to the parameters it was of, whatever has changed around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.helpers.layered import (
    Layers,
    by_kind,
    check_outcome,
    error_of,
    every,
    outcomes,
    resumed,
    saved,
    user_of,
)
from tests.helpers.models import equal, weights
from tests.helpers.spawn import run_ranks

FORMS = ((1, "sharded"), (2, "consolidated"), (3, "sharded"))
Make = Callable[[], Layers]


def is_first() -> bool:
    return torch.distributed.get_rank() == 0


def check(
    folder: Path,
    before: Make,
    after: Make,
    kept: str,
    told: tuple[str, ...] = (),
    forms: Any = FORMS,
) -> list[dict[str, Any]]:
    """State of the kept layers goes on bit for bit, and rank 0 tells the rest in one notice.

    Returns:
        Groups of the optimizer after the last run.
    """
    for stage, form in forms:
        saved(path := folder / f"{stage}-{form}", stage, before(), checkpoint=form)
        (expected,) = saved(folder / "full", stage, before())
        (start,), notices, user = resumed(path, stage, after())
        assert user.global_step == 4
        wanted = {name: v for name, v in expected.items() if name.split(".")[1] in kept}
        assert equal(start, wanted), (start.keys(), expected.keys())
        if not is_first():
            assert notices == []
            continue
        assert len(wanted) == 6 * len(kept)  # weight and bias: two moments and a step
        assert len(notices) == (1 if told else 0), notices
        for part in told:
            assert part in notices[0], notices[0]
    return user.optimizers[0].param_groups


class Loose(Layers):
    """Takes what a checkpoint has."""

    strict_loading = False


# Other parameters.


def a_layer_is_frozen(folder):
    unused = ("its state of 'net.b.bias', 'net.b.weight' is not used",)
    check(folder, Layers, lambda: Layers(frozen="b"), "ac", unused)
    all_of_it = functools.partial(Layers, frozen="b", groups=lambda module: module.parameters())
    check(folder, Layers, all_of_it, "abc", (), FORMS[:2])  # for when it is unfrozen


def a_layer_is_unfrozen(folder):
    fresh = ("does not know 'net.b.weight', 'net.b.bias', which start fresh",)
    check(folder, lambda: Layers(frozen="b"), Layers, "ac", fresh)


def a_layer_is_added_and_one_is_removed(folder):
    told = (
        "'net.d.weight', 'net.d.bias', which start fresh",
        "'net.b.bias', 'net.b.weight' is not",
    )
    check(folder, Layers, lambda: Loose("adc"), "ac", told)


def adapters_come_and_go(folder):
    base, adapted = functools.partial(Loose, "ab"), functools.partial(Loose, "axb", frozen="ab")
    on = ("'net.x.weight', 'net.x.bias', which start fresh", "state of 'net.a.bias'")
    check(folder, base, adapted, "", on)
    off = ("'net.a.weight'", "'net.x.bias', 'net.x.weight' is not used")
    check(folder, adapted, base, "", off)
    check(folder, adapted, adapted, "x")


# Other groups.


def other_rates(module):
    weights_group, biases_group = by_kind(module)
    return [{**biases_group, "lr": 7.0}, {**weights_group, "lr": 8.0}]


def with_a_third_group(module):
    known = by_kind(module)
    new = list(module.net["d"].parameters())
    for group in known:
        group["params"] = [p for p in group["params"] if all(p is not each for each in new)]
    return [{"params": new, "lr": 0.5}, *known]


def groups_are_reordered(folder):
    two = functools.partial(Layers, groups=by_kind)
    groups = check(folder, two, lambda: Layers(groups=other_rates), "abc")
    assert [group["lr"] for group in groups] == [0.03, 0.02]
    assert [group["eps"] for group in groups] == [1e-5, 1e-8]
    (group,) = check(folder, two, Layers, "abc", forms=FORMS[:2])
    assert group["lr"] == 0.02
    groups = check(folder, Layers, two, "abc", forms=FORMS[:2])
    assert [group["lr"] for group in groups] == [0.01, 0.01]
    more = functools.partial(Loose, "abcd", groups=with_a_third_group)
    groups = check(folder, two, more, "abc", ("'net.d.weight'",), FORMS[2:])
    assert [group["lr"] for group in groups] == [0.5, 0.02, 0.03]


# What cannot fit.


class Sized(Layers):
    """With one more parameter; its weight in a checkpoint is dropped if it is of another size."""

    strict_loading = False

    def __init__(self, numel: int, drops: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(2, numel))
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table.mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.drops:
            del checkpoint["state_dict"]["table"]


def a_shape_has_changed(folder):
    for stage, form in FORMS:
        for numel in (3, 40):  # within a rank's shard, and cut
            path = folder / f"{stage}-{form}-{numel}"
            saved(path, stage, Sized(numel, False), checkpoint=form)
            error = error_of(resumed, path, stage, Sized(numel + 1, True))
            assert error.startswith("ValueError"), error
            assert f"'table' has shape (2, {numel}), the parameter has (2, {numel + 1})" in error
            assert "Build the model as it was" in error
            error = error_of(resumed, path, stage, Sized(numel + 1, False))
            assert error.startswith("RuntimeError: "), error
            assert "size mismatch for table" in error


# Names that were given to the optimizer.


def all_named(module):
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def net_named(module):
    return module.net.named_parameters()


def optimizers_of_named_parameters(folder):
    for groups in (all_named, net_named):
        path = folder / groups.__name__
        (expected,) = saved(path, None, Layers(groups=groups))
        for stage in (1, 3):
            for reader in (groups, every):
                (start,), notices, user = resumed(path, stage, Layers(groups=reader))
                assert equal(start, expected if is_first() else {}), (groups, reader)
                assert notices == []
                kept = user.optimizers[0].param_groups[0].get("param_names")
                assert kept == ([n for n, _ in groups(Layers())] if reader is groups else None)
    path = folder / "all_named"
    (start,), notices, _ = resumed(path, 3, Layers(frozen="b", groups=all_named))
    assert len(start) == (12 if is_first() else 0)
    assert len(notices) == (1 if is_first() else 0)
    (expected,) = saved(folder / "ours", 3, Layers(groups=all_named))
    (start,), _, _ = resumed(folder / "ours", None, Layers(groups=all_named))
    assert equal(start, expected) or not is_first()


def state_under_names(folder):
    """As a file has it whose optimizer state is under names, not numbers."""
    (expected,) = saved(folder / "ddp", None, Layers())
    if is_first():
        file = torch.load(folder / "ddp", weights_only=False)
        (state,) = file["optimizer_states"]
        names = [name for name, _ in Layers().named_parameters()]
        state["state"] = {names[number]: value for number, value in state["state"].items()}
        state["param_groups"][0]["params"] = names
        torch.save(file, folder / "named")
    torch.distributed.barrier()
    for stage in (1, 3):
        (start,), notices, _ = resumed(folder / "named", stage, Layers())
        assert notices == []
        assert equal(start, expected if is_first() else {})
        (start,), notices, _ = resumed(folder / "named", stage, Layers(frozen="a"))
        assert len(start) == (12 if is_first() else 0)
        assert len(notices) == (1 if is_first() else 0)


# Several optimizers.


class Rivals(Layers):
    """Two optimizers, as a GAN has them."""

    strict_loading = False

    def __init__(self, order: str = "ab", layers: str = "ab") -> None:
        super().__init__(layers)
        self.automatic_optimization = False
        self.order = order

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers = self.optimizers()
        many = optimizers if isinstance(optimizers, list) else [optimizers]
        for sign, optimizer in zip((1, -1, 1), many, strict=False):
            optimizer.zero_grad()
            self.manual_backward(sign * super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[name].parameters(), 0.01) for name in self.order]


def two_optimizers(folder):
    for stage, form in FORMS:
        path = folder / f"{stage}-{form}"
        saved(path, stage, Rivals(), checkpoint=form)
        expected = saved(folder / "full", stage, Rivals())
        start, notices, _ = resumed(path, stage, Rivals())
        assert notices == []
        assert len(start) == 2
        for one, other in zip(start, expected, strict=True):
            assert equal(one, other)
            assert len(one) == (6 if is_first() else 0)
        for others, told in (
            ("a", "has state of 2 optimizer(s), and there are 1 here"),
            ("abx", "and there are 3 here: the first 2 go on in the order of"),
        ):
            start, notices, _ = resumed(path, stage, Rivals(others, "abx"))
            assert len(notices) == (1 if is_first() else 0), notices
            assert all(told in notice for notice in notices)
            for one, other in zip(start, expected, strict=False):
                assert equal(one, other)
            assert all(not fresh for fresh in start[2:])
        error = error_of(resumed, path, stage, Rivals("ba"))
        assert "parameters that another optimizer trains: 'net.a.bias', 'net.a.weight'" in error
        assert "the order" in error


# Weights without a master.


class Loads(Callback):
    """Weights alone, into a model that trains."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        file = torch.load(self.path, weights_only=False)
        trainer.strategy.load_model_state_dict({"state_dict": file["state_dict"]})


def a_step_that_changes_nothing_leaves_loaded_bf16_weights(folder):
    user = user_of(None, precision="bf16-true")
    user.fit(Layers(seed=50))
    user.save_checkpoint(folder / "ddp")
    expected = torch.load(folder / "ddp", weights_only=False)["state_dict"]
    for stage in (1, 2, 3):
        master = {"master_weights": True}
        user = user_of(stage, master, precision="bf16-true", max_epochs=2)
        user.fit(continued := Still(), ckpt_path=folder / "ddp")
        user = user_of(stage, master, precision="bf16-true", callbacks=[Loads(folder / "ddp")])
        user.fit(loaded := Still())
        for module in (continued, loaded):
            assert equal(weights(module), expected), stage


class Still(Layers):
    """Steps that are no steps, whatever the checkpoint says."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0


CASES = (
    a_layer_is_frozen,
    a_layer_is_unfrozen,
    a_layer_is_added_and_one_is_removed,
    adapters_come_and_go,
    groups_are_reordered,
    a_shape_has_changed,
    optimizers_of_named_parameters,
    state_under_names,
    two_optimizers,
    a_step_that_changes_nothing_leaves_loaded_bf16_weights,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(outcomes, 2, CASES, tmp_path_factory.mktemp("by_name"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_state_finds_its_parameters_again(found, case):
    check_outcome(found, case)
