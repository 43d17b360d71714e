"""Averages of weights are those of Lightning's callbacks under DDP, to the last bit."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn
from torch.utils.data import DataLoader

from lightning_zero import ZeroEMA, ZeroStrategy, full_optimizer_state
from tests.helpers.models import LENGTH, VOCAB, Language, TinyGPT, equal, trainer, weights
from tests.helpers.spawn import run_ranks

DECAY = 0.75
STEPS, EPOCHS = 3, 2
ZEROS = ((1, "consolidated"), (2, "sharded"), (3, "consolidated"), (3, "sharded"))
COUNTER = "norm.num_batches_tracked"
"""WeightAveraging averages this integer, too, and cuts it off; ZeroEMA leaves it as it is."""


class Averaged(Language):
    """Has frozen weights and buffers; may save in the midst of validation."""

    saves_to = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(steps=STEPS, frozen=True, **options)
        self.norm = nn.BatchNorm1d(LENGTH, affine=False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.norm(F.one_hot(batch, VOCAB).to(self.norm.running_mean.dtype))
        return super().training_step(batch, index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        if self.saves_to and index == 0 and self.trainer.current_epoch == 0:
            self.trainer.save_checkpoint(self.saves_to)


class BuiltLate(Averaged):
    """Sharded while it is built, at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.model = TinyGPT(frozen=True)


class TwoOptimizers(Averaged):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        loss = super().training_step(batch, index)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head = list(self.model.head.parameters())
        rest = [p for p in self.parameters() if p.requires_grad and p is not head[0]]
        return [torch.optim.SGD(head, lr=0.1), torch.optim.AdamW(rest, lr=1e-2)]


class Counted(ZeroEMA):
    """Counts what its updates send, and the bytes that it holds."""

    sent_nbytes = held_nbytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        before = trainer.strategy.sent_nbytes
        super().on_train_batch_end(trainer, *args, **kwargs)
        self.sent_nbytes += trainer.strategy.sent_nbytes - before
        self.held_nbytes = sum(value.nbytes for value in self._pieces.values.values())


