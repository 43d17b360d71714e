"""Shapes of the graph, recomputation, and turning from training to evaluation and back."""

from __future__ import annotations

from collections import Counter, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.helpers.cells import AtMost, Cases, every_cell
from tests.helpers.models import difference, equal, weights
from tests.helpers.small import Small, adamw, linear, mlp, noise, sgd, square

CASES = Cases("the graph, recomputation, training and evaluation")


# A10: several forwards of one module.


@CASES("A10", {"lin.weight": -0.3})
def two_forwards(user):
    """Two forwards of one layer, one backward."""
    module = Small(lambda m, x: m.lin(x) + m.lin(2 * x), None, sgd(0.1), lin=linear(1, 1, 0.0))
    module.data = [[1.0]]
    return user.fit(module)


@CASES("A10", {"lin.weight": 0.8})
def of_its_own_output(user):
    """A layer that is applied to its own output."""
    data = [[3.0]]
    return user.fit(Small(lambda m, x: m.lin(m.lin(x)), data, sgd(0.1), lin=linear(1, 1, 2.0)))


@CASES("A10", {"lin.weight": -0.3}, ranks=3)
def two_forwards_in_a_window(user):
    """Two forwards in each of two micro-batches, on three ranks."""
    loss = lambda m, x: m.lin(x) + m.lin(2 * x)  # noqa: E731
    module = Small(loss, [[1.0, 1.0]], sgd(0.1), lin=linear(1, 1, 0.0))
    return user.fit(module, accumulate_grad_batches=2)


def reordered():
    def loss(module, batch):
        for k in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 1, 2))[module.index]:
            batch = module.layers[k](batch)
        return batch.square().mean()

    layers = nn.ModuleList(linear(4, 4, seed=k) for k in range(3))
    return Small(loss, noise(4, 4), sgd(0.1), layers=layers)


@CASES("A10")
def another_order(user):
    """Layers run in another order at each step."""
    return user.fit(reordered())


@CASES("A10", {"most": AtMost(3)})
def notices_of_another_order(user):
    """Each cause of a changed order is told once at most."""
    user.fit(reordered())
    told = Counter(text for text in user.messages if "trace" in text or "order" in text)
    return {"most": len(told) + max(told.values(), default=0) - 1}


@CASES("A10")
def one_activation_twice(user):
    """One ReLU object in two places."""
    relu = nn.ReLU()
    net = nn.Sequential(linear(5, 5, seed=0), relu, linear(5, 5, seed=1), relu, linear(5, 5))
    return user.fit(Small(square, noise(3, 5), sgd(0.1), net=net))


@CASES("A10", tolerance=1e-6)
def two_backwards_by_hand(user):
    """A batch is run twice in a step with a backward each, by hand."""

    class Twice(Small):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            for scale in (1.0, 0.5):
                self.manual_backward(square(self, scale * batch))
            optimizer.step()

    return user.fit(Twice(square, noise(3, 5), sgd(0.1), net=mlp()))


# A11: what modules take and return.


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class Named(NamedTuple):
    hidden: Tensor
    unused: Tensor


class Holder:
    """No container at all."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Cache:
    """Grows with each layer, as that of a language model."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def add(self, hidden: Tensor) -> Cache:
        self.states.append(hidden)
        return self


PACK = {
    "tensor": lambda h: h,
    "dataclass": Output,
    "namedtuple": lambda h: Named(h, 2 * h),
    "nested": lambda h: [[h], {"a": 3 * h}],
    "object": Holder,
    "with_none": lambda h: (h, None),
    "mapping": lambda h: UserDict(hidden=h, other=h.detach()),
    "generator": lambda h: iter((h,)),
    "cache": lambda h: Cache().add(h),
}


