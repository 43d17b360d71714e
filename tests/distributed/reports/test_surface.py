"""What Lightning's users do around training: initialize, summarize, average."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_zero import ZeroEMA, full_params
from tests.helpers.cells import Cases, PerRank, every_cell
from tests.helpers.small import Small, linear, noise, product, sgd, square

CASES = Cases("around training")


# A25: initialization and shapes.


class Initialized(Small):
    """Weights become 0.5 in one of the hooks; the first loss is 1 if they did."""

    def __init__(self, hook, is_whole=False):
        super().__init__(lambda m, x: m.net(x), [[torch.ones(2)]], sgd(0.1))
        self.hook, self.is_whole = hook, is_whole
        self.net = None if hook == "configure_model" else linear(2, 1, 3.0)

    def initialize(self, hook):
        if hook != self.hook:
            return
        if self.is_whole:
            with full_params(self, writeback=True):
                self.net.apply(half)
        else:
            self.net.apply(half)

    def setup(self, stage):
        self.initialize("setup")

    def configure_model(self):
        if self.net is None:
            self.net = linear(2, 1, 3.0)
        self.initialize("configure_model")

    def on_fit_start(self):
        self.initialize("on_fit_start")

    def on_train_start(self):
        self.initialize("on_train_start")


def half(layer):
    if isinstance(layer, nn.Linear):
        nn.init.constant_(layer.weight, 0.5)


class Initializing(Callback):
    def on_fit_start(self, trainer, module):
        module.initialize("callback")


def initialized(user, hook, **options):
    module = Initialized(hook, **options)
    trained = user.fit(module, callbacks=[Initializing()])
    return trained | {"losses": module.losses}


for hook in ("setup", "configure_model", "on_fit_start", "callback", "on_train_start"):
    CASES.add(
        "A25",
        f"initialized_in_{hook}",
        f"``apply(init)`` in {hook}",
        lambda user, hook=hook: initialized(user, hook),
        {"net.weight": 0.4, "losses": [1.0]},
    )


@CASES("A25", {"net.weight": 0.4, "losses": [1.0]}, ranks=3)
def initialized_whole(user):
    """``apply(init)`` in on_train_start within ``full_params``, on three ranks."""
    return initialized(user, "on_train_start", is_whole=True)


@CASES("A25")
def shapes_in_hooks(user):
    """Shapes, counts and ``state_dict`` in hooks are those of whole weights."""

    class Looking(Small):
        def look(self):
            self.seen += [list(p.shape) for p in self.parameters()]
            self.seen += [p.numel() for p in self.parameters()]
            self.seen += [list(value.shape) for value in self.state_dict().values()]
            self.seen += [value.sum().item() for value in self.state_dict().values()]

        on_fit_start = on_train_start = on_train_end = look

        def on_train_batch_end(self, *_):
            self.look()

    module = Looking(square, noise(2, 32), sgd(0.1), net=nn.Linear(32, 2))
    user.fit(module)
    return {"seen": module.seen}


def counted(user, summary, module):
    """Totals that a summary shows while training."""

    class Counting(summary):
        def summarize(self, summary_data, total, trainable, *args, **options):
            self.totals = [total, trainable]

    counting = Counting()
    user.fit(module, callbacks=[counting])
    return {"totals": getattr(counting, "totals", None)}


for summary in (ModelSummary, RichModelSummary):
    CASES.add(
        "A25",
        summary.__name__,
        f"{summary.__name__} of 66 parameters",
        lambda user, summary=summary: counted(
            user, summary, Small(square, noise(1, 32), net=nn.Linear(32, 2))
        ),
        {"totals": PerRank([[66, 66], None])},
    )


@CASES("A25", {"totals": PerRank([[100, 66], None])})
def summary_of_a_frozen_part(user):
    """A frozen part counts as such, in a model that is built in ``configure_model``."""

    class Configured(Small):
        def __init__(self, *args):
            super().__init__(*args)
            self.net = None

        def configure_model(self):
            if self.net is None:
                frozen = linear(1, 34).requires_grad_(False)
                self.net = nn.ModuleDict({"trained": nn.Linear(32, 2), "frozen": frozen})

    loss = lambda m, x: m.net["trained"](x).square().mean()  # noqa: E731
    return counted(user, ModelSummary, Configured(loss, noise(1, 32)))


# A26: averages.

AT_STAGE_3 = "stage 3|ZeroEMA"


def falling(steps=2):
    """w: 1, 0.5, 0, -0.5, ..."""
    module = Small(product, [[1.0] * steps], sgd(0.5), w=1.0)
    module.eval_data = [[1.0]]
    return module


def averaging():
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.5))


@CASES("A26", {"w": 0.25, "seen": [0.25]}, refused={3: AT_STAGE_3})
def weight_averaging(user):
    """Lightning's WeightAveraging, whose first update copies; validation sees the average."""
    module = falling()
    return user.fit(module, callbacks=[averaging()]) | {"seen": module.seen}


