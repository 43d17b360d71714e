"""Which optimizers may be stepped on slices, checked against stepping slices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.optim.geometry import check_optimizer, is_elementwise

IS_ELEMENTWISE = {
    "ASGD": True,
    "Adadelta": True,
    "Adafactor": False,
    "Adagrad": True,
    "Adam": True,
    "AdamW": True,
    "Adamax": True,
    "Muon": False,
    "NAdam": True,
    "RAdam": True,
    "RMSprop": True,
    "Rprop": True,
    "SGD": True,
}
REFUSED = {"LBFGS", "SparseAdam"}


class Rule(Optimizer):
    """An optimizer from outside of torch: ``update`` maps a gradient to a step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.update(p.grad))


class Sign(Rule):
    def update(self, grad):
        return grad.sign()


class Normalized(Rule):
    def update(self, grad):
        return grad / grad.norm()


class Rows(Rule):
    """Works on matrices only."""

    def update(self, grad):
        return grad / grad.norm(dim=1, keepdim=True)


class ClipsWhole(torch.optim.AdamW):
    """A subclass of a known class that looks at whole tensors."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.norm()
        return super().step(closure)


class LAMB(Sign):
    """Refused on slices by its name, whatever it does on the trial matrix."""


class LambChild(LAMB):
    pass


def parameters():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(5, 3, generator=generator))]


def torch_optimizers():
    return {
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def slices_step_alike(make):
    """Step a matrix, and its two slices, three times: the definition of element-wise."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(6, 5, generator=generator)
    grads = torch.randn(3, 6, 5, generator=generator)
    parts = [nn.Parameter(part.clone()) for part in whole.flatten().split([11, 19])]
    whole = nn.Parameter(whole)
    on_whole, on_parts = make([whole]), make(parts)
    for grad in grads:
        whole.grad = grad.clone()
        for part, part_grad in zip(parts, grad.flatten().split([11, 19]), strict=True):
            part.grad = part_grad.clone()
        on_whole.step()
        on_parts.step()
    return torch.allclose(whole.flatten(), torch.cat(parts), rtol=1e-6, atol=1e-7)


def test_every_optimizer_of_torch_has_an_expected_answer():
    assert set(torch_optimizers()) == IS_ELEMENTWISE.keys() | REFUSED


@pytest.mark.parametrize("name", IS_ELEMENTWISE)
def test_torch_optimizer_is_classified(name):
    assert is_elementwise(torch_optimizers()[name](parameters())) is IS_ELEMENTWISE[name]


@pytest.mark.parametrize("name", [name for name, known in IS_ELEMENTWISE.items() if known])
def test_torch_optimizer_called_elementwise_steps_slices_alike(name):
    assert slices_step_alike(torch_optimizers()[name])


@pytest.mark.parametrize("kind", [Normalized, Rows, ClipsWhole, LAMB, LambChild])
def test_optimizer_that_needs_whole_tensors_is_refused_on_slices(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__} needs whole parameters.*'tensor'"):
        check_optimizer(kind(parameters()), "element")


@pytest.mark.parametrize("kind", [Normalized, Rows, ClipsWhole, LAMB])
@pytest.mark.parametrize("shard_by", ["tensor", "none"])
def test_optimizer_that_needs_whole_tensors_is_taken_where_they_are_whole(kind, shard_by):
    assert check_optimizer(kind(parameters()), shard_by) is None


def test_custom_elementwise_optimizer_is_detected():
    assert is_elementwise(Sign(parameters()))


def test_custom_class_named_as_a_torch_one_is_tried():
    kind = type("Adam", (Normalized,), {})
    assert not is_elementwise(kind(parameters()))


def test_trial_leaves_the_optimizer_alone():
    weight = parameters()
    before = weight[0].detach().clone()
    optimizer = Sign(weight)
    check_optimizer(optimizer, "element")
    assert torch.equal(weight[0], before)
    assert weight[0].grad is None
    assert optimizer.param_groups[0]["params"] == weight
    assert not optimizer.state


@pytest.mark.parametrize("shard_by", ["element", "tensor", "none"])
@pytest.mark.parametrize(
    ("name", "reason"), [("LBFGS", "closure several times"), ("SparseAdam", "sparse gradients")]
)
def test_unsupported_optimizer_is_refused_however_it_is_sharded(name, reason, shard_by):
    optimizer = torch_optimizers()[name](parameters())
    with pytest.raises(ValueError, match=rf"cannot train with {name}.*{reason}"):
        check_optimizer(optimizer, shard_by)


@pytest.mark.parametrize("shard_by", ["element", "tensor", "none"])
def test_optimizer_whose_step_requires_a_closure_is_refused(shard_by):
    class NeedsClosure(Sign):
        def step(self, closure):
            closure()

    with pytest.raises(ValueError, match="NeedsClosure: its `step` requires a closure"):
        check_optimizer(NeedsClosure(parameters()), shard_by)


class Scaled(Sign):
    """Keeps a setting outside of its groups."""

    def __init__(self, params):
        super().__init__(params)
        self.factor = 0.5

    def update(self, grad):
        return self.factor * grad


def test_custom_elementwise_optimizer_with_attributes_is_detected():
    assert is_elementwise(Scaled(parameters()))


@pytest.mark.parametrize("lr", [0.0, 1e-9])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rate_that_a_warmup_has_set_to_nothing_hides_no_norm(lr, as_tensor):
    optimizer = Normalized(parameters(), lr=torch.tensor(lr) if as_tensor else lr)
    assert not is_elementwise(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr)


@pytest.mark.parametrize(("kind", "expected"), [(Normalized, False), (Sign, True)])
def test_trial_with_a_scheduler_steps_what_is_tried_and_not_the_optimizer(kind, expected):
    """A scheduler replaces `step` of the optimizer by one that is bound to it."""
    weight = parameters()
    weight[0].grad = torch.ones_like(weight[0])
    before = weight[0].detach().clone()
    optimizer = kind(weight)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert is_elementwise(optimizer) is expected
    assert torch.equal(weight[0], before)
