"""What the engine holds, keeps, writes and refuses, on one rank in a bare loop."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.checkpoint import consolidated
from lightning_zero.params.parameter_dict import ZeroParameterDict
from tests.helpers.single import (
    VOCAB,
    adamw,
    assert_equal,
    batches,
    every_stage,
    make_engine,
    make_model,
    running,
    sgd,
    train_plain,
    train_zero,
    weights,
)


@every_stage
def test_close_restores_plain_parameters(stage):
    plain, ours = make_model(), make_model()
    optimizer, plain_optimizer = sgd(ours), sgd(plain)
    train_plain(plain, plain_optimizer, 2)
    engine = make_engine(ours, [optimizer], stage)
    assert engine.is_open
    train_zero(engine, optimizer, 2)
    ours.zero_grad()
    engine.close()
    engine.close()
    assert not engine.is_open
    for module in ours.modules():
        assert type(module._parameters) is dict
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    for parameter in ours.parameters():
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    ours(batches(1)[0]).backward()
    plain(batches(1)[0]).backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    assert_equal(grads, {name: p.grad for name, p in plain.named_parameters()})


@every_stage
def test_model_is_evaluated_as_in_plain_torch(stage):
    plain, ours = make_model(), make_model()
    optimizer, batch = adamw(ours), batches(1)[0]
    with running(ours, [optimizer], stage) as engine, torch.no_grad():
        assert torch.equal(ours(batch), plain(batch))
        engine.module.eval()
        assert torch.equal(ours(batch), plain(batch))


def test_stage_3_holds_shards_only_between_steps():
    ours = make_model()
    optimizer = adamw(ours)
    with running(ours, [optimizer], 3) as engine:
        train_zero(engine, optimizer, 2)
        assert all(p.isnan().all() for p in engine.buckets[0].parameters)
        assert all(b.flat.untyped_storage().nbytes() == 0 for b in engine.buckets)


def test_weight_read_outside_of_a_forward_has_its_value():
    ours = make_model()
    expected = ours.head.weight.detach().clone()
    with running(ours, [adamw(ours)], 3):
        assert torch.equal(ours.head.weight, expected)


@every_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_between_steps_is_what_the_next_step_starts_from(stage, dtype):
    ours = OneWeight(dtype)
    optimizer = SGD(ours.parameters(), lr=1.0)
    with running(ours, [optimizer], stage) as engine:
        for _ in range(2):
            engine.backward(ours(None))
            with torch.no_grad():
                ours.weight.fill_(8.0)
            engine.step(optimizer)
            optimizer.zero_grad()
            assert torch.equal(ours.weight, torch.full((3,), 7.0, dtype=dtype))


@every_stage
def test_write_through_data_between_steps_is_kept(stage):
    ours = OneWeight(torch.float32)
    optimizer = SGD(ours.parameters(), lr=1.0)
    with running(ours, [optimizer], stage) as engine:
        for _ in range(2):
            engine.backward(ours(None))
            ours.weight.data.fill_(8.0)
            engine.step(optimizer)
            optimizer.zero_grad()
            assert ours.weight[0].item() == 7.0
            ours.weight.data.clamp_(max=2.0)
            assert ours(None).item() == 6.0


@every_stage
def test_weight_read_before_a_step_shows_the_new_value_after_it(stage):
    ours = OneWeight(torch.float32)
    optimizer = SGD(ours.parameters(), lr=1.0)
    with running(ours, [optimizer], stage) as engine:
        engine.backward(ours(None))
        assert ours.weight[0].item() == 1.0
        engine.step(optimizer)
        assert ours.weight[0].item() == 0.0


@every_stage
@pytest.mark.parametrize("writeback", [True, False])
def test_full_params_shows_all_values_and_keeps_writes_on_demand(stage, writeback):
    ours = make_model()
    expected = weights(ours)
    with running(ours, [adamw(ours)], stage) as engine, engine.full_params(writeback=writeback):
        assert_equal({n: p.detach() for n, p in ours.named_parameters()}, expected)
        if writeback:
            with torch.no_grad():
                ours.scale.fill_(3.0)
    assert ours.scale.item() == (3.0 if writeback else 1.5)


@every_stage
def test_module_state_dict_is_that_of_plain_torch(stage):
    plain, ours = make_model(tied=True), make_model(tied=True)
    train_plain(plain, adamw(plain), 2)
    optimizer = adamw(ours)
    with running(ours, [optimizer], stage) as engine:
        train_zero(engine, optimizer, 2)
        state = engine.module_state_dict(ours)
    assert_equal(state, plain.state_dict())
    tied = ("token.weight", "head.weight")
    assert len({state[name].data_ptr() for name in tied}) == 1
    written = io.BytesIO()
    torch.save(state, written)
    elements = sum(p.numel() for p in plain.parameters())
    assert len(written.getvalue()) < 4 * elements + 10_000


class Versioned(nn.Module):
    """Parameters without elements, which have no address, and a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.precisely_nothing = nn.Parameter(torch.empty(2, 0, dtype=torch.float64))

    def get_extra_state(self):
        return {"version": 7}


