"""What is installed on a module at stage 3: every use of a weight finds its value."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.helpers.single import assert_equal, running, sgd, weights

WIDTH = 6


def released(engine):
    return all(b.flat.untyped_storage().nbytes() == 0 for b in engine.buckets)


def inputs():
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4))


def make(kind):
    torch.manual_seed(0)
    return kind()


def two_steps(module, x, backward, step):
    losses = []
    for _ in range(2):
        loss = module(x)
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def compare(kind, bucket_numel=1):
    """Two steps of plain torch and of stage 3 with one bucket per unit."""
    plain, ours = make(kind), make(kind)
    plain_optimizer, optimizer = sgd(plain), sgd(ours)

    def plain_step():
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    expected = two_steps(plain, inputs(), Tensor.backward, plain_step)
    with running(ours, [optimizer], 3, bucket_numel=bucket_numel) as engine:

        def step():
            engine.step(optimizer)
            optimizer.zero_grad()

        assert two_steps(ours, inputs(), engine.backward, step) == expected
        assert released(engine)
    assert_equal(weights(ours), weights(plain))


class FunctionalTie(nn.Module):
    """Uses a child's weight in its own forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(self.other(self.inner(x)), self.inner.weight.t()).pow(2).mean()


class Attention(nn.Module):
    """Reads ``out_proj.weight`` without calling ``out_proj``."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0].pow(2).mean()


class Recurrent(nn.Module):
    """Keeps a list of its parameters besides the dict."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0].pow(2).mean()


class Parametrized(nn.Module):
    """Computes its weight from other parameters at each read."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.layer(x).pow(2).mean()


class Twice(nn.Module):
    """Runs one layer two times with another between."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.between(self.layer(x).relu())).pow(2).mean()


@dataclass
class Box:
    """Hides tensors from anything that walks tuples and dicts."""

    value: Tensor


class Boxed(nn.Module):
    class Layer(nn.Linear):
        def forward(self, box):
            return Box(super().forward(box.value))

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Layer(WIDTH, WIDTH), self.Layer(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(Box(x))).value.pow(2).mean()


class HeldWeight(nn.Module):
    """Reads a weight into a local variable and uses it after other layers ran."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weight = self.layers[0].weight
        for layer in self.layers:
            x = layer(x)
        return (x @ weight).pow(2).mean()


class Penalty(nn.Module):
    """Lists all parameters within its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        return self.layers(x).pow(2).mean() + 0.1 * penalty


class Listed(nn.Module):
    """Holds bare parameters in containers."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.zeros(WIDTH))})

    def forward(self, x):
        for weight in self.weights:
            x = F.linear(x, weight, self.biases["a"])
        return x.pow(2).mean()


class Functional(nn.Module):
    """Runs a child on parameters that it listed itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        doubled = {name: 2 * p for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, doubled, (x,)).pow(2).mean()