@CASES("A26", {"w": -0.5625}, refused={3: AT_STAGE_3})
def weight_averaging_resumed(user):
    """The same, resumed after two of four steps."""
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    user.fit(falling(4), callbacks=[averaging(), keeper], max_steps=2)
    path = user.folder / "step=2.ckpt"
    return user.fit(falling(4), ckpt_path=path, callbacks=[averaging()])


@CASES("A26", {"w": 0.9}, refused={3: AT_STAGE_3}, tolerance=1e-6)
def stochastic_weight_averaging(user):
    """Lightning's StochasticWeightAveraging."""
    average = StochasticWeightAveraging(
        swa_lrs=0.1, swa_epoch_start=1, annealing_epochs=1, annealing_strategy="linear"
    )
    module = Small(product, optimizer=sgd(0.1), w=1.0)
    return user.fit(module, max_epochs=3, callbacks=[average])


@CASES("A26", {"w": 0.25, "seen": [0.25]})
def zero_ema(user):
    """ZeroEMA, whose first update copies; validation and the end see the average."""
    module = falling()
    return user.fit(module, callbacks=[ZeroEMA(0.5)]) | {"seen": module.seen}


@CASES("A26", {"w": 0.375}, ranks=3)
def zero_ema_from_the_start(user):
    """ZeroEMA from the initial weights, on three ranks."""
    return user.fit(falling(), callbacks=[ZeroEMA(0.5, from_initial_weights=True)])


@CASES("A26", {"w": -0.5625})
def zero_ema_resumed(user):
    """ZeroEMA, resumed after two of four steps."""
    keeper = ModelCheckpoint(user.folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    user.fit(falling(4), callbacks=[ZeroEMA(0.5), keeper], max_steps=2)
    return user.fit(falling(4), ckpt_path=user.folder / "step=2.ckpt", callbacks=[ZeroEMA(0.5)])


class ByHand(Callback):
    """An average that begins with the initial weights and is put into the model at the end."""

    def __init__(self, is_whole):
        self.is_whole = is_whole

    def weights(self, module, writeback=False):
        return full_params(module if self.is_whole else (), writeback=writeback)

    def on_fit_start(self, trainer, module):
        with self.weights(module):
            self.average = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        with self.weights(module):
            for name, p in module.named_parameters():
                self.average[name].lerp_(p, 0.5)

    @torch.no_grad()
    def on_train_end(self, trainer, module):
        with self.weights(module, writeback=True):
            for name, p in module.named_parameters():
                p.copy_(self.average[name])


@CASES("A26", {"w": 0.375})
def by_hand(user):
    """An average that a user writes, with ``full_params``: the same code at every stage."""
    return user.fit(falling(), callbacks=[ByHand(is_whole=True)])


@CASES("A26", {"w": 0.375}, refused={3: "full_params"})
def by_hand_without_help(user):
    """The same without: refused at stage 3, where weights are not there between steps."""
    return user.fit(falling(), callbacks=[ByHand(is_whole=False)])


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