@every_stage
def test_module_state_dict_keeps_what_has_no_address(stage):
    with running(Versioned(), [], stage) as engine:
        state = engine.module_state_dict()
    assert state.pop("_extra_state") == {"version": 7}
    assert_equal(state, {name: p.detach() for name, p in Versioned().named_parameters()})
    assert state["precisely_nothing"].dtype == torch.float64


@every_stage
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_optimizer_state_round_trips_and_is_that_of_plain_torch(stage, make_optimizer):
    plain, ours, resumed = make_model(), make_model(), make_model()
    plain_optimizer, optimizer = make_optimizer(plain), make_optimizer(ours)
    train_plain(plain, plain_optimizer, 2)
    with running(ours, [optimizer], stage) as engine:
        train_zero(engine, optimizer, 2)
        module_state = engine.module_state_dict(ours)
        state = engine.optimizer_state_dict(optimizer)
    expected = plain_optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, saved in expected["state"].items():
        assert_equal(state["state"][number], saved)
    resumed.load_state_dict(module_state)
    resumed_optimizer = make_optimizer(resumed)
    with running(resumed, [resumed_optimizer], stage) as engine:
        engine.load_optimizer_state_dict(resumed_optimizer, state)
        train_zero(engine, resumed_optimizer, 2)
    train_plain(plain, plain_optimizer, 2)
    assert_equal(weights(resumed), weights(plain))


def test_optimizer_state_of_other_groups_is_refused():
    ours = make_model()
    optimizer = adamw(ours)
    with running(ours, [optimizer], 1) as engine:
        state = {"state": {}, "param_groups": [{"params": [0]}]}
        with pytest.raises(ValueError, match=r"parameter groups of \[1\] parameters"):
            engine.load_optimizer_state_dict(optimizer, state)


