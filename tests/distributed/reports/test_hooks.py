"""Lightning's hooks, flags and entry points do what they do under DDP."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, full_grad
from tests.helpers.cells import Cases, PerRank, every_cell
from tests.helpers.models import weights
from tests.helpers.small import (
    Small,
    adamw,
    linear,
    mlp,
    noise,
    parameter,
    product,
    sgd,
    square,
    tensor,
)

CASES = Cases("hooks, flags and entry points")
ROW = "hooks"


# The order of hooks.

HOOKS = sorted(
    name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)


class Traced(Callback):
    """Writes down which hooks come, and at which step."""

    def __init__(self):
        self.calls = []

    def write(self, name, trainer):
        self.calls.append(f"{name} {trainer.global_step}")


class TracedModule(Small):
    """The same of the module."""

    def write(self, name):
        for callback in self.trainer.callbacks:
            if isinstance(callback, Traced):
                callback.write(f"module.{name}", self.trainer)


def _traced(name):
    def callback_hook(self, trainer, *args, **options):
        self.write(name, trainer)

    def module_hook(self, *args, **options):
        self.write(name)

    setattr(Traced, name, callback_hook)
    if hasattr(pl.LightningModule, name):
        setattr(TracedModule, name, module_hook)


for name in HOOKS:
    _traced(name)


def traced(user, **options):
    module = TracedModule(square, noise(5, 5), sgd(0.1), net=mlp(), eval_data=noise(2, 5, seed=3))
    watch = Traced()
    player = user.trainer(callbacks=[watch], num_sanity_val_steps=1, **options)
    player.fit(module)
    player.test(module)
    player.predict(module)
    return {"calls": watch.calls, "count": len(watch.calls) > 60}


@CASES(ROW)
def order(user):
    """Every hook of callbacks and modules comes in DDP's order, in fit, test and predict."""
    return traced(user, gradient_clip_val=1.0)


@CASES(ROW)
def order_in_windows(user):
    """The same with three micro-batches to a step and validation after each."""
    return traced(user, accumulate_grad_batches=3, val_check_interval=1, max_epochs=2)


# Hooks that a user overrides.


@CASES(ROW, {"w": -2.0})
def own_backward(user):
    """An overridden ``backward`` is called."""

    class Doubling(Small):
        def backward(self, loss):
            (2 * loss).backward()

    return user.fit(Doubling(product, w=0.0))


@CASES(ROW, {"w": -3.0})
def own_zero_grad(user):
    """An ``optimizer_zero_grad`` that keeps gradients."""

    class Keeping(Small):
        def optimizer_zero_grad(self, *_):
            pass

    return user.fit(Keeping(product, [[1.0, 1.0]], w=0.0))


@CASES(ROW, {"w": -2.0})
def own_optimizer_step(user):
    """An ``optimizer_step`` that steps at every second batch."""

    class Seldom(Small):
        def optimizer_step(self, epoch, index, optimizer, closure=None):
            if index % 2:
                super().optimizer_step(epoch, index, optimizer, closure)
            else:
                closure()

    return user.fit(Seldom(product, [[1.0] * 4], w=0.0))


@CASES(ROW)
def own_schedule_step(user):
    """An ``lr_scheduler_step`` of one's own."""

    class Own(Small):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()
            scheduler.step()

    player = user.trainer(max_epochs=2)
    player.fit(module := Own(product, [[1.0] * 2], w=0.0))
    return weights(module) | {"rate": player.optimizers[0].param_groups[0]["lr"]}


@CASES(ROW)
def batch_hooks(user):
    """Batches are changed before and after they are moved, and may be of any type."""

    class Changing(Small):
        def train_dataloader(self):
            rows = self.data[self.trainer.global_rank]
            batches = [{"x": tensor(row), "names": ["a"]} for row in rows]
            return DataLoader(batches, batch_size=None)

        def on_before_batch_transfer(self, batch, index):
            return {**batch, "x": batch["x"] * 2}

        def on_after_batch_transfer(self, batch, index):
            return batch["x"] + 1

    return user.fit(Changing(product, [[1.0, 2.0], [3.0, 4.0]], w=0.0))