class OnMasters(Callback):
    """The average of fp32 masters by hand, each whole."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            value = full_optimizer_state(parameter, "master_weight")
            known = self.average.get(name)
            self.average[name] = value if known is None else DECAY * known + (1 - DECAY) * value


def stock(average: Any = None) -> WeightAveraging:
    return WeightAveraging(avg_fn=average or get_ema_avg_fn(DECAY))


def swa() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def zero(stage: int, form: str = "consolidated", **options: Any) -> ZeroStrategy:
    return ZeroStrategy(stage, bucket_numel=900, checkpoint=form, timeout=20, **options)


def fit(
    strategy: Any, callbacks: Any, folder: Any = None, module: Any = None, **options: Any
) -> dict[str, Any]:
    """Train with validation after each epoch, and with checkpoints if there is a folder for them.

    Of these, ``end.ckpt`` is written when training has ended.
    """
    module = module or Averaged()
    ckpt_path = options.pop("ckpt_path", None)
    if folder is not None:
        saver = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
        callbacks = [*callbacks, saver]
    run = trainer(
        strategy,
        2 if "RANK" in os.environ else 1,
        callbacks=callbacks,
        limit_val_batches=2,
        **{"max_epochs": EPOCHS, "enable_checkpointing": folder is not None, **options},
    )
    run.fit(module, ckpt_path=ckpt_path, weights_only=False)
    if folder is not None:
        run.save_checkpoint(f"{folder}/end.ckpt")
    return {"losses": module.losses, "judged": module.val_losses, "weights": weights(module)}


def same(found: dict[str, Any], expected: dict[str, Any], trained: int = 0, judged: int = 0) -> str:
    """What differs, empty if nothing does.

    Args:
        trained: Epochs that were trained before.
        judged: Epochs that were validated before.
    """
    for key, begin in (("losses", trained * STEPS), ("judged", judged * 2)):
        if found[key] != expected[key][begin:]:
            return f"{key}: {found[key]}, expected {expected[key]}"
    differing = [
        name
        for name, value in expected["weights"].items()
        if name != COUNTER and not torch.equal(found["weights"][name], value)
    ]
    return f"weights: {differing}" if differing else ""


def averages(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expected = fit(ddp(), [stock()], f"{folder}/ddp")
    for stage, form in ZEROS:
        here = f"{folder}/{stage}{form}"
        callback, module = Counted(DECAY), Averaged()
        module.saves_to = f"{here}/within.ckpt"
        got = fit(zero(stage, form), [callback], here, module)
        trained = [p for p in module.parameters() if p.requires_grad]
        found["fit", stage, form] = {
            "differs": same(got, expected),
            "sent_nbytes": callback.sent_nbytes,
            "held": callback.held_nbytes / sum(p.nbytes for p in trained),
        }
    for source in ("ddp/epoch=0", *(f"{s}{f}/epoch=0" for s, f in ZEROS), "3sharded/within"):
        for reader in (1, 3):
            got = fit(zero(reader), [ZeroEMA(DECAY)], ckpt_path=f"{folder}/{source}.ckpt")
            found["resumed", source, reader] = same(got, expected, 1, "within" not in source)
    for source in ("1consolidated/epoch=0", "3consolidated/within", "3consolidated/epoch=0"):
        got = fit(ddp(), [stock()], ckpt_path=f"{folder}/{source}.ckpt")
        found["resumed", source, "ddp"] = same(got, expected, 1, "within" not in source)

    expected = fit(ddp(), [stock(get_swa_avg_fn())])
    mean = functools.partial(ZeroEMA, average="mean")
    found["mean"] = {stage: same(fit(zero(stage), [mean()]), expected) for stage in (0, 1, 3)}
    expected = fit(ddp(), [stock()], module=TwoOptimizers())
    ema = functools.partial(ZeroEMA, DECAY, update_every_n_steps=2)
    found["two optimizers"] = {
        stage: same(fit(zero(stage), [ema()], module=TwoOptimizers()), expected) for stage in (2, 3)
    }
    for name, make in (("weight averaging", stock), ("swa", swa)):
        options = {"max_epochs": 4 if make is swa else EPOCHS}
        last = f"epoch={options['max_epochs'] - 2}.ckpt"
        expected = fit(ddp(), [make()], f"{folder}/{name}", **options)
        found[name] = {}
        for stage, form in ((1, "consolidated"), (2, "sharded")):
            here = f"{folder}/{name}{stage}"
            got = fit(zero(stage, form), [make()], here, **options)
            found[name][stage] = same(got, expected)
            for source in (f"{folder}/{name}", here):
                options["ckpt_path"] = f"{source}/{last}"
                got = fit(zero(stage, form), [make()], **options)
                after = fit(ddp(), [make()], **options | {"ckpt_path": f"{folder}/{name}/{last}"})
                found[name][stage, source] = same(got, after)
            del options["ckpt_path"]

    late = fit(zero(3), [ZeroEMA(DECAY)], f"{folder}/late", BuiltLate())
    found["built late"] = same(late, fit(zero(2), [ZeroEMA(DECAY)]))
    got = fit(zero(3), [ZeroEMA(DECAY)], None, BuiltLate(), ckpt_path=f"{folder}/late/epoch=0.ckpt")
    found["built late, resumed"] = same(got, late, 1, 1)
    return found


@functools.cache
def outcomes() -> tuple[list[dict[str, Any]], tempfile.TemporaryDirectory]:
    folder = tempfile.TemporaryDirectory(prefix="averages")
    return run_ranks(averages, 2, folder.name), folder


@pytest.mark.parametrize(("stage", "form"), ZEROS)
def test_training_validation_and_end_equal_weight_averaging_under_ddp(stage, form):
    for found in outcomes()[0]:
        assert not found["fit", stage, form]["differs"]


@pytest.mark.parametrize(("stage", "form"), ZEROS)
def test_an_update_sends_nothing_and_a_rank_holds_its_share(stage, form):
    held = [found["fit", stage, form] for found in outcomes()[0]]
    assert [each["sent_nbytes"] for each in held] == [0, 0]
    assert sum(each["held"] for each in held) == pytest.approx(1)
    assert all(each["held"] < 0.6 for each in held)


def test_any_stage_and_ddp_go_on_from_what_any_other_has_saved():
    """Also from a checkpoint that was written while the model showed the average."""
    for found in outcomes()[0]:
        resumed = {key: told for key, told in found.items() if key[0] == "resumed"}
        assert len(resumed) == 15
        assert not {key: told for key, told in resumed.items() if told}


@pytest.mark.parametrize("name", ["weight averaging", "swa"])
def test_callbacks_of_lightning_are_right_at_stages_1_and_2(name):
    """Also where they go on from a sharded checkpoint, and a batch norm is trained anew."""
    for found in outcomes()[0]:
        assert len(found[name]) == 6
        assert not any(found[name].values()), found[name]


@pytest.mark.parametrize(
    ("options", "callback", "message"),
    [
        ({"stage": 3}, stock, "WeightAveraging averages full weights .* lightning_zero.ZeroEMA"),
        ({"stage": 3}, swa, "StochasticWeightAveraging averages full weights"),
        ({"stage": 1, "exclude_frozen_parameters": True}, stock, "has no effect on what Weight"),
    ],
)
def test_callbacks_of_lightning_that_cannot_be_right_are_refused(options, callback, message):
    module = Falling()
    run = trainer(ZeroStrategy(**options), 1, callbacks=[callback()])
    with pytest.raises(ValueError, match=message):
        run.fit(module)
    run.validate(module, module.train_dataloader())


@pytest.mark.parametrize("what", ["mean", "two optimizers"])
def test_other_rhythms_and_averages(what):
    for found in outcomes()[0]:
        assert not any(found[what].values()), found[what]


def test_a_model_that_is_sharded_while_it_is_built():
    for found in outcomes()[0]:
        assert not found["built late"]
        assert not found["built late, resumed"]


def test_a_stock_reader_finds_the_average_under_state_dict():
    folder = Path(outcomes()[1].name)
    module = Averaged.load_from_checkpoint(folder / "3consolidated/epoch=0.ckpt")
    expected = torch.load(folder / "ddp/epoch=0.ckpt", weights_only=False)
    found = torch.load(folder / "3consolidated/within.ckpt", weights_only=False)
    loaded = weights(module)
    for name, value in expected["state_dict"].items():
        assert name == COUNTER or torch.equal(loaded[name], value), name
    assert equal(found["current_model_state"], expected["current_model_state"])
    assert (
        found["averaging_state"] == expected["averaging_state"] == {"n_averaged": torch.tensor(3)}
    )
    after = torch.load(folder / "1consolidated/end.ckpt", weights_only=False)
    assert equal(after["state_dict"], after["current_model_state"])


def test_one_process_goes_on_from_what_two_have_saved():
    folder = Path(outcomes()[1].name)
    for source in ("3sharded", "1consolidated"):
        expected = fit("auto", [stock()], ckpt_path=folder / "ddp/epoch=0.ckpt")
        got = fit(zero(3), [ZeroEMA(DECAY)], ckpt_path=folder / f"{source}/epoch=0.ckpt")
        assert not same(got, expected)


def low_precision(folder: str) -> dict[str, Any]:
    found = {}
    for stage in (1, 3):
        by_hand, options = OnMasters(), {"exclude_frozen_parameters": True}
        here, low = f"{folder}/{stage}", {"precision": "bf16-true"}
        callbacks = [ZeroEMA(DECAY), by_hand]
        with_average = fit(zero(stage, **options), callbacks, here, **low)
        without = fit(zero(stage), [], **low)
        low["ckpt_path"] = f"{here}/epoch=0.ckpt"
        resumed = fit(zero(stage, **options), [ZeroEMA(DECAY)], **low)
        found[stage] = {
            "resumed": same(resumed, with_average, 1, 1),
            "trains alike": with_average["losses"] == without["losses"],
            "validates another": with_average["judged"] != without["judged"],
            "average": [
                name
                for name, value in by_hand.average.items()
                if not torch.equal(with_average["weights"][name], value.bfloat16())
            ],
        }
    return found


def test_masters_are_averaged_and_saved_in_fp32(tmp_path):
    """Saved without frozen parameters, too."""
    for found in run_ranks(low_precision, 2, str(tmp_path)):
        for stage, got in found.items():
            expected = {"trains alike": True, "validates another": True, "average": []}
            assert got == {"resumed": "", **expected}, stage


class Falling(pl.LightningModule):
    """w: 1, 0.5, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.w * batch.mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1), batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.25),
        ({"from_initial_weights": True}, 0.375),
        ({"update_starting_at_step": 1}, 0.0),
        ({"update_every_n_steps": 2}, 0.5),
    ],
)
def test_numbers_by_hand(options, expected):
    module = Falling()
    trainer(ZeroStrategy(3), 1, callbacks=[ZeroEMA(0.5, **options)]).fit(module)
    assert module.w.item() == expected


