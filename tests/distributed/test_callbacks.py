"""Callbacks, flags and tools of Lightning do what they do under DDP: one function a case.

Sums of two ranks have one order, so what a case returns is equal to the last bit.
"""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    RichModelSummary,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_zero import ZeroModelSummary, ZeroStrategy
from tests.helpers.models import (
    LENGTH,
    VOCAB,
    Language,
    TinyGPT,
    difference,
    trainer,
    weights,
)
from tests.helpers.spawn import run_ranks

KINDS = ("ddp", 1, 2, 3)
STAGES = (1, 2, 3)
Found = dict[str, Any]


class Model(Language):
    """Has a learning rate, an input for summaries, and batch norm."""

    def __init__(self, steps: int = 4, **options: Any) -> None:
        super().__init__(self.momentum, steps, **options)
        self.lr, self.batch_size = 0.05, 2
        self.norm = nn.BatchNorm1d(LENGTH)
        self.example_input_array = torch.zeros(2, LENGTH, dtype=torch.long)

    @staticmethod
    def momentum(module: Model) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=module.lr, momentum=0.9)

    def forward(self, tokens: Tensor) -> Tensor:
        one_hot = F.one_hot(tokens, VOCAB).to(self.norm.weight.dtype)
        return self.model(tokens) + self.norm(one_hot).square().mean()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self(batch)
        self.val_losses.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)


