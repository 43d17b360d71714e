"""What users ask of partitioned parameters, on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zero import (
    ParamStatus,
    full_grad,
    full_optimizer_state,
    full_params,
    param_status,
    register_external_parameter,
    unregister_external_parameter,
)
from tests.helpers.pair import inputs, listed, make_pair
from tests.helpers.single import (
    adamw,
    assert_equal,
    batches,
    every_stage,
    make_model,
    running,
    train_plain,
    train_zero,
    weights,
)


@every_stage
def test_status_of_a_parameter_is_told_without_fetching_it(stage):
    pair = make_pair()
    assert {param_status(p) for p in pair.parameters()} == {ParamStatus.AVAILABLE}
    with running(pair, [adamw(pair)], stage, bucket_numel=1) as engine:
        away = ParamStatus.NOT_AVAILABLE if stage == 3 else ParamStatus.AVAILABLE
        assert [param_status(p) for p in pair.parameters()] == [away] * 3
        assert [param_status(p) for p in pair.parameters()] == [away] * 3
        with full_params(pair.last):
            assert param_status(listed(pair, "last.weight")) is ParamStatus.AVAILABLE
            assert param_status(listed(pair, "first.weight")) is away
        assert param_status(listed(pair, "last.weight")) is away
        seen = []
        pair.last.register_forward_hook(
            lambda *_: seen.append(param_status(listed(pair, "last.weight")))
        )
        engine.module(inputs())
        assert seen == [ParamStatus.AVAILABLE]
    assert {param_status(p) for p in pair.parameters()} == {ParamStatus.AVAILABLE}


def test_status_of_what_an_error_has_left_behind():
    pair = make_pair()
    pair.first.weight.data = torch.full((), float("nan")).expand(4, 3)
    assert param_status(pair.first.weight) is ParamStatus.NOT_AVAILABLE
    with pytest.raises(RuntimeError, match="nobody has the values of 1 parameter"):
        full_params(pair).__enter__()


# Gradients.


@every_stage
@pytest.mark.parametrize("options", [{}, {"shard_by": "tensor"}], ids=str)
def test_full_grad_is_the_gradient_of_plain_torch(stage, options):
    if options and stage == 0:
        pytest.skip("refused at stage 0")
    plain, ours = make_model(tied=True, unused=True), make_model(tied=True, unused=True)
    plain_optimizer, optimizer = adamw(plain), adamw(ours)
    with running(ours, [optimizer], stage, **options) as engine:
        for batch in batches(2):
            assert all(full_grad(p) is None for p in ours.parameters())
            plain(batch).backward()
            engine.backward(ours(batch))
            found = {name: full_grad(p) for name, p in ours.named_parameters()}
            for name, parameter in plain.named_parameters():
                if parameter.grad is None:
                    assert found[name] is None, name
                else:
                    assert torch.equal(found[name], parameter.grad), name
                    assert found[name].stride() == parameter.grad.stride()
            assert found["idle.weight"] is None
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            found["scale"].zero_()  # a copy
            engine.step(optimizer)
            optimizer.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_full_grad_shows_what_was_done_to_it(stage):
    plain, pair = make_pair(), make_pair()
    optimizer = SGD(pair.parameters(), lr=1.0)
    with running(pair, [optimizer], stage) as engine:
        plain(inputs()).backward()
        engine.backward(pair(inputs()))
        norm = engine.clip_grad_norm_(optimizer, 0.01)
        assert norm > 0.01
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        name = "last.weight"
        found = full_grad(listed(pair, name))
        torch.testing.assert_close(found, listed(plain, name).grad, rtol=1e-6, atol=0)
        before = listed(pair, name).detach().clone() if stage < 3 else pair.last.weight.clone()
        engine.step(optimizer)
        assert torch.equal(pair.last.weight, before - found)
        optimizer.zero_grad()
        assert full_grad(listed(pair, name)) is None


@every_stage
def test_full_grad_of_what_has_none(stage):
    pair = make_pair()
    assert full_grad(pair.first.weight) is None
    pair(inputs()).backward()
    assert full_grad(pair.first.weight) is pair.first.weight.grad
    pair.zero_grad()
    with running(pair, [adamw(pair)], stage) as engine:
        assert full_grad(listed(pair, "first.weight")) is None
        engine.backward(pair(inputs()))
        assert full_grad(listed(pair, "frozen.weight")) is None


@every_stage
def test_full_grad_in_a_backward_is_refused(stage):
    pair = make_pair()
    with running(pair, [adamw(pair)], stage) as engine:
        loss = pair(inputs())
        loss.register_hook(lambda _: full_grad(listed(pair, "first.weight")))
        with pytest.raises(RuntimeError, match="inside of a backward"):
            engine.backward(loss)
        engine.abort_step()


# Optimizer state.


@every_stage
def test_full_optimizer_state_is_that_of_plain_torch(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(ours)
    with running(ours, [optimizer], stage) as engine:
        scale = listed(ours, "scale")
        assert full_optimizer_state(scale, "exp_avg") is None
        train_plain(plain, plain_optimizer, 2)
        train_zero(engine, optimizer, 2)
        for name, parameter in plain.named_parameters():
            for key, value in plain_optimizer.state[parameter].items():
                found = full_optimizer_state(listed(ours, name), key)
                assert torch.equal(found, value), (name, key)
                assert found.shape == value.shape
        full_optimizer_state(scale, "exp_avg").zero_()  # a copy
        full_optimizer_state(scale, "step").zero_()
        assert full_optimizer_state(scale, "exp_avg") != 0
        assert full_optimizer_state(scale, "step") == 2
        with pytest.raises(KeyError, match=r"'scale' has no optimizer state 'momentum'.*exp_avg"):
            full_optimizer_state(scale, "momentum")


class Counting(SGD):
    """Keeps things that are no tensors of the parameter's shape."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["nothing"] = None
                    state["row"] = torch.arange(3.0)
        return super().step(closure)


