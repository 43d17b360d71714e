"""Weights that are shared, used outside of their module, or made of other weights."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.helpers.cells import Cases, every_cell
from tests.helpers.models import weights
from tests.helpers.small import Small, adamw, linear, noise, parameter, sgd

CASES = Cases("what a weight is, and where it is used")


# A07: a weight that is used outside of its own module.


class Applies(nn.Module):
    """Works with a weight that it is given."""

    def forward(self, x, weight):
        return F.linear(x, weight)


def added(module, batch):
    return (batch + module.lin.weight).square().mean() + module.lin(batch).mean()


def as_head(module, batch):
    return F.linear(module.lin(batch), module.table.weight).square().mean()


def as_argument(module, batch):
    return module.applies(batch, module.lin.weight).square().mean()


def attention(module, batch):
    x = batch.reshape(1, 2, 2).repeat(1, 1, 2)
    return module.attention(x, x, x, need_weights=False)[0].square().mean()


def listed(module, batch):
    first, second = module.several
    return (F.linear(batch, first) * module.named["scale"] + second).square().mean()


def in_a_cell(module, batch):
    """A part of a weight, and its transpose."""
    both = torch.einsum("i,ij,kj->k", batch, module.lin.weight[:, :4], module.lin.weight.t())
    return both.square().mean() + module.lin(batch).mean()


def outside(loss, **options):
    torch.manual_seed(5)
    parts = {"lin": linear(4, 4, seed=1)}
    if loss is as_head:
        parts["table"] = nn.Embedding(4, 4)
    if loss is as_argument:
        parts["applies"] = Applies()
    if loss is attention:
        parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True)}
    if loss is listed:
        several = nn.ParameterList([torch.ones(4, 4), torch.ones(4)])
        parts = {"several": several, "named": nn.ParameterDict({"scale": torch.ones(4)})}
    return Small(loss, noise(3, 4), sgd(0.1), **parts, **options)


for loss, title in {
    added: "A sub-module's weight is added to the input",
    as_head: "An embedding's weight is the head",
    as_argument: "A weight is passed to another module",
    attention: "Attention reads the weight of its output layer itself",
    listed: "Entries of a ParameterList and a ParameterDict",
    in_a_cell: "Slices and the transpose of a weight",
}.items():
    CASES.add("A07", loss.__name__, title, lambda user, loss=loss: user.fit(outside(loss)))


@CASES("A07", {"net.weight": 0.9, "net.bias": 0.9, "p": 0.9})
def penalty(user):
    """Half the square of all parameters, as the only loss."""

    def loss(module, batch):
        return sum(p.square().sum() for p in module.parameters()) / 2 + module.net(batch).sum() * 0

    net = nn.Linear(4, 4)
    for p in net.parameters():
        nn.init.ones_(p)
    return user.fit(Small(loss, [[torch.ones(4)]], sgd(0.1), net=net, p=[1.0, 1.0, 1.0]))


@CASES("A07", ranks=3, tolerance=1e-6)
def as_head_of_three(user):
    """The head that is an embedding, on three ranks in windows of two."""
    return user.fit(outside(as_head), accumulate_grad_batches=2)


def from_a_plain_list(user):
    """A plain list, made before training, hides a weight from its module."""
    table = linear(4, 4, seed=2)
    hidden = [table.weight]
    loss = lambda m, x: F.linear(m.lin(x), hidden[0]).square().mean()  # noqa: E731
    module = Small(loss, noise(3, 4), sgd(0.1), lin=linear(4, 4, seed=1), table=table)
    trained = user.fit(module)
    is_finite = all(bool(value.isfinite().all()) for value in trained.values())
    return trained | {"is finite": is_finite, "told": user.said("not finite") > 0}


CASES.add(
    "A07",
    "from_a_list",
    "A weight from a list made before training",
    from_a_plain_list,
    stages=(1, 2),
)
CASES.add(
    "A07",
    "told_from_a_list",
    "The same at stage 3, where it is not there: told at once, and no plausible number",
    from_a_plain_list,
    {"is finite": False, "told": True},
    stages=(3,),
)


@CASES("A07")
def in_evaluation(user):
    """The head that is an embedding, in validation before and after training."""
    module = outside(as_head, eval_data=noise(2, 4, seed=9))
    player = user.trainer(num_sanity_val_steps=1)
    player.fit(module)
    player.test(module)
    return weights(module) | {"seen": module.seen}


# A08: weights that are made of others.


def normed(make):
    layer = make(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        g, v = sorted(layer.parameters(), key=torch.numel)
        g.fill_(2.0)
        v.copy_(torch.tensor([[3.0, 4.0]]))
    return Small(lambda m, x: m.lin(x), [[torch.tensor([1.0, 0.0])]], sgd(0.1), lin=layer)


NORMED = {
    "weight_norm": (
        parametrizations.weight_norm,
        "lin.parametrizations.weight.original0",
        "lin.parametrizations.weight.original1",
    ),
    "old_weight_norm": (torch.nn.utils.weight_norm, "lin.weight_g", "lin.weight_v"),
}
for name, (make, g, v) in NORMED.items():

    def run(user, make=make):
        player = user.trainer()
        player.fit(module := normed(make))
        player.save_checkpoint(user.folder / "one.ckpt")
        file = torch.load(user.folder / "one.ckpt", weights_only=False)
        return {**weights(module), "names": sorted(file["state_dict"])}

    CASES.add(
        "A08",
        name,
        f"A layer under {make.__module__.removeprefix('torch.nn.utils.')}.weight_norm",
        run,
        {g: [[1.94]], v: [[2.9744, 4.0192]], "names": sorted([g, v])},
        tolerance=1e-6,
    )


def reparametrized(make, steps=3):
    torch.manual_seed(3)
    layer = make(linear(4, 4, seed=2))
    return Small(lambda m, x: m.lin(x).square().mean(), noise(steps, 4), sgd(0.1), lin=layer)


@CASES("A08")
def spectral_norm(user):
    """A layer whose largest singular value is 1, with buffers that move in forward."""
    return user.fit(reparametrized(parametrizations.spectral_norm))


@CASES("A08")
def orthogonal(user):
    """An orthogonal layer."""
    return user.fit(reparametrized(parametrizations.orthogonal))


class Symmetric(nn.Module):
    def forward(self, x):
        return (x + x.transpose(-1, -2)) / 2


class Scaled(nn.Module):
    """Has a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = parameter(1.5)

    def forward(self, x):
        return x * self.scale