class BuiltLate(Model):
    """Sharded while it is built, at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.model = TinyGPT()


def strategy(kind: Any, **options: Any) -> Any:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=20))
    return ZeroStrategy(kind, bucket_numel=900, timeout=20, **options)


def fit(kind: Any, module: Model | None = None, zero: Any = None, **options: Any) -> Found:
    """Train; what has come out of it."""
    module = module or Model()
    run = trainer(strategy(kind, **(zero or {})), 2, **options)
    run.fit(module)
    return result(module, run)


def result(module: Language, run: pl.Trainer) -> Found:
    return {
        "losses": module.losses,
        "judged": module.val_losses,
        "weights": {name: value.tolist() for name, value in weights(module).items()},
        "step": run.global_step,
    }


# Cases: what one returns must be the same under DDP and each stage.


def keeping(kind: type[ModelSummary], numbers: list[Any]) -> ModelSummary:
    class Keeping(kind):  # type: ignore[valid-type, misc]
        @staticmethod
        def summarize(summary_data, total_parameters, trainable_parameters, model_size, *_, **__):
            numbers.append((summary_data, total_parameters, trainable_parameters, model_size))

    return Keeping(max_depth=2)


def summaries(kind: Any, folder: Path) -> Found:
    numbers: list[Any] = []
    for make in (Model, BuiltLate, functools.partial(Model, frozen=True)):
        callbacks = [keeping(each, numbers) for each in (ModelSummary, RichModelSummary)]
        fit(kind, make(), callbacks=callbacks, max_steps=2)
    return {"shown": numbers}


def tuner(kind: Any, folder: Path) -> Found:
    module = Model(steps=12)
    run = trainer(strategy(kind), 2, default_root_dir=folder)
    found = Tuner(run).lr_find(module, num_training=8, min_lr=1e-3, max_lr=10.0)
    first = {"results": found.results, "suggestion": found.suggestion(skip_begin=1, skip_end=1)}
    module.losses.clear()
    run.fit(module)
    return {**first, "lr": module.lr, **result(module, run)}


class Finder(LearningRateFinder):
    """Looks for a learning rate in the midst of training, too."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=8, min_lr=1e-3, max_lr=1.0)
        self.results: list[Any] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)

    def lr_find(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().lr_find(trainer, module)
        self.results.append(self.optimal_lr.results)


def finder(kind: Any, folder: Path) -> Found:
    callback = Finder()
    found = fit(kind, Model(steps=10), callbacks=[callback], max_epochs=2, default_root_dir=folder)
    return {**found, "results": callback.results}


def batch_size(kind: Any, folder: Path) -> Found:
    told = []
    for find in (
        lambda: fit(kind, callbacks=[BatchSizeFinder()]),
        lambda: Tuner(trainer(strategy(kind), 2)).scale_batch_size(Model()),
    ):
        with pytest.raises(Exception, match="distributed") as caught:
            find()
        told.append((type(caught.value).__name__, str(caught.value)))
    return {"told": told}


class Kept(Logger):
    """Keeps what is logged and is the same under any strategy."""

    name = version = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        shown = {k: v for k, v in metrics.items() if k.startswith(("lr", "loss", "val_"))}
        self.lines.append((step, shown, sorted(set(metrics) - set(shown))))


def monitors(kind: Any, folder: Path) -> Found:
    logger, stopper = Kept(), EarlyStopping("val_loss", patience=0, min_delta=0.5)
    found = fit(
        kind,
        Model(steps=7, with_scheduler=True),
        callbacks=[
            LearningRateMonitor("step", log_momentum=True),
            DeviceStatsMonitor(cpu_stats=True),
            ThroughputMonitor(batch_size_fn=len, window_size=3),
            stopper,
            Timer(duration="00:01:00:00"),
        ],
        logger=logger,
        log_every_n_steps=1,
        limit_val_batches=2,
        max_epochs=5,
    )
    others = " ".join(key for _, _, keys in logger.lines for key in keys)
    assert "DeviceStatsMonitor" in others
    assert "device/batches_per_sec" in others or os.environ["RANK"] != "0"
    return {**found, "logged": logger.lines, "stopped": stopper.stopped_epoch}


def profilers(kind: Any, folder: Path) -> Found:
    told = []
    folder = folder / os.environ["RANK"]
    for profiler in (
        SimpleProfiler(folder, "simple"),
        AdvancedProfiler(folder, "advanced"),
        PyTorchProfiler(folder, "pytorch", export_to_chrome=False),
    ):
        fit(kind, profiler=profiler, limit_val_batches=2, max_epochs=2)
        (path,) = folder.glob(f"fit-{profiler.filename}*.txt")
        text = path.read_text()
        told.append(("training_step" in text, "aten::embedding" in text))
    return {"told": told}


def flags(kind: Any, folder: Path) -> Found:
    return {
        "anomaly": fit(kind, detect_anomaly=True),
        "overfit": fit(kind, overfit_batches=2, max_epochs=3, limit_val_batches=1),
        "fast": fit(kind, fast_dev_run=2, logger=None, limit_val_batches=1),
        "barebones": fit_barebones(kind),
        "sanity": fit(kind, num_sanity_val_steps=2, limit_val_batches=2, val_check_interval=2),
    }


def fit_barebones(kind: Any) -> Found:
    module = Model()
    module.log = lambda *_, **__: None
    run = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(kind),
        barebones=True,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    run.fit(module)
    return result(module, run)


class Doubled(nn.BatchNorm1d):
    """Stands for the batch norm over all ranks, which torch has for GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Doubling(LayerSync):
    """Replaces modules for the time of a fit, as ``sync_batchnorm=True`` does."""

    def apply(self, model: nn.Module) -> nn.Module:
        return self._exchange(model, Doubled)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._exchange(model, nn.BatchNorm1d)

    def _exchange(self, model: nn.Module, kind: type[nn.BatchNorm1d]) -> nn.Module:
        old = model.norm
        model.norm = kind(LENGTH)
        model.norm._parameters, model.norm._buffers = old._parameters, old._buffers
        model.norm.train(old.training)
        return model


def layer_sync(kind: Any, folder: Path) -> Found:
    module, seen = Model(), []
    module.on_train_start = lambda: seen.append(type(module.norm).__name__)
    found = fit(kind, module, plugins=[Doubling()])
    return {**found, "kinds": [*seen, type(module.norm).__name__]}


class Norms(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, ZeroStrategy):
            norm = self.trainer.strategy.grad_norm()
        else:
            norm = pl.utilities.grad_norm(self, 2)["grad_2.0_norm_total"].item()
        self.norms.append(float(f"{norm:.5g}"))


def grad_norm(kind: Any, folder: Path) -> Found:
    module = Norms()
    module.norms = []
    found = fit(kind, module)
    return {**found, "norms": module.norms}


class Measured(Model):
    """Metrics in a model of 16 bit, one of them in 64."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.wide = MeanMetric().set_dtype(torch.float64)
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")
        self.seen: list[Any] = []

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        share = torch.tensor(1 / (3 + self.global_rank + index), dtype=torch.float64)
        self.mean.update(share)
        self.wide.update(share)
        self.accuracy.update(batch.flatten() * (self.global_rank == 0), batch.flatten())
        self.log("accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        for metric in (self.mean, self.wide):
            value = metric.compute()
            self.seen.append((str(value.dtype), str(metric.mean_value.dtype), value.item()))
            metric.reset()

    def on_validation_end(self) -> None:
        self.seen.append(self.trainer.callback_metrics["accuracy"].item())


def metrics(kind: Any, folder: Path) -> Found:
    module = Measured()
    options = {"precision": "bf16-true", "max_epochs": 2, "limit_val_batches": 2}
    found = fit(kind, module, {"master_weights": False}, **options)
    return {**found, "seen": module.seen}


class Inference(Callback):
    """Has evaluations run in inference mode, as with NCCL: there Lightning enters it itself."""

    def __init__(self) -> None:
        self.mode: Any = None

    def begin(self, *_: Any) -> None:
        self.mode = torch.inference_mode()
        self.mode.__enter__()

    def end(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)

    on_validation_start = on_test_start = on_predict_start = begin
    on_validation_end = on_test_end = on_predict_end = end


def inference(kind: Any, folder: Path) -> Found:
    module = Model(frozen=True)
    options = {"max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    run = trainer(strategy(kind), 2, callbacks=[Inference()], **options)
    told = [run.validate(module, verbose=False)]
    told += [run.test(module, verbose=False), run.predict(module)]
    run.fit(module)
    told += [run.validate(module, verbose=False)]
    left = [
        name
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_inference()
    ]
    return {**result(module, run), "told": repr(told), "left": left}


Case = Callable[[Any, Path], Found]
EVERYWHERE: tuple[Case, ...] = (summaries, tuner, batch_size, layer_sync, grad_norm, inference)
AT_2_AND_3: tuple[Case, ...] = (finder, monitors, profilers, flags, metrics)
"""What looks at the engine no more closely at stage 1 than at stage 2."""
STAGES_OF = {case: STAGES for case in EVERYWHERE} | {case: (2, 3) for case in AT_2_AND_3}
CASES = [(case.__name__, stage) for case, stages in STAGES_OF.items() for stage in stages]


def run_cases(root: str) -> dict[tuple[str, Any], Found]:
    found: dict[tuple[str, Any], Found] = {}
    for case, stages in STAGES_OF.items():
        for kind in ("ddp", *stages):
            folder = Path(root) / case.__name__ / str(kind)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                found[case.__name__, kind] = case(kind, folder)
            except Exception:
                found[case.__name__, kind] = {"error": traceback.format_exc()}
    return found


@functools.cache
def outcomes() -> list[dict[tuple[str, Any], Found]]:
    with tempfile.TemporaryDirectory(prefix="callbacks") as folder:
        return run_ranks(run_cases, 2, folder)


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_equals_ddp(name, stage):
    for rank, found in enumerate(outcomes()):
        expected, got = found[name, "ddp"], found[name, stage]
        for each in (expected, got):
            assert "error" not in each, f"rank {rank}: {each['error']}"
        for key, value in expected.items():
            assert got[key] == value, f"rank {rank}: {key}"


def accumulated() -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        module, scheduler = Model(steps=7), GradientAccumulationScheduler({0: 1, 1: 3})
        run = trainer(strategy(kind), 2, max_epochs=2, callbacks=[scheduler])
        run.fit(module)
        found[kind] = run.global_step, weights(module)
    return found


def test_accumulation_scheduler_equals_ddp():
    """Stages 2 and 3 add what is reduced, DDP reduces what is added: another order of sums."""
    for found in run_ranks(accumulated, 2):
        for stage in STAGES:
            assert found[stage][0] == found["ddp"][0] == 7 + 3
            assert difference(found[stage][1], found["ddp"][1]) <= (0 if stage == 1 else 1e-6)


# ZeroModelSummary.


class Small(pl.LightningModule):
    """66 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.measured: Any = None

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.measured = self.trainer.strategy.measure_model_states()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 3, 32), batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


def shares() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for stage in (0, *STAGES):
        for precision in ("32-true", "bf16-true"):
            summary, module = ZeroModelSummary(), Small()
            run = trainer(ZeroStrategy(stage), 2, callbacks=[summary], precision=precision)
            run.fit(module)
            found[stage, precision] = summary.shares, module.measured
    return found


def test_zero_summary_tells_what_is_alive_later():
    for rank, found in enumerate(run_ranks(shares, 2)):
        for (stage, precision), (told, measured) in found.items():
            assert (told.total_numel, told.trainable_numel, told.frozen_numel) == (66, 66, 0)
            share = {"32-true": (48, 18), "bf16-true": (64, 2)}  # shards of 64 bytes, or more
            assert told.rank_numel == (share[precision][rank] if stage == 3 else 66)
            parameters, gradients, optimizer = told.states
            item_nbytes = 4 if precision == "32-true" else 2
            nans_nbytes = 2 * item_nbytes  # stand for what is not there
            rest_nbytes = measured.parameters_nbytes - parameters.rank_nbytes
            assert rest_nbytes == (nans_nbytes if stage == 3 else 0)
            assert parameters.total_nbytes == 66 * item_nbytes
            if stage >= 2:
                assert gradients.rank_nbytes + nans_nbytes == measured.gradients_nbytes
            else:
                assert gradients.rank_nbytes >= gradients.total_nbytes == 66 * item_nbytes
            per_element = 3 * 4 + (0 if precision == "32-true" else 4)
            assert optimizer.total_nbytes == 66 * per_element
            # The counters of the steps, and padding that has no moments.
            assert abs(optimizer.rank_nbytes - measured.optimizer_nbytes) <= 2 * 4


def test_zero_summary_is_a_table_below_lightnings_own(caplog):
    class Groups(Small):
        def configure_optimizers(self) -> Any:
            self.other = torch.optim.Adafactor([self.layer.weight])
            return [torch.optim.SGD([self.layer.bias], lr=0.1), self.other]

        def training_step(self, batch: Tensor, index: int) -> None:
            self.manual_backward(super().training_step(batch, index))

        def on_train_batch_end(self, *_: Any) -> None:
            pass

    module = Groups()
    module.automatic_optimization = False
    with caplog.at_level("INFO"):
        trainer(ZeroStrategy(3), 1, callbacks=[ZeroModelSummary()]).fit(module)
    text = caplog.text
    assert "66        Total params" in text
    assert "66 parameters, 66 trainable and 0 frozen; stage 3 on 1 rank(s) keeps 66" in text
    assert "State of Adafactor is not counted" in text


def test_zero_summary_needs_zero():
    with pytest.raises(ValueError, match="SingleDeviceStrategy: use Lightning's ModelSummary"):
        trainer("auto", 1, callbacks=[ZeroModelSummary()]).fit(Small())
