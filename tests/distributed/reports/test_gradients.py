"""Accumulation, clipping, norms, and buckets of any size."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from tests.helpers.cells import Cases, PerRank, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, adamw, linear, noise, parameter, product, sgd

CASES = Cases("gradients: windows, clipping, buckets")


# A16: accumulation.

TWO = [[1.0, 2.0], [3.0, 4.0]]
THREE = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


class Counting(Small):
    """Counts what happens once for each optimizer step, and logs its loss."""

    def __init__(self, *args, **parts):
        super().__init__(*args, **parts)
        self.counts = {"optimizer_step": 0, "on_before_optimizer_step": 0}

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss)
        return loss

    def optimizer_step(self, *args, **options):
        self.counts["optimizer_step"] += 1
        return super().optimizer_step(*args, **options)

    def on_before_optimizer_step(self, optimizer):
        self.counts["on_before_optimizer_step"] += 1


def accumulated(user, data, **options):
    player = user.trainer(accumulate_grad_batches=2, **options)
    player.fit(module := Counting(product, data, w=0.0))
    logged = float(player.callback_metrics["loss"])
    return {**weights(module), **module.counts, "steps": player.global_step, "logged": logged}


def once_for_each(steps):
    return {"steps": steps, "optimizer_step": steps, "on_before_optimizer_step": steps}


@CASES("A16", {"w": -2.5, **once_for_each(1), "logged": 0.0})
def full_window(user):
    """Two micro-batches, one step; hooks run once for it."""
    return accumulated(user, TWO)


@CASES("A16", {"w": -5.25, **once_for_each(2), "logged": PerRank([-9.0, -18.0])})
def last_window_is_not_full(user):
    """Three micro-batches, two steps; the logged loss is not divided."""
    return accumulated(user, THREE)


@CASES("A16", ranks=3, tolerance=1e-6)
def windows_on_three_ranks(user):
    """The same on three ranks."""
    return accumulated(user, [*THREE, [7.0, 8.0, 9.0]])


@CASES("A16", tolerance=1e-6)
def windows_with_autocast(user):
    """The same with bf16 autocast and Adam."""
    data = noise(5, 4)
    module = Small(lambda m, x: m.net(x).square().mean(), data, adamw(), net=linear(4, 4))
    return user.fit(module, accumulate_grad_batches=2, precision="bf16-mixed")


@CASES("A16", {"w": -7.5})
def changing_window(user):
    """One micro-batch to a step in the first epoch, two in the second."""
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    return user.fit(Small(product, TWO, w=0.0), max_epochs=2, callbacks=[schedule])


@CASES("A16", {"w": -2.5})
def by_hand(user):
    """A window of two that a user makes by manual optimization."""

    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(self, batch).sum() / 2)
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    return user.fit(Manual(product, TWO, w=0.0))


@CASES("A16", {"w": -5.25, **once_for_each(2)}, zero={"offload_optimizer": "cpu"})
def last_window_is_not_full_offloaded(user):
    """The same with the optimizer offloaded: gradients are added up in host memory."""
    found = accumulated(user, THREE)
    return {name: value for name, value in found.items() if name != "logged"}


@CASES("A16", ranks=3, tolerance=1e-6, zero={"offload_optimizer": {"ratio": 0.5}})
def windows_on_three_ranks_offloaded(user):
    """The same on three ranks, with a part of the optimizer offloaded."""
    return accumulated(user, [*THREE, [7.0, 8.0, 9.0]])


# A17: clipping.


def steep(data=((1.0,),), split=False, kind=Small, **options):
    """Gradients 3 and 4, and a frozen parameter in the loss."""

    def groups(module):
        each = [module.p, module.q]
        return torch.optim.SGD([{"params": [p]} for p in each] if split else each, lr=1.0)

    frozen = parameter([1.0] * 7, requires_grad=False)
    loss = lambda m, x: 3 * m.p + 4 * m.q + m.r.sum()  # noqa: E731
    return kind(loss, data, groups, p=0.0, q=0.0, r=frozen, **options)


class Norms(Small):
    """Writes down the norm that is to be logged."""

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        if hasattr(strategy, "grad_norm"):
            self.seen.append(strategy.grad_norm())


BY_NORM = {"p": -0.6, "q": -0.8, "r": 1.0}
BY_VALUE = {"p": -3.0, "q": -3.5, "r": 1.0}
CLIPPING = {
    "by_norm": ("By norm", steep, {}, BY_NORM),
    "by_value": ("By value", steep, {"gradient_clip_algorithm": "value"}, BY_VALUE),
    "in_windows": (
        "By norm, two micro-batches to a step",
        lambda: steep([[1.0, 1.0]]),
        {"accumulate_grad_batches": 2},
        BY_NORM,
    ),
    "two_groups": ("By norm, parameters in two groups", lambda: steep(split=True), {}, BY_NORM),
}
for name, (title, make, options, expected) in CLIPPING.items():
    limit = 3.5 if name == "by_value" else 1.0

    def run(user, make=make, options=options, limit=limit):
        return user.fit(make(), gradient_clip_val=limit, **options)

    CASES.add("A17", name, title, run, expected)
    if name in ("by_norm", "in_windows"):
        CASES.add("A17", f"{name}_of_three", f"{title}, on three ranks", run, expected, ranks=3)


@CASES("A17", {**BY_NORM, "norm": [5.0]})
def norm_before_clipping(user):
    """``strategy.grad_norm()`` is that of all shards, without what is frozen, before clipping."""
    module = steep(kind=Norms)
    return user.fit(module, gradient_clip_val=1.0) | {"norm": module.seen}


@CASES("A17", BY_NORM)
def clipped_by_hand(user):
    """``self.clip_gradients`` with manual optimization."""

    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(self, batch).sum())
            self.clip_gradients(optimizer, 1.0, "norm")
            optimizer.step()

    return user.fit(steep(kind=Manual))


@CASES("A17", BY_NORM)
def clipped_in_an_own_hook(user):
    """An overridden ``configure_gradient_clipping``."""

    class Clipping(Small):
        def configure_gradient_clipping(self, optimizer, *args, **options):
            self.clip_gradients(optimizer, 1.0, "norm")

    return user.fit(steep(kind=Clipping))


@CASES("A17", tolerance=1e-2)
def clipped_in_bf16(user):
    """By norm, with weights in bf16."""
    return user.fit(steep(), gradient_clip_val=1.0, precision="bf16-true")


# A30: buckets.


def assorted():
    """Parameters of 1, 3, 7, no dimension and many elements; a group of a single element."""

    def groups(module):
        rest = [p for p in module.parameters() if p is not module.s]
        return torch.optim.SGD([{"params": rest}, {"params": [module.s], "lr": 0.5}], lr=0.01)

    def loss(module, batch):
        small = module.one.sum() ** 2 + module.three.square().sum() + module.seven.sin().sum()
        big = module.big(batch.expand(1, 40)).square().mean()
        return module.s * batch + batch * (module.index + 1) * small + big

    torch.manual_seed(7)
    return Small(
        loss,
        [[1.0, 0.5], [3.0, 1.5], [2.0, 1.0]],
        groups,
        s=parameter(torch.tensor(2.0)),
        one=1.0,
        three=torch.arange(3.0),
        seven=torch.arange(7.0) / 7,
        big=nn.Linear(40, 40),
    )


SETTINGS = {
    "usual": {},
    "bucket_of_1": {"bucket_numel": 1},
    "bucket_of_10": {"bucket_numel": 10},
    "bucket_of_all": {"bucket_numel": 10**9},
    "without_overlap": {"overlap_comm": False, "bucket_numel": 10},
    "whole_tensors": {"shard_by": "tensor"},
}
for name, options in SETTINGS.items():
    told = ", ".join(f"{key}={value}" for key, value in options.items()) or "as it comes"
    CASES.add(
        "A30",
        name,
        f"Parameters of any size: {told}",
        lambda user: user.fit(assorted()),
        zero=options,
    )
CASES.add(
    "A30",
    "bucket_of_10_on_three_ranks",
    "Parameters of any size: bucket_numel=10, on three ranks",
    lambda user: user.fit(assorted()),
    zero={"bucket_numel": 10},
    ranks=3,
    tolerance=1e-6,
)


@CASES("A30", {"s": 1.0, "in_file": [], "value": 1.0})
def no_dimension(user):
    """A parameter without a dimension, alone in the model; its shape in the checkpoint."""
    data = [[torch.tensor(1.0)], [torch.tensor(3.0)]]
    module = Small(lambda m, x: m.s * x, data, sgd(0.5), s=parameter(torch.tensor(2.0)))
    player = user.trainer()
    player.fit(module)
    player.save_checkpoint(user.folder / "one.ckpt")
    saved = torch.load(user.folder / "one.ckpt", weights_only=False)["state_dict"]["s"]
    return {"s": module.s, "in_file": list(saved.shape), "value": saved.item()}


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