@CASES("A08")
def own_parametrization(user):
    """A parametrization of one's own, two of them in a row, in evaluation too."""

    def make(layer):
        parametrize.register_parametrization(layer, "weight", Symmetric())
        parametrize.register_parametrization(layer, "weight", Scaled())
        return layer

    module = reparametrized(make)
    module.eval_data = noise(2, 4, seed=4)
    return user.fit(module) | {"seen": module.seen}


# A09: tied weights.


def tied(**options):
    """An embedding and its transpose as head: each weight has a gradient of 2."""

    def loss(module, batch):
        return module.emb(torch.arange(4)).sum() + module.head(torch.ones(3)).sum()

    options = {"optimizer": sgd(0.1), **options}
    module = Small(loss, emb=nn.Embedding(4, 3), head=linear(3, 4), **options)
    module.head.weight = module.emb.weight
    nn.init.ones_(module.emb.weight)
    return module


BOTH = {"emb.weight": 0.8, "head.weight": 0.8}


@CASES("A09", {**BOTH, "is_one": True, "in_file": [0.8, 0.8], "plain": 0.8})
def trained_and_saved(user):
    """Trained, saved with both names, and loaded into a plain module."""
    player = user.trainer()
    player.fit(module := tied())
    player.save_checkpoint(user.folder / "tied.ckpt")
    state = torch.load(user.folder / "tied.ckpt", weights_only=False)["state_dict"]
    plain = tied()
    plain.load_state_dict(state, strict=True)
    return {
        **weights(module),
        "is_one": module.emb.weight is module.head.weight,
        "in_file": [state[name].mean().item() for name in BOTH],
        "plain": plain.head.weight,
    }


class Measured(Small):
    """Writes down the norm of the gradients before each step."""

    def on_before_optimizer_step(self, optimizer):
        strategy = self.trainer.strategy
        measure = getattr(strategy, "grad_norm", None)
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.seen.append(measure() if measure else torch.stack(norms).norm().item())


@CASES("A09", {"norm": [48**0.5], "emb.weight": 0.9, "head.weight": 0.9}, tolerance=1e-6)
def counted_once_in_the_norm(user):
    """The shared tensor counts once in the norm: clipping to half of it halves the step."""
    module = tied()
    module.__class__ = Measured
    trained = user.fit(module, gradient_clip_val=48**0.5 / 2)
    return trained | {"norm": module.seen}


@CASES("A09", {"emb.weight": 0.6, "head.weight": 0.6, "is_one": True})
def resumed(user):
    """Still one tensor after a resume."""
    player = user.trainer()
    player.fit(tied())
    player.save_checkpoint(user.folder / "tied.ckpt")
    module = tied()
    trained = user.fit(module, ckpt_path=user.folder / "tied.ckpt", max_epochs=2)
    return trained | {"is_one": module.emb.weight is module.head.weight}


@CASES("A09", {"counted": 12})
def counted_once_in_the_summary(user):
    """ModelSummary counts the shared tensor once, while training."""

    class Counting(ModelSummary):
        def on_fit_start(self, trainer, module):
            self.counted = summarize(module).total_parameters

    counting = Counting()
    user.fit(tied(), callbacks=[counting])
    return {"counted": counting.counted}


@CASES("A09", tolerance=1e-6, ranks=3)
def tied_three_times(user):
    """One weight in three modules, with Adam, on three ranks."""

    def loss(module, batch):
        x = module.a(batch)
        return module.c(torch.tanh(module.b(x))).square().mean()

    module = Small(loss, noise(4, 4), adamw(0.01), **{n: linear(4, 4, seed=1) for n in "abc"})
    module.b.weight = module.c.weight = module.a.weight
    return user.fit(module)


@CASES("A09")
def tied_and_frozen(user):
    """A frozen tied weight beside a trained one; the checkpoint has all names."""

    def loss(module, batch):
        return module.last(module.b(module.a(batch))).square().mean()

    frozen = parameter(torch.eye(4), requires_grad=False)
    layers = {name: linear(4, 4, seed=k) for k, name in enumerate(("a", "b", "last"))}
    module = Small(loss, noise(3, 4), sgd(0.1), **layers)
    module.a.weight = module.b.weight = frozen
    player = user.trainer()
    player.fit(module)
    player.save_checkpoint(user.folder / "tied.ckpt")
    return torch.load(user.folder / "tied.ckpt", weights_only=False)["state_dict"]


@every_cell(CASES)
def test_case(outcomes, cell):
    outcomes.check(cell)