class OnCpu(nn.Module):
    """Has saved-tensor hooks of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            x = self.first(x).tanh()
        return self.second(x).pow(2).mean()


MODELS = [
    FunctionalTie,
    Attention,
    Recurrent,
    Parametrized,
    Twice,
    Boxed,
    HeldWeight,
    Penalty,
    OnCpu,
    Listed,
    Functional,
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("bucket_numel", [1, 50, 10**6])
def test_use_of_a_weight_wherever_it_is_equals_plain_torch(kind, bucket_numel):
    compare(kind, bucket_numel)


def test_saved_weights_are_not_held_between_forward_and_backward():
    ours = make(Twice)
    with running(ours, [sgd(ours)], 3, bucket_numel=1) as engine:
        loss = ours(inputs())
        assert released(engine)
        engine.backward(loss)
        assert released(engine)


# Tensors changed in place: autograd's own check must hold in spite of saved-tensor hooks.


def changes_an_input(layer, x):
    y = x.clone()
    out = layer(y)
    y.add_(1.0)
    return out.sum()


def changes_a_factor(layer, x):
    y = layer(x)
    out = y * y
    y.add_(1.0)
    return out.sum()


def changes_an_output_that_its_node_saved(layer, x):
    y = layer(x).sigmoid()
    out = y.sum()
    y.mul_(2.0)
    return out + y.sum()


def changes_a_view_of_what_was_saved(layer, x):
    y = layer(x)
    out = y.exp()
    out[0].zero_()
    return out.sum()


def changes_what_nobody_saved(layer, x):
    y = layer(x)
    y.add_(1.0)
    return y.sum()


def uses_in_place_activations(layer, x):
    return F.relu(layer(x), inplace=True).sum()


def changes_before_saving(layer, x):
    y = layer(x)
    y.mul_(2.0)
    return (y * y).sum()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.change = None

    def forward(self, x):
        return self.change(self.layer, x)


@pytest.mark.parametrize(
    "change",
    [
        changes_an_input,
        changes_a_factor,
        changes_an_output_that_its_node_saved,
        changes_a_view_of_what_was_saved,
    ],
)
def test_saved_tensor_changed_in_place_raises_as_autograd_does(change):
    plain, ours = make(InPlace), make(InPlace)
    plain.change = ours.change = change
    loss = plain(inputs())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with running(ours, [sgd(ours)], 3) as engine:
        loss = ours(inputs())
        with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
            engine.backward(loss)
        engine.abort_step()


@pytest.mark.parametrize(
    "change", [changes_what_nobody_saved, uses_in_place_activations, changes_before_saving]
)
def test_change_in_place_that_autograd_allows_is_allowed(change):
    def kind():
        module = InPlace()
        module.change = change
        return module

    compare(kind)


# Nothing that a forward made outlives its graph.


class Canary:
    """Stands for the memory of a node."""


class Exp(torch.autograd.Function):
    """Saves its own output, as exp, sigmoid and softmax do."""

    canaries: list[weakref.ref]

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.canary = Canary()
        Exp.canaries.append(weakref.ref(ctx.canary))
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y


ACTIVATIONS = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "relu_": lambda x: F.relu(x, inplace=True),
    "own_function": Exp.apply,
}


class Activated(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.activation = activation
        self.seen = []

    def forward(self, x):
        hidden = self.activation(self.first(x))
        self.seen.append(weakref.ref(hidden))
        return self.second(hidden).pow(2).mean()


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_backward", [True, False])
def test_activations_die_with_their_graph(activation, has_backward):
    Exp.canaries = []
    ours = Activated(ACTIVATIONS[activation])
    with running(ours, [sgd(ours)], 3, bucket_numel=1) as engine:
        for _ in range(2):
            loss = ours(inputs())
            if has_backward:
                engine.backward(loss)
            del loss
            assert [ref() for ref in ours.seen] == [None] * len(ours.seen)
            assert [ref() for ref in Exp.canaries] == [None] * len(Exp.canaries)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_closed_engine_is_not_held_by_the_module(stage):
    ours = make(Twice)
    optimizer = sgd(ours)
    with running(ours, [optimizer], stage) as engine:
        engine.backward(ours(inputs()))
        engine.step(optimizer)
        flats = [weakref.ref(bucket.flat) for bucket in engine.buckets]
    ours.zero_grad()
    assert [ref() for ref in flats] == [None] * len(flats)


def test_weight_that_evaluation_leaves_behind_can_be_trained():
    """What inference mode makes anew in place of a bucket that somebody holds is no exception."""
    ours, held = make(Twice), []
    optimizer = sgd(ours)
    ours.layer.register_forward_hook(lambda module, *_: held.append(module.weight.detach()))
    with running(ours, [optimizer], 3, bucket_numel=1) as engine:
        with torch.inference_mode():
            ours(inputs())
        expected = held[0].clone()
        engine.backward(ours(inputs()))
        engine.step(optimizer)
        assert torch.equal(held[0], expected)
        assert not torch.equal(ours.layer.weight, expected)


# Copies.


def test_deep_copy_is_a_plain_module_with_the_values():
    ours = make(Twice)
    expected, loss = weights(ours), ours(inputs()).item()
    with running(ours, [sgd(ours)], 3):
        twin = copy.deepcopy(ours)
        assert_equal(weights(twin), expected)
        assert all(type(m._parameters) is dict for m in twin.modules())
        assert twin(inputs()).item() == loss
        assert ours(inputs()).item() == loss


def test_pickle_is_a_plain_module_with_the_values():
    ours = make(FunctionalTie)
    expected, loss = weights(ours), ours(inputs()).item()
    with running(ours, [sgd(ours)], 3):
        twin = pickle.loads(pickle.dumps(ours))
    assert_equal(weights(twin), expected)
    assert twin(inputs()).item() == loss


def test_hooks_of_the_user_see_the_weights():
    ours = make(Twice)
    expected = ours.layer.weight.detach().clone()
    seen = []
    ours.layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    ours.layer.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    with running(ours, [sgd(ours)], 3, bucket_numel=1):
        ours(inputs())
    assert len(seen) == 4
    assert all(torch.equal(weight, expected) for weight in seen)