class Thawing(BaseFinetuning):
    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.other)

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.other, optimizer, lr=0.5)


class Thawed(Falling):
    """v is 1, 1, 0.5, 0: frozen in the first of two epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.other.weight)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) + self.other(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=0.5)


@pytest.mark.parametrize("strategy", ["auto", ZeroStrategy(1), ZeroStrategy(3)])
def test_what_is_unfrozen_is_averaged_as_under_ddp(strategy):
    module = Thawed()
    average = stock(get_ema_avg_fn(0.5)) if strategy == "auto" else ZeroEMA(0.5)
    callbacks = [Thawing(), average]
    trainer(strategy, 1, callbacks=callbacks, max_epochs=2).fit(module)
    assert (module.w.item(), module.other.weight.item()) == (-0.5625, 0.375)


def test_no_update_leaves_the_weights_and_says_so():
    module = Falling()
    callback = ZeroEMA(update_starting_at_step=10)
    with pytest.warns(UserWarning, match="averaged nothing in 2 optimizer step"):
        trainer(ZeroStrategy(2), 1, callbacks=[callback]).fit(module)
    assert module.w.item() == 0


def test_a_second_fit_begins_a_new_average():
    callback = ZeroEMA(0.5)
    for _ in range(2):
        module = Falling()
        trainer(ZeroStrategy(3), 1, callbacks=[callback]).fit(module)
        assert (module.w.item(), callback.n_averaged) == (0.25, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, "decay must be from 0 to 1, got 1.5"),
        ({"decay": 0.9, "average": "mean"}, "decay=0.9 has no effect with average='mean'"),
        ({"average": "median"}, "average must be 'ema', 'mean' or a function, got 'median'"),
        ({"update_every_n_steps": 0}, "update_every_n_steps must be at least 1, got 0"),
        ({"update_starting_at_step": -1}, "must not be negative, got -1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroEMA(**options)


@pytest.mark.parametrize(
    ("strategy", "others", "message"),
    [
        ("auto", [], "SingleDeviceStrategy: use Lightning's WeightAveraging"),
        (ZeroStrategy(1), [stock()], "ZeroEMA and WeightAveraging would both exchange"),
        (ZeroStrategy(1), [ZeroEMA()], "ZeroEMA and ZeroEMA would both exchange"),
    ],
)
def test_what_it_cannot_work_with_is_refused(strategy, others, message):
    with pytest.raises(ValueError, match=message):
        trainer(strategy, 1, callbacks=[ZeroEMA(), *others]).fit(Falling())