@every_stage
def test_other_optimizer_state_comes_as_it_is(stage):
    pair = make_pair()
    optimizer = Counting(pair.parameters(), lr=0.1)
    with running(pair, [optimizer], stage) as engine:
        engine.backward(pair(inputs()))
        engine.step(optimizer)
        last = listed(pair, "last.weight")
        assert full_optimizer_state(last, "calls") == 1
        assert full_optimizer_state(last, "nothing") is None
        assert full_optimizer_state(last, "row").tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(KeyError, match="momentum_buffer"):
            full_optimizer_state(last, "momentum_buffer")
        assert full_optimizer_state(listed(pair, "frozen.weight"), "calls") is None


@pytest.mark.parametrize("stage", [1, 3])
def test_master_weights_are_one_more_state(stage):
    pair = make_pair(dtype=torch.bfloat16)
    optimizer = AdamW(pair.parameters(), lr=1e-4)
    with running(pair, [optimizer], stage) as engine:
        before = full_optimizer_state(listed(pair, "last.weight"), "master_weight")
        assert full_optimizer_state(listed(pair, "last.weight"), "exp_avg") is None
        engine.backward(pair(inputs(torch.bfloat16)))
        assert full_grad(listed(pair, "last.weight")).dtype == torch.float32
        engine.step(optimizer)
        after = full_optimizer_state(listed(pair, "last.weight"), "master_weight")
        assert before.dtype == after.dtype == torch.float32
        assert not torch.equal(before, after)
        assert torch.equal(after.bfloat16(), pair.last.weight)


def test_optimizer_state_inside_of_the_step_is_that_of_the_step():
    pair = make_pair()
    optimizer = adamw(pair)
    with running(pair, [optimizer], 2) as engine:
        seen = []
        optimizer.register_step_post_hook(
            lambda *_: seen.append(full_optimizer_state(listed(pair, "last.weight"), "step"))
        )
        engine.backward(pair(inputs()))
        engine.step(optimizer)
        assert seen == [1.0]


def test_optimizer_state_of_a_parameter_that_is_not_trained_is_refused():
    pair = make_pair()
    with pytest.raises(RuntimeError, match="needs an engine"):
        full_optimizer_state(pair.first.weight, "exp_avg")


