"""One ordinary file: every strategy, stage and number of ranks reads what any other wrote."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from tests.helpers.models import LENGTH, Language, TinyGPT, Tokens, difference, equal, weights
from tests.helpers.models import trainer as quiet_trainer
from tests.helpers.spawn import run_ranks

KINDS = ("ddp", "zero0", "zero1", "zero2", "zero3")
BATCHES, EPOCHS = 3, 2
STEPS = BATCHES * EPOCHS


def strategy_of(kind: str, **options: Any) -> pl.strategies.Strategy:
    if kind == "ddp":
        return DDPStrategy(**options)
    return ZeroStrategy(int(kind[-1]), bucket_numel=3000, timeout=30, **options)


def trainer(kind: str, strategy_options: Any = (), **options: Any) -> pl.Trainer:
    # Lightning deletes WORLD_SIZE after the first fit; the process group stays.
    is_running = torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if is_running else os.environ["WORLD_SIZE"]
    return quiet_trainer(strategy_of(kind, **dict(strategy_options)), int(world_size), **options)


class Everything(pl.LightningModule):
    """Tied names, frozen weights, buffers, a scalar, two groups, momentum, a scheduler."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = TinyGPT(depth=3, tied=True, frozen=True)
            self.extra = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.losses: list[float] = []
        self.val_losses: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(Tokens(self.trainer.global_rank, BATCHES), batch_size=None)

    def val_dataloader(self) -> Any:
        return DataLoader(Tokens(100 + self.trainer.global_rank, 2), batch_size=None)

    test_dataloader = predict_dataloader = val_dataloader

    def loss(self, batch: Tensor) -> Tensor:
        features = batch[:, :5].float() / 50
        return self.model(batch) + self.extra(features).square().mean() * self.model.scale

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += 1
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.loss(batch)
        self.val_losses.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        # The bias before a normalization has no gradient but rounding, which Adam would divide by.
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": others, "lr": 3e-3},
                {"params": list(self.extra.parameters()), "eps": 1e-4},
            ],
            lr=1e-2,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def states_of(path: Path) -> dict[str, Tensor]:
    """All tensors of the optimizer states in a file, under readable names."""
    found = {}
    for state_dict in torch.load(path, weights_only=False)["optimizer_states"]:
        for number, state in state_dict["state"].items():
            for key, value in state.items():
                found[f"{number}.{key}"] = torch.as_tensor(value)
    return found


# Saving and resuming.


def save_halfway(folder: Path) -> None:
    """One file per strategy after the first epoch."""
    for kind in KINDS:
        user = trainer(kind)
        user.fit(Everything())
        user.save_checkpoint(folder / f"{kind}.ckpt")


def resume_all(folder: Path) -> dict[str, Any]:
    """Every file read by every strategy, against the run that was never interrupted."""
    found: dict[str, Any] = {}
    uninterrupted = Everything()
    trainer("ddp", max_epochs=EPOCHS).fit(uninterrupted)
    expected = weights(uninterrupted)
    for saved_by in KINDS:
        for loaded_by in KINDS:
            module = Everything()
            user = trainer(loaded_by, max_epochs=EPOCHS)
            user.fit(module, ckpt_path=folder / f"{saved_by}.ckpt")
            got = weights(module)
            found[saved_by, loaded_by] = {
                "equal": equal(got, expected),
                "difference": difference(got, expected),
                "losses": module.losses == uninterrupted.losses[BATCHES:],
                "step": user.global_step,
                "lr": user.optimizers[0].param_groups[1]["lr"],
            }
    return found