class Graded(Small):
    """Keeps the gradient that a user sees after backward."""

    def on_after_backward(self):
        for p in self.parameters():
            if isinstance(self.trainer.strategy, ZeroStrategy):
                self.seen.append(full_grad(p))
            else:
                self.seen.append(p.grad.clone())


@CASES(ROW)
def gradients_after_backward(user):
    """In ``on_after_backward`` the averaged gradient is there, on all ranks."""
    module = Graded(square, noise(3, 5), sgd(0.1), net=mlp())
    return user.fit(module) | {"seen": module.seen}


@CASES(ROW, ranks=3, tolerance=1e-6)
def gradients_after_backward_of_three(user):
    """The same on three ranks."""
    module = Graded(square, noise(3, 5), sgd(0.1), net=mlp())
    return user.fit(module) | {"seen": module.seen}


@CASES(ROW, error="None", timeout_s=2)
def no_loss(user):
    """A ``training_step`` that returns None is an error on every rank."""

    class Nothing(Small):
        def training_step(self, batch, index):
            return None if index else super().training_step(batch, index)

    return user.fit(Nothing(product, [[1.0] * 3], w=0.0))


@CASES(ROW, {"device": True, "moved": True, "group": True, "steps": 3, "shapes": [[5, 5], [5]]})
def in_configure_optimizers(user):
    """``configure_optimizers`` may ask for devices, shapes, ranks and the number of steps."""

    class Asking(Small):
        def setup(self, stage):
            self.has_group = dist.is_initialized() and dist.get_world_size() == user.world_size

        def configure_optimizers(self):
            device = self.trainer.strategy.root_device
            self.found = {
                "device": self.device == device,
                "moved": all(p.device == device for p in self.parameters()),
                "group": self.has_group,
                "steps": int(self.trainer.estimated_stepping_batches),
                "shapes": [list(p.shape) for p in self.parameters()],
            }
            return super().configure_optimizers()

    module = Asking(square, noise(5, 5), sgd(0.1), net=nn.Linear(5, 5))
    user.fit(module, accumulate_grad_batches=2)
    return module.found


# Flags.

FLAGS = {
    "fast_dev_run": {"fast_dev_run": 2},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "limit_train_batches": {"limit_train_batches": 0.5},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "num_sanity_val_steps": {"num_sanity_val_steps": 2},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "val_check_interval": {"val_check_interval": 0.5},
    "reload_dataloaders": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "barebones": {
        "barebones": True,
        **dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar"), False),
        **dict.fromkeys(("enable_model_summary",), False),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1.0,
    },
}


def flagged(user, options):
    module = Small(square, noise(4, 5), adamw(), net=mlp(), eval_data=noise(2, 5, seed=3))
    player = user.trainer(**options)
    player.fit(module)
    if options.get("deterministic"):
        torch.use_deterministic_algorithms(False)
    state = {"steps": player.global_step, "epoch": player.current_epoch}
    return {**weights(module), **state, "seen": module.seen}


for name, options in FLAGS.items():
    CASES.add(
        ROW,
        f"flag_{name}",
        f"``Trainer({name}=...)``",
        lambda user, options=options: flagged(user, options),
    )


# Values of all ranks.


@CASES(
    ROW,
    {"mean": 1.5, "gathered": [1.0, 2.0], "told": "by 0", "sum": 3.0, "all": False, "any": True},
)
def values_of_all_ranks(user):
    """``log(sync_dist=True)``, ``all_gather``, ``broadcast``, ``reduce`` and decisions."""

    class Talking(Small):
        def validation_step(self, batch, index):
            value = torch.tensor(1.0 + self.global_rank)
            strategy = self.trainer.strategy
            self.log("mean", value, sync_dist=True)
            self.found = {
                "gathered": self.all_gather(value),
                "told": strategy.broadcast(f"by {self.global_rank}"),
                "sum": strategy.reduce(value.clone(), reduce_op="sum"),
                "all": strategy.reduce_boolean_decision(self.global_rank == 0),
                "any": strategy.reduce_boolean_decision(self.global_rank == 0, all=False),
            }

    player = user.trainer()
    player.fit(module := Talking(product, w=0.0, eval_data=[[1.0]]))
    return {**module.found, "mean": float(player.callback_metrics["mean"])}