# External parameters.


class Tied(nn.Module):
    """The head reads the weight of the embedding in its own forward, before that comes otherwise.

    ``kind`` says which module is registered: the head itself, a module around it that is cut
    further, or the whole.
    """

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight_of = [weight]  # a list hides it from module.parameters()
            self.scale = nn.Linear(4, 4)

        def forward(self, x):
            return self.scale(x) @ self.weight_of[0]().t()

    def __init__(self, registered):
        super().__init__()
        self.head = nn.Sequential(self.Head(lambda: self.token.weight), nn.Linear(9, 4))
        self.token = nn.Embedding(9, 4)
        reader = {"head": self.head[0], "around": self.head, "whole": self, None: None}[registered]
        if reader is not None:
            register_external_parameter(reader, self.token.weight)
            register_external_parameter(reader, self.token.weight)

    def forward(self, x):
        return self.head(x).square().mean()


@pytest.mark.parametrize("bucket_numel", [1, 1000])
@pytest.mark.parametrize("registered", ["head", "around", "whole"])
def test_external_parameter_comes_with_the_module_that_reads_it(registered, bucket_numel):
    found = {}
    for kind in (registered, None):
        torch.manual_seed(0)
        module = Tied(kind)
        with running(module, [adamw(module)], 3, bucket_numel=bucket_numel) as engine:
            loss = module(torch.ones(2, 4))
            report = engine.coordinator.passes.report
            found[kind] = report.fetched_on_access, loss.item()
            engine.backward(loss)
    assert found[registered][0] == 0
    assert found[None][0] == (bucket_numel == 1)  # else all of them are one bucket
    assert found[registered][1] == found[None][1]


@every_stage
def test_registration_changes_no_numbers(stage):
    losses = []
    for kind in ("head", None):
        torch.manual_seed(0)
        module = Tied(kind)
        optimizer = adamw(module)
        with running(module, [optimizer], stage, bucket_numel=1) as engine:
            for _ in range(3):
                loss = module(torch.ones(2, 4))
                engine.backward(loss)
                engine.step(optimizer)
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


def test_registration_can_be_taken_back():
    module = Tied("head")
    unregister_external_parameter(module.head[0], module.token.weight)
    with pytest.raises(ValueError, match=r"is not registered .* has 0 external"):
        unregister_external_parameter(module.head[0], module.token.weight)
    with running(module, [adamw(module)], 3, bucket_numel=1) as engine:
        module(torch.ones(2, 4))
        assert engine.coordinator.passes.report.fetched_on_access == 1


def test_wrong_registrations_are_refused():
    module = Tied(None)
    head, weight = module.head[0], module.token.weight
    for function in (register_external_parameter, unregister_external_parameter):
        with pytest.raises(TypeError, match="takes a module and a parameter, got Head and Tensor"):
            function(head, torch.zeros(3))
        with pytest.raises(TypeError, match="got str and Parameter"):
            function("head", weight)
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        register_external_parameter(nn.ModuleList([head]), weight)
    with running(module, [adamw(module)], 3), pytest.raises(RuntimeError, match="call it before"):
        register_external_parameter(head, listed(module, "token.weight"))


@every_stage
def test_external_parameter_of_another_model_is_refused(stage):
    module = Tied(None)
    register_external_parameter(module.head[0], nn.Parameter(torch.zeros(3, 7)))
    with (
        pytest.raises(ValueError, match=r"\(3, 7\)\] are registered for 'head\.0'.* not in"),
        running(module, [adamw(module)], stage),
    ):
        pass


def test_a_copy_of_a_module_is_not_registered():
    """As the docstring says; and it is not refused for what its original has registered."""
    twin = copy.deepcopy(Tied("whole"))
    with running(twin, [adamw(twin)], 3, bucket_numel=1) as engine:
        twin.head[0].weight_of = [lambda: twin.token.weight]
        twin(torch.ones(2, 4))
        assert engine.coordinator.passes.report.fetched_on_access == 1