@functools.cache
def saved_and_resumed(folder: Path) -> list[dict[str, Any]]:
    run_ranks(save_halfway, 2, folder)
    return run_ranks(resume_all, 2, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("saved_by", KINDS)
def test_resume_continues_as_if_never_interrupted(folder, saved_by):
    for found in saved_and_resumed(folder):
        for loaded_by in KINDS:
            got = found[saved_by, loaded_by]
            assert got["equal"], (saved_by, loaded_by, got)
            assert got["losses"], (saved_by, loaded_by, got)
            assert got["step"] == STEPS
            assert got["lr"] == pytest.approx(3e-3 * 0.7 ** (STEPS // 2))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_file_is_ddps_file(folder, kind):
    saved_and_resumed(folder)
    path, expected_path = folder / f"{kind}.ckpt", folder / "ddp.ckpt"
    got = torch.load(path, weights_only=False)
    expected = torch.load(expected_path, weights_only=False)
    assert got.keys() == expected.keys()
    assert list(got["state_dict"]) == list(expected["state_dict"])
    assert equal(got["state_dict"], expected["state_dict"])
    assert "scratch" not in got["state_dict"]
    for name, value in got["state_dict"].items():
        assert value.device.type == "cpu"
        assert value.dtype == expected["state_dict"][name].dtype
    tied = got["state_dict"]["model.token.weight"], got["state_dict"]["model.head.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # written once
    states, expected_states = states_of(path), states_of(expected_path)
    assert equal(states, expected_states)
    assert all(states[name].dtype == value.dtype for name, value in expected_states.items())
    assert (
        got["optimizer_states"][0]["param_groups"]
        == (expected["optimizer_states"][0]["param_groups"])
    )
    assert got["lr_schedulers"] == expected["lr_schedulers"]
    assert got["hyper_parameters"] == expected["hyper_parameters"]
    assert path.stat().st_size == pytest.approx(expected_path.stat().st_size, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_module_reads_the_file(folder, kind):
    saved_and_resumed(folder)
    path = folder / f"{kind}.ckpt"
    module = Everything.load_from_checkpoint(path, map_location="cpu", weights_only=False)
    plain = Everything()
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    assert equal(module.state_dict(), plain.state_dict())
    assert module.seen == BATCHES
    assert module.model.token.weight is module.model.head.weight
    with torch.no_grad():
        loss = module.eval().loss(torch.zeros(2, LENGTH, dtype=torch.int64))
    assert loss.isfinite()


def continue_alike(folder: Path) -> dict[str, float]:
    """Continuing with another number of ranks: our stages against DDP's from the same file."""
    found = {}
    expected = Everything()
    trainer("ddp", max_epochs=EPOCHS).fit(expected, ckpt_path=folder / "ddp.ckpt")
    for kind in KINDS[1:]:
        for saved_by in (kind, "ddp"):
            module = Everything()
            trainer(kind, max_epochs=EPOCHS).fit(module, ckpt_path=folder / f"{saved_by}.ckpt")
            found[f"{saved_by} by {kind}"] = difference(weights(module), weights(expected))
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_continues(folder, world_size):
    saved_and_resumed(folder)
    for found in run_ranks(continue_alike, world_size, folder):
        assert len(found) == 8
        assert max(found.values()) <= (0.0 if world_size == 1 else 1e-6), found


# In and around a fit.


def around_a_fit(folder: Path, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    held: list[tuple[int, int]] = []

    class Observed(Everything):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            states = checkpoint.get("optimizer_states", [{"state": {}}])
            held.append((len(checkpoint["state_dict"]), len(states[0]["state"])))

    module = Observed()
    callback = ModelCheckpoint(
        folder, filename=kind + "-{step}", every_n_train_steps=2, save_top_k=-1, save_last=True
    )
    user = trainer(
        kind,
        enable_checkpointing=True,
        callbacks=[callback],
        limit_val_batches=2,
        num_sanity_val_steps=1,
        max_epochs=EPOCHS,
    )
    found["before"] = user.validate(module, verbose=False)[0]["val_loss"]
    user.fit(module)
    found["fitted"] = weights(module)
    found["held"] = held[:]
    found["files"] = sorted(path.name for path in folder.glob(f"{kind}-*"))
    # After a fit the module is whole, whoever looks at it.
    found["finite"] = all(value.isfinite().all() for value in module.state_dict().values())
    user.save_checkpoint(folder / f"after-{kind}.ckpt")
    found["test"] = user.test(module, verbose=False)[0]["val_loss"]
    user.save_checkpoint(folder / f"after_test-{kind}.ckpt")
    user.save_checkpoint(folder / f"weights-{kind}.ckpt", weights_only=True)
    found["after"] = sorted(f"after{when}-{kind}.ckpt" for when in ("", "_test"))

    middle = folder / f"{kind}-step=2.ckpt"
    fresh = Everything()
    found["validated"] = trainer(kind, limit_val_batches=2).validate(
        fresh, ckpt_path=middle, verbose=False
    )[0]["val_loss"]
    found["tested"] = user.test(module, ckpt_path="last", verbose=False)[0]["val_loss"]
    predicted = trainer(kind).predict(Everything(), ckpt_path=folder / f"weights-{kind}.ckpt")
    found["predicted"] = [value.item() for value in predicted]

    trainer(kind, max_epochs=EPOCHS).fit(from_middle := Everything(), ckpt_path=middle)
    found["from_middle"] = weights(from_middle)

    again = trainer(kind)
    again.fit(module)
    found["fitted_again"] = weights(module)
    again.fit_loop.max_epochs = EPOCHS
    again.fit(module)
    found["fitted_thrice"] = weights(module)
    return found


def all_around_fits(folder: Path) -> dict[str, dict[str, Any]]:
    return {kind: around_a_fit(folder, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("around")
    return folder, run_ranks(all_around_fits, 2, folder)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_validate_fit_test_predict_and_fit_again_equal_ddp(around, kind):
    _, ranks = around
    for found in ranks:
        got, expected = found[kind], found["ddp"]
        for name in ("before", "test", "validated", "tested", "predicted", "finite"):
            assert got[name] == expected[name], name
        assert got["finite"]
        for name in ("fitted", "from_middle", "fitted_again", "fitted_thrice"):
            assert equal(got[name], expected[name]), name
        assert got["files"] == [name.replace("ddp", kind) for name in expected["files"]]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_only_rank_0_holds_the_full_states(around, kind):
    _, ranks = around
    names = len(Everything().state_dict())
    trained = sum(p.requires_grad for p in Everything().parameters())
    for rank, found in enumerate(ranks):
        assert len(found[kind]["held"]) >= 3
        for held_names, held_states in found[kind]["held"]:
            if rank == 0:
                assert (held_names, held_states) == (names, trained)
            else:
                assert (held_names, held_states) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_files_after_fit_and_after_test_are_the_last_one(around, kind):
    folder, ranks = around
    last = torch.load(folder / f"{kind}-step=6.ckpt", weights_only=False)
    assert equal(last["state_dict"], ranks[0][kind]["fitted"])
    for name in ranks[0][kind]["after"]:
        got = torch.load(folder / name, weights_only=False)
        assert equal(got["state_dict"], last["state_dict"])
        assert equal(states_of(folder / name), states_of(folder / f"{kind}-step=6.ckpt"))
    only_weights = torch.load(folder / f"weights-{kind}.ckpt", weights_only=False)
    assert equal(only_weights["state_dict"], last["state_dict"])
    assert "optimizer_states" not in only_weights


# Parameters of lower precision.


def resume_lower_precision(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for stage in (0, 1, 2, 3):

        def user(stage: int = stage, **options: Any) -> pl.Trainer:
            strategy = ZeroStrategy(stage, bucket_numel=3000, timeout=30)
            return quiet_trainer(strategy, 2, precision="bf16-true", **options)

        path = folder / f"bf16-{stage}.ckpt"
        user(max_epochs=EPOCHS).fit(uninterrupted := Language(steps=BATCHES))
        half = user()
        half.fit(Language(steps=BATCHES))
        half.save_checkpoint(path)
        user(max_epochs=EPOCHS).fit(resumed := Language(steps=BATCHES), ckpt_path=path)
        found[stage] = {
            "equal": equal(weights(resumed), weights(uninterrupted)),
            "losses": resumed.losses == uninterrupted.losses[BATCHES:],
        }
    ddp = quiet_trainer(DDPStrategy(), 2, precision="bf16-true", max_epochs=EPOCHS)
    ddp.fit(module := Language(steps=BATCHES), ckpt_path=folder / "bf16-3.ckpt")
    found["ddp"] = {
        "finite": all(v.isfinite().all() for v in module.state_dict().values()),
        "steps": len(module.losses),
    }
    return found


def test_a_checkpoint_of_bf16_weights_keeps_their_fp32_master(tmp_path):
    for found in run_ranks(resume_lower_precision, 2, tmp_path):
        for stage in (0, 1, 2, 3):
            assert found[stage] == {"equal": True, "losses": True}, stage
        assert found["ddp"] == {"finite": True, "steps": BATCHES}
    states = [states_of(tmp_path / f"bf16-{stage}.ckpt") for stage in (0, 1, 2, 3)]
    file = torch.load(tmp_path / "bf16-3.ckpt", weights_only=False)
    assert {v.dtype for v in file["state_dict"].values()} == {torch.bfloat16}
    masters = {name: v for name, v in states[3].items() if name.endswith("master_weight")}
    assert len(masters) == sum(p.requires_grad for p in Language().parameters())
    assert {v.dtype for v in masters.values()} == {torch.float32}
    assert all(equal(states[0], other) for other in states[1:])


# Files that do not fit.


def wrong_files(folder: Path) -> list[tuple[str, str]]:
    answers = []
    user = trainer("ddp", max_steps=2)
    user.fit(Language(steps=4))
    user.save_checkpoint(folder / "other.ckpt")
    user.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    for stage in (1, 3):
        for path, module in (
            ("other.ckpt", Language(steps=4, depth=2)),
            ("other.ckpt", Everything()),
            ("weights.ckpt", Language(steps=4)),
            ("absent.ckpt", Language(steps=4)),
        ):
            try:
                trainer(f"zero{stage}").fit(module, ckpt_path=folder / path)
                answers.append(("none", ""))
            except Exception as error:
                answers.append((type(error).__name__, str(error)))
    return answers


def test_files_that_do_not_fit_are_refused_on_every_rank(tmp_path):
    first, second = run_ranks(wrong_files, 2, tmp_path)
    assert first == second
    for answers in (first[:4], first[4:]):
        kinds = [kind for kind, _ in answers]
        assert kinds == ["RuntimeError", "RuntimeError", "KeyError", "FileNotFoundError"], answers
        assert "Unexpected key" in answers[0][1]
        assert "optimizer" in answers[2][1]


def different_groups(folder: Path) -> list[tuple[str, str]]:
    from tests.helpers.models import two_groups

    user = trainer("zero3", max_steps=2)
    user.fit(Language(steps=4))
    user.save_checkpoint(folder / "one_group.ckpt")
    if user.is_global_zero:
        saved = torch.load(folder / "one_group.ckpt", weights_only=False)
        del saved["optimizer_states"][0]["param_names"]
        torch.save(saved, folder / "unnamed.ckpt")
    user.strategy.barrier()
    answers = []
    for stage in (1, 3):
        for name in ("one_group.ckpt", "unnamed.ckpt"):
            try:
                module = Language(two_groups, steps=4)
                trainer(f"zero{stage}").fit(module, ckpt_path=folder / name)
                answers.append(("none", ""))
            except Exception as error:
                answers.append((type(error).__name__, str(error)))
    return answers


def test_an_optimizer_with_other_groups_takes_its_state_by_name_or_is_refused(tmp_path):
    first, second = run_ranks(different_groups, 2, tmp_path)
    assert first == second
    named, unnamed = first[::2], first[1::2]
    assert [kind for kind, _ in named] == ["none", "none"]
    for kind, message in unnamed:
        assert kind == "ValueError"
        assert "has parameter groups of" in message
        assert "does not name its parameters" in message


# Whole-tensor sharding.


class FactoredLanguage(Language):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


def resume_factored(folder: Path) -> dict[Any, bool]:
    found = {}
    trainer("ddp", max_epochs=EPOCHS).fit(uninterrupted := FactoredLanguage(steps=BATCHES))
    half = trainer("ddp")
    half.fit(FactoredLanguage(steps=BATCHES))
    half.save_checkpoint(folder / "ddp.ckpt")
    for stage in (1, 2, 3):

        def user(stage: int = stage, **options: Any) -> pl.Trainer:
            strategy = ZeroStrategy(stage, bucket_numel=3000, shard_by="tensor", timeout=30)
            return quiet_trainer(strategy, 2, **options)

        half = user()
        half.fit(FactoredLanguage(steps=BATCHES))
        half.save_checkpoint(folder / f"{stage}.ckpt")
        for loaded_by, reader, path in (
            ("itself", user(max_epochs=EPOCHS), f"{stage}.ckpt"),
            ("ddp", trainer("ddp", max_epochs=EPOCHS), f"{stage}.ckpt"),
            ("of ddp", user(max_epochs=EPOCHS), "ddp.ckpt"),
        ):
            reader.fit(module := FactoredLanguage(steps=BATCHES), ckpt_path=folder / path)
            found[stage, loaded_by] = equal(weights(module), weights(uninterrupted))
    return found


def test_factored_states_of_whole_tensors_are_saved_and_read(tmp_path):
    for found in run_ranks(resume_factored, 2, tmp_path):
        assert len(found) == 9
        assert all(found.values()), found