@CASES(ROW, {"epochs": 3})
def early_stopping(user):
    """EarlyStopping ends all ranks together, on a metric of all."""

    class Watched(Small):
        def validation_step(self, batch, index):
            self.log("watched", float(self.global_rank), sync_dist=True)

    player = user.trainer(max_epochs=9, callbacks=[EarlyStopping("watched", patience=2)])
    player.fit(Watched(square, noise(2, 5), net=mlp(), eval_data=[[1.0]]))
    return {"epochs": player.current_epoch}


@CASES(ROW)
def logged_metrics(user):
    """What a logger gets, with the rates of each scheduler by its name."""

    class Logging(Small):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "mine"}]

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log_dict({"loss": loss, "twice": 2 * loss}, sync_dist=True, on_epoch=True)
            return loss

    logger = CSVLogger(user.folder)
    player = user.trainer(
        logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor("step")]
    )
    player.fit(Logging(square, noise(3, 5), sgd(0.1), net=mlp()))
    own = [
        {name: value for name, value in row.items() if not name.startswith("zero/")}
        for row in (logger.experiment.metrics if user.rank == 0 else ())
    ]
    final = {name: float(value) for name, value in player.callback_metrics.items()}
    return {"rows": [str(row) for row in own if row], "final": final}


@CASES(ROW)
def metric_objects(user):
    """A torchmetrics object, reset after each epoch and reduced over ranks."""
    from torchmetrics import MeanMetric

    class Metered(Small):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.mean(loss)
            self.log("mean", self.mean)
            return loss

    player = user.trainer(max_epochs=2)
    module = Metered(square, noise(3, 5), sgd(0.1), net=mlp(), mean=MeanMetric())
    player.fit(module)
    return weights(module) | {"mean": float(player.callback_metrics["mean"])}


# Data.


class Sampled(Small):
    """Reads numbers through Lightning's own sampler."""

    def train_dataloader(self):
        return DataLoader(torch.arange(6.0), batch_size=1)

    def predict_dataloader(self):
        return DataLoader(torch.arange(5.0), batch_size=1)


@CASES(ROW)
def own_part_of_the_data(user):
    """Lightning's sampler gives each rank a part of its own, shuffled anew in each epoch."""
    seen = []
    loss = lambda m, x: seen.append(x.item()) or m.w * x  # noqa: E731
    user.fit(Sampled(loss, w=0.0), use_distributed_sampler=True, max_epochs=2)
    return {"seen": seen}


@CASES(ROW, {"predicted": PerRank([[0.0, 4.0, 8.0], [2.0, 6.0]])})
def odd_predictions(user):
    """Five samples on two ranks: each is predicted once, by a layer."""
    module = Sampled(product, evaluate=lambda m, x: m.lin(x), lin=linear(1, 1, 2.0))
    player = user.trainer(use_distributed_sampler=True)
    return {"predicted": [float(value) for value in player.predict(module)]}


@CASES(ROW)
def several_loaders(user):
    """Two loaders for training, two for validation, of different lengths."""

    class Several(Small):
        def train_dataloader(self):
            first = super().train_dataloader()
            return {"a": first, "b": DataLoader(list(first)[:2], batch_size=None)}

        def val_dataloader(self):
            first = super().val_dataloader()
            return [first, DataLoader(list(first)[:1], batch_size=None)]

        def training_step(self, batch, index):
            return super().training_step(batch["a"] + batch["b"], index)

        def validation_step(self, batch, index, dataloader_idx):
            self.seen.append(dataloader_idx)
            super().validation_step(batch, index)

    module = Several(square, noise(4, 5), sgd(0.1), net=mlp(), eval_data=noise(3, 5, seed=3))
    return user.fit(module, val_check_interval=1) | {"seen": module.seen}