class OneWeight(nn.Module):
    """d loss / d weight is 1."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, _):
        return self.weight.sum()


@every_stage
@pytest.mark.parametrize("is_accumulated", [False, True])
def test_bf16_parameters_with_fp32_masters_take_small_steps(stage, is_accumulated):
    """In bf16 alone 1 - 0.001 rounds to 1, and nothing ever moves."""
    ours = OneWeight(torch.bfloat16)
    optimizer = SGD(ours.parameters(), lr=1e-3)
    with running(ours, [optimizer], stage) as engine:
        for _ in range(100):
            with engine.no_sync() if is_accumulated else nullcontext():
                engine.backward(ours(None))
            engine.step(optimizer)
            optimizer.zero_grad()
        (master,) = engine.table.masters
        assert master.has_copy
        assert torch.allclose(master.tensor[:3], torch.full((3,), 0.9), rtol=1e-5)
        state = engine.optimizer_state_dict(optimizer)["state"][0]
    assert state[consolidated.MASTER_KEY].dtype is torch.float32
    assert torch.allclose(state[consolidated.MASTER_KEY], torch.full((3,), 0.9), rtol=1e-5)
    assert torch.equal(ours.weight, torch.full((3,), 0.9, dtype=torch.bfloat16))


@every_stage
def test_bf16_parameters_without_masters_round_as_in_plain_torch(stage):
    ours = OneWeight(torch.bfloat16)
    optimizer = SGD(ours.parameters(), lr=1e-3)
    with running(ours, [optimizer], stage, master_weights=False) as engine:
        for _ in range(5):
            engine.backward(ours(None))
            engine.step(optimizer)
            optimizer.zero_grad()
        assert not engine.table.masters[0].has_copy
    assert torch.equal(ours.weight, torch.ones(3, dtype=torch.bfloat16))


@every_stage
def test_master_weights_round_trip_through_a_checkpoint(stage):
    first, second = OneWeight(torch.bfloat16), OneWeight(torch.bfloat16)
    states = []
    for module in (first, second):
        second.load_state_dict(first.state_dict())
        optimizer = SGD(module.parameters(), lr=1e-3)
        with running(module, [optimizer], stage) as engine:
            if states:
                engine.load_optimizer_state_dict(optimizer, states[0])
            for _ in range(10):
                engine.backward(module(None))
                engine.step(optimizer)
                optimizer.zero_grad()
            states.append(engine.optimizer_state_dict(optimizer))
    masters = [state["state"][0][consolidated.MASTER_KEY] for state in states]
    assert torch.allclose(masters[0], torch.full((3,), 0.99), rtol=1e-6)
    assert torch.allclose(masters[1], torch.full((3,), 0.98), rtol=1e-6)


@every_stage
@pytest.mark.parametrize("write", ["in place", "through data", "assigned data"])
def test_written_weights_have_the_last_word_over_masters(stage, write):
    """Also the way a checkpoint of weights alone takes effect."""
    ours = OneWeight(torch.bfloat16)
    optimizer = SGD(ours.parameters(), lr=1e-3)
    with running(ours, [optimizer], stage) as engine:
        for step in range(12):
            if step == 10:
                if write == "in place":
                    with torch.no_grad():
                        ours.weight[1] = 4.0
                elif write == "through data":
                    ours.weight.data[1] = 4.0
                else:
                    value = ours.weight.detach().clone()
                    value[1] = 4.0
                    ours.weight.data = value
            engine.backward(ours(None))
            engine.step(optimizer)
            optimizer.zero_grad()
        (master,) = engine.table.masters
        expected = torch.tensor([1.0 - 0.012, 4.0 - 0.002, 1.0 - 0.012])
        assert torch.allclose(master.tensor[:3], expected, atol=1e-6)


@every_stage
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_after_a_norm_are_not_stepped(stage, set_to_none):
    """The usual answer to a norm that is not finite."""
    ours = make_model()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    optimizer = SGD(ours.parameters(), lr=0.1)
    with running(ours, [optimizer], stage) as engine:
        engine.backward(ours(batches(1)[0]))
        assert engine.grad_norm() > 0
        optimizer.zero_grad(set_to_none=set_to_none)
        assert engine.grad_norm() == 0
        engine.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@every_stage
def test_assigned_data_is_what_is_trained(stage):
    ours = OneWeight(torch.float32)
    optimizer = SGD(ours.parameters(), lr=1.0)
    with running(ours, [optimizer], stage) as engine:
        ours.weight.data = torch.full((3,), 8.0)
        engine.backward(ours(None))
        engine.step(optimizer)
    assert torch.equal(ours.weight.detach(), torch.full((3,), 7.0))


@every_stage
def test_a_model_converted_in_training_is_refused(stage):
    ours = OneWeight(torch.float32)
    optimizer = SGD(ours.parameters(), lr=1.0)
    engine = ZeroEngine(ours, [optimizer], ZeroOptions(stage=stage), ShardGroups.create())
    ours.weight.data = torch.ones(3, dtype=torch.float64)

    def step():
        engine.backward(ours(None))
        engine.step(optimizer)

    with pytest.raises(RuntimeError, match=r"Convert the model before training|full_params"):
        step()
    engine.abandon()


@every_stage
def test_full_params_without_writeback_refuse_a_write(stage):
    ours = OneWeight(torch.float32)
    with running(ours, [SGD(ours.parameters(), lr=1.0)], stage) as engine:
        with (
            pytest.raises(RuntimeError, match="writeback=True"),
            engine.full_params(),
            torch.no_grad(),
        ):
            ours.weight.fill_(8.0)
        with engine.full_params(writeback=True), torch.no_grad():
            ours.weight.fill_(2.0)
    assert torch.equal(ours.weight.detach(), torch.full((3,), 2.0))


@every_stage
def test_reduce_dtype_rounds_gradients_and_nothing_else(stage):
    plain, ours = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(ours)
    with running(ours, [optimizer], stage, reduce_dtype="bfloat16") as engine:
        for batch in batches(3):
            plain(batch).backward()
            for parameter in plain.parameters():
                parameter.grad = parameter.grad.bfloat16().float()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            engine.backward(ours(batch))
            engine.step(optimizer)
            optimizer.zero_grad()
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_shards_start_at_16_byte_boundaries_whatever_the_dtypes(stage):
    ours = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 1).double())
    with running(ours, [sgd(ours)], stage, bucket_numel=1) as engine:
        for bucket in engine.buckets:
            assert bucket.layout.shard_numel * bucket.dtype.itemsize % 16 == 0
            offsets = [slot.offset * bucket.dtype.itemsize for slot in bucket.layout.slots]
            assert all(offset % 16 == 0 for offset in offsets)


@every_stage
def test_measured_bytes_follow_the_formula_on_one_rank(stage):
    ours = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = AdamW(ours.parameters())
    with running(ours, [optimizer], stage, bucket_numel=64 * 64) as engine:
        engine.backward(ours(torch.ones(1, 64)).sum())
        engine.step(optimizer)
        states = engine.measure()
    elements = 2 * 64 * 64
    assert states.parameters_nbytes == pytest.approx(4 * elements, rel=0.01)
    assert states.gradients_nbytes == pytest.approx(4 * elements, rel=0.01)
    assert states.optimizer_nbytes == pytest.approx(8 * elements, rel=0.01)


@every_stage
def test_error_in_backward_leaves_an_engine_that_trains_on(stage):
    plain, ours = make_model(), make_model()
    optimizer = sgd(ours)
    batch = batches(1)[0]

    def fail(grad):
        raise RuntimeError("on purpose")

    with running(ours, [optimizer], stage) as engine:
        loss = ours(batch)
        hooked = ours.blocks[0].norm.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.backward(loss)
        hooked.remove()
        engine.abort_step()
        optimizer.zero_grad()
        train_zero(engine, optimizer, 2)
    train_plain(plain, sgd(plain), 2)
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_forward_that_raises_leaves_an_engine_that_trains_on(stage):
    plain, ours = make_model(), make_model()
    optimizer = sgd(ours)
    with running(ours, [optimizer], stage) as engine:
        with pytest.raises(IndexError):
            ours(torch.full((1, 2), VOCAB + 5))
        engine.abort_step()
        train_zero(engine, optimizer, 2)
    train_plain(plain, sgd(plain), 2)
    assert_equal(weights(ours), weights(plain))


def test_abandoned_engine_is_off_the_module():
    ours = make_model()
    engine = make_engine(ours, [sgd(ours)], 3)
    engine.abandon()
    assert not engine.is_open
    assert not any(isinstance(m._parameters, ZeroParameterDict) for m in ours.modules())


@every_stage
def test_optimizer_of_strangers_is_refused(stage):
    stranger = nn.Parameter(torch.ones(2))
    ours = make_model()
    with pytest.raises(ValueError, match=r"1 parameter\(s\) that are not in the model"):
        make_engine(ours, [SGD([*ours.parameters(), stranger], lr=0.1)], stage)


@every_stage
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameter_is_refused_by_name(stage):
    ours = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        make_engine(ours, [], stage)


@every_stage
def test_complex_parameter_is_refused_by_name(stage):
    ours = nn.Module()
    ours.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'phase' is complex"):
        make_engine(ours, [], stage)


@every_stage
def test_parameter_unfrozen_after_setup_is_trained(stage):
    plain, ours = make_model(), make_model()
    for model in (plain, ours):
        model.head.requires_grad_(False)
    optimizer, plain_optimizer = sgd(ours), sgd(plain)
    with running(ours, [optimizer], stage) as engine:
        train_zero(engine, optimizer, 1)
        train_plain(plain, plain_optimizer, 1)
        for model in (plain, ours):
            model.head.requires_grad_(True)
        train_zero(engine, optimizer, 2)
    train_plain(plain, plain_optimizer, 2)
    assert_equal(weights(ours), weights(plain))


@every_stage
def test_module_without_trainable_parameters_is_evaluated(stage):
    ours = make_model().requires_grad_(False)
    batch = batches(1)[0]
    expected = ours(batch)
    with running(ours, [], stage):
        assert torch.equal(ours(batch), expected)


@every_stage
def test_module_without_parameters_is_taken(stage):
    ours = nn.Sequential(nn.ReLU())
    with running(ours, [], stage) as engine:
        assert ours(torch.tensor([-1.0])).item() == 0.0
        assert not engine.buckets


@every_stage
def test_step_between_forward_and_backward_is_an_error_as_in_plain_torch(stage):
    ours = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = SGD(ours.parameters(), lr=1.0)
    with running(ours, [optimizer], stage) as engine:
        x = torch.ones(2, 3).requires_grad_()
        first, second = ours(x).sum(), ours(x).sum()
        engine.backward(first)
        engine.step(optimizer)
        with pytest.raises(
            RuntimeError, match="modified by an inplace operation|in-place operation"
        ):
            engine.backward(second)
        engine.abort_step()


def test_write_through_data_between_forward_and_backward_is_not_lost():
    """The weight of the last layer is kept for backward, and is written to by hand meanwhile."""
    ours = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    optimizer = SGD(ours.parameters(), lr=0.0)
    with running(ours, [optimizer], 3, bucket_numel=1) as engine:
        for _ in range(2):
            loss = ours(torch.ones(2, 3)).sum()
            for layer in ours:
                layer.weight.data[0, 0] = 5.0
            engine.backward(loss)
            engine.step(optimizer)
            assert [layer.weight[0, 0].item() for layer in ours] == [5.0] * 3