def unpack(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        if isinstance(value, Cache):
            value = value.states[-1]
        elif isinstance(value, UserDict):
            value = value["hidden"]
        elif hasattr(value, "hidden"):
            value = value.hidden
        else:
            value = next(iter(value))
    return value


class Packing(nn.Module):
    """Takes any container, returns one of its own kind."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind, self.lin = kind, linear(4, 4, seed=seed)

    def forward(self, value):
        return PACK[self.kind](torch.tanh(self.lin(unpack(value))))


def packing(kinds):
    net = nn.Sequential(*(Packing(kind, seed) for seed, kind in enumerate(kinds)))
    return Small(lambda m, x: unpack(m.net(x)).square().mean(), noise(4, 4), sgd(0.1), net=net)


def packed(user, kinds):
    trained = user.fit(packing(kinds))
    plain = user.fit(packing(["tensor"] * len(kinds)))
    told = dict(Counter(user.messages))
    return trained | {"as tensors": equal(trained, plain), "told": told}


CHAINS = {kind: (kind, kind) for kind in PACK if kind != "tensor"}
CHAINS |= {"chain": ("dataclass", "nested", "object", "cache")}
for name, kinds in CHAINS.items():
    title = f"Modules that take and return: {', '.join(dict.fromkeys(kinds))}"
    CASES.add("A11", name, title, lambda user, kinds=kinds: packed(user, kinds))


# A12: recomputation.


def blocks(run, steps=6):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    torch.manual_seed(11)
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return Small(lambda m, x: run(m.net, x).square().mean(), noise(steps, 4), sgd(0.1), net=net)


def plain(net, x):
    return net(x)


def reentrant(net, x):
    x = x.clone().requires_grad_()
    for block in net:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def not_reentrant(net, x):
    for block in net:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def nested(net, x):
    """A recomputed block within a recomputed half."""
    half = lambda x, start: not_reentrant(net[start : start + 2], x)  # noqa: E731
    for start in (0, 2):
        x = checkpoint(half, x, start, use_reentrant=False)
    return x


def sequential(net, x):
    return checkpoint_sequential(net, 2, x[None], use_reentrant=False)


def every_second(net, x):
    for index, block in enumerate(net):
        x = checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)
    return x


def recomputed(user, run, **options):
    """With and without recomputation."""
    trained = user.fit(blocks(run), **options)
    gap = difference(trained, user.fit(blocks(plain), **options))
    return trained | {"gap": gap}


for run in (reentrant, not_reentrant, nested, sequential, every_second):
    for window in (1, 2) if run in (reentrant, not_reentrant) else (1,):
        in_windows = f", {window} micro-batches to a step" if window > 1 else ""
        CASES.add(
            "A12",
            f"{run.__name__}_{window}",
            f"Recomputed blocks: {run.__name__.replace('_', ' ')}{in_windows}",
            lambda user, run=run, window=window: recomputed(
                user, run, accumulate_grad_batches=window
            ),
            ddp={},
            tolerance=0.0 if window == 1 else 1e-6,
        )


# A13: evaluation between steps.


def validated(**options):
    data = {"eval_data": noise(2, 5, seed=9), "evaluate": lambda m, x: m.net(x)}
    return Small(square, noise(4, 5), adamw(), net=mlp(), **data, **options)


@CASES("A13")
def validated_after_each_step(user):
    """Validation after each step: weights as if there were none, to the last bit."""
    trained = user.fit(module := validated(), val_check_interval=1)
    without = user.fit(validated(), limit_val_batches=0)
    return trained | {"seen": module.seen, "same": equal(trained, without)}


@CASES("A13", tolerance=1e-6)
def validated_in_a_window(user):
    """Validation between micro-batches: what was collected of gradients stays."""
    options = {"accumulate_grad_batches": 4, "val_check_interval": 1}
    trained = user.fit(validated(), **options)
    without = user.fit(validated(), accumulate_grad_batches=4, limit_val_batches=0)
    return trained | {"same": equal(trained, without)}


@CASES("A13")
def frozen_statistics(user):
    """A batch norm that is kept in ``eval()`` while its weights are trained."""

    def loss(module, batch):
        module.net[1].eval()
        return module.net(batch).square().mean()

    net = nn.Sequential(linear(4, 4), nn.BatchNorm1d(4), linear(4, 4, seed=1))
    module = Small(loss, noise(3, 6, 4), sgd(0.1), net=net)
    before = net[1].weight.detach().clone()
    trained = user.fit(module)
    return trained | {"has moved": not torch.equal(trained["net.1.weight"], before)}


@CASES("A13")
def inference_mode_in_a_hook(user):
    """A forward under ``torch.inference_mode`` between steps."""

    class Peeking(Small):
        def on_train_batch_end(self, *_):
            with torch.inference_mode():
                self.seen.append(self.net(torch.ones(5)).sum().item())

    module = Peeking(square, noise(4, 5), adamw(), net=mlp())
    return user.fit(module) | {"seen": module.seen}


@CASES("A13")
def inference_mode_first(user):
    """The model runs under ``torch.inference_mode`` before training, within a Trainer."""

    class Inferring(Small):
        def validation_step(self, batch, index):
            with torch.inference_mode():
                return super().validation_step(batch, index)

    module = Inferring(square, noise(3, 5), adamw(), net=mlp(), eval_data=noise(2, 5, seed=9))
    player = user.trainer(val_check_interval=1)
    player.validate(module)
    player.fit(module)
    return weights(module) | {"seen": module.seen}


# A14: orders of entry points.


def states(player):
    """Optimizer states alive after an evaluation."""
    return sum(len(optimizer.state) for optimizer in player.optimizers)


@CASES("A14")
def validate_then_fit(user):
    """``validate`` has no optimizer, and the ``fit`` after it is as without."""
    player, module = user.trainer(), validated()
    player.validate(module)
    before = [*module.seen]
    held = states(player)
    player.fit(module)
    return weights(module) | {"seen": before, "states": held}


@CASES("A14")
def fit_test_save(user):
    """``fit``, ``test``, then a checkpoint: it has the trained weights."""
    player, module = user.trainer(limit_val_batches=0), validated()
    player.fit(module)
    player.test(module)
    player.save_checkpoint(user.folder / "one.ckpt")
    file = torch.load(user.folder / "one.ckpt", weights_only=False)
    return {**file["state_dict"], "seen": module.seen}


@CASES("A14")
def fit_then_fit(user):
    """A second ``fit`` goes on where the first has ended."""
    player, module = user.trainer(), validated()
    player.fit(module)
    player.fit_loop.max_epochs = 2
    player.fit(module)
    return weights(module) | {"steps": player.global_step, "losses": module.losses}


@CASES("A14")
def predict_alone(user):
    """``predict`` without training."""
    return {"predicted": [float(value) for value in user.trainer().predict(validated())]}


class NoOptimizer(Small):
    """What a user has who only tests."""

    configure_optimizers = pl.LightningModule.configure_optimizers


@CASES("A14")
def module_without_an_optimizer(user):
    """``test`` of a checkpoint by a module without ``configure_optimizers``."""
    player = user.trainer()
    player.fit(validated())
    player.save_checkpoint(user.folder / "one.ckpt")
    module = NoOptimizer(square, net=mlp(seed=4), eval_data=noise(2, 5, seed=9))
    user.trainer().test(module, ckpt_path=user.folder / "one.ckpt")
    return weights(module) | {"seen": module.seen}


@CASES("A14")
def trainers_in_turn(user):
    """One module in four Trainers: predict, fit, validate, fit."""
    module = validated()
    user.trainer().predict(module)
    user.trainer().fit(module)
    user.trainer().validate(module)
    user.trainer().fit(module)
    return weights(module) | {"seen": module.seen}


@CASES("A14", ranks=3, tolerance=1e-6)
def every_entry_on_three_ranks(user):
    """All four entry points on one Trainer of three ranks."""
    player, module = user.trainer(), validated()
    for entry in (player.test, player.fit, player.predict, player.validate):
        entry(module)
    return weights(module) | {"seen": module.seen}


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