@CASES(ROW)
def data_module(user):
    """A LightningDataModule with a state."""

    class Data(pl.LightningDataModule):
        def setup(self, stage):
            self.rank = self.trainer.global_rank

        def train_dataloader(self):
            return DataLoader(noise(3, 5)[self.rank], batch_size=None)

        def state_dict(self):
            return {"rank": self.rank}

    class Bare(Small):
        train_dataloader = pl.LightningModule.train_dataloader
        val_dataloader = pl.LightningModule.val_dataloader

    player = user.trainer()
    player.fit(module := Bare(square, optimizer=sgd(0.1), net=mlp()), datamodule=Data())
    return weights(module)


# Building.


@CASES(ROW, {"w": 0.9, "f": 1.0, "b": 1.0})
def other_weights_on_each_rank(user):
    """Ranks that begin with other weights and buffers train those of rank 0."""
    start = 1.0 + user.rank
    module = Small(
        lambda m, x: m.w * m.f * m.b,
        optimizer=sgd(0.1),
        w=start,
        f=parameter(start, requires_grad=False),
    )
    module.register_buffer("b", torch.tensor(start))
    return user.fit(module)


@CASES(ROW, tolerance=1e-6)
def statistics_of_rank_0(user):
    """Running statistics are those of rank 0, in memory and in evaluation."""
    net = nn.Sequential(linear(4, 4), nn.BatchNorm1d(4), linear(4, 4, seed=1))
    module = Small(square, noise(3, 6, 4), sgd(0.1), net=net, eval_data=noise(2, 6, 4, seed=8))
    trained = user.fit(module)
    return (trained if user.rank == 0 else {}) | {"seen": module.seen}


class Halves(Small):
    """One layer is made by the constructor, the other by ``configure_model``."""

    def __init__(self):
        loss = lambda m, x: m.last(m.first(x)).square().mean()  # noqa: E731
        super().__init__(loss, noise(2, 4), adamw(), first=linear(4, 4))
        self.last = None

    def configure_model(self):
        if self.last is None:
            self.last = linear(4, 4, seed=1)


@CASES(ROW)
def built_in_halves(user):
    """Layers from the constructor and from ``configure_model``, fitted twice."""
    player, module = user.trainer(), Halves()
    player.fit(module)
    player.fit_loop.max_epochs = 2
    player.fit(module)
    player.test(module)
    return weights(module)


@CASES(ROW, zero={"master_weights": False})
def built_in_init_module(user):
    """``trainer.init_module()`` with a dtype."""
    player = user.trainer(precision="bf16-true")
    with player.init_module():
        module = Small(square, noise(2, 5), sgd(0.1), net=mlp())
    kinds = sorted({str(p.dtype) for p in module.parameters()})
    player.fit(module)
    return weights(module) | {"kinds": kinds}


@CASES(ROW)
def evaluation_changes_nothing(user):
    """validate, test and predict leave weights, buffers and ``training`` alone."""
    net = nn.Sequential(linear(4, 4), nn.BatchNorm1d(4), linear(4, 4, seed=1))
    module = Small(square, net=net, eval_data=noise(2, 6, 4))
    module.net[0].eval()
    for entry in ("validate", "test", "predict"):
        getattr(user.trainer(), entry)(module)
    modes = [part.training for part in module.modules()]
    return weights(module) | {"modes": modes, "seen": module.seen}


@CASES(ROW)
def equal_runs(user):
    """Two equal runs end with equal bits."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 10.0}
    runs = [user.fit(Small(square, noise(4, 5), adamw(), net=mlp()), **options) for _ in range(2)]
    return {name: bool(torch.equal(value, runs[1][name])) for name, value in runs[0].items()}


@CASES(ROW, tolerance=1e-6)
def window_by_schedule(user):
    """GradientAccumulationScheduler with Adam, over three epochs."""
    schedule = GradientAccumulationScheduler({0: 1, 2: 2})
    module = Small(square, noise(4, 5), adamw(), net=mlp())
    return user.fit(module, max_epochs=3, callbacks=[schedule])


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
