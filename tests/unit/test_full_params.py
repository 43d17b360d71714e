"""Scopes in which parameters are whole, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_zero import full_grad, full_optimizer_state, full_params
from tests.helpers.pair import assigned, in_place, inputs, listed, make_pair, past_autograd
from tests.helpers.single import adamw, assert_equal, every_stage, running, weights

every_write = pytest.mark.parametrize("write", [in_place, past_autograd, assigned])
every_wanted = pytest.mark.parametrize(
    "wanted",
    [
        lambda pair: pair,
        lambda pair: pair.last,
        lambda pair: dict(pair.named_parameters())["last.weight"],
        lambda pair: pair.parameters(),
        lambda pair: [pair.first, dict(pair.named_parameters())["last.weight"], pair.last],
    ],
    ids=["model", "module", "parameter", "generator", "both"],
)


@every_stage
@every_wanted
def test_full_params_shows_what_is_wanted(stage, wanted):
    pair = make_pair()
    expected = weights(pair)
    with running(pair, [adamw(pair)], stage, bucket_numel=1), full_params(wanted(pair)):
        assert torch.equal(listed(pair, "last.weight"), expected["last.weight"])


@every_stage
@every_wanted
@every_write
def test_what_is_written_is_kept_if_it_is_wanted(stage, wanted, write):
    pair = make_pair()
    expected = weights(pair)
    expected["last.weight"].fill_(8.0)
    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with full_params(wanted(pair), writeback=True):
            write(listed(pair, "last.weight"), 8.0)
        with full_params(pair):
            assert_equal({n: p.detach() for n, p in pair.named_parameters()}, expected)
    assert_equal(weights(pair), expected)


@every_stage
@every_write
def test_what_one_rank_writes_is_kept(stage, write):
    pair = make_pair()
    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with full_params(pair, from_rank=0):
            write(listed(pair, "last.weight"), 8.0)
            write(listed(pair, "frozen.weight"), 7.0)
        with pytest.raises(ValueError, match="from_rank must be a rank of 0 to 0, got 1"):
            full_params(pair, from_rank=1).__enter__()
        with pytest.raises(ValueError, match="got True"):
            full_params(pair, from_rank=True).__enter__()
    assert pair.last.weight.unique().tolist() == [8.0]
    assert pair.frozen.weight.unique().tolist() == [7.0]


@every_stage
@every_write
@pytest.mark.parametrize("name", ["first.weight", "frozen.weight"])
def test_a_write_that_was_not_asked_for_is_refused_and_undone(stage, write, name):
    pair = make_pair()
    expected = weights(pair)
    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with pytest.raises(RuntimeError, match=f"{name}.* writeback=True"), full_params(pair):
            write(listed(pair, name), 8.0)
        with full_params(pair):
            assert_equal({n: p.detach() for n, p in pair.named_parameters()}, expected)
    assert_equal(weights(pair), expected)


@every_stage
@every_write
@pytest.mark.parametrize("options", [{}, {"writeback": True}, {"from_rank": 0}], ids=str)
def test_nothing_is_kept_of_a_block_that_raises(stage, write, options):
    pair = make_pair()
    expected = weights(pair)

    def fail():
        with full_params(pair, **options):
            for parameter in pair.parameters():
                write(parameter, 8.0)
            raise KeyError("mine")

    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with pytest.raises(KeyError, match="mine"):
            fail()
        with full_params(pair):
            assert_equal({n: p.detach() for n, p in pair.named_parameters()}, expected)
    assert_equal(weights(pair), expected)


@every_stage
def test_a_weight_read_by_name_in_a_block_that_raises_is_undone(stage):
    pair = make_pair()
    expected = pair.last.weight.detach().clone()

    def fail():
        with full_params(pair, writeback=True):
            in_place(pair.last.weight, 8.0)
            raise KeyError

    with running(pair, [adamw(pair)], stage, bucket_numel=1) as engine:
        with engine.step_scope():
            with pytest.raises(KeyError):
                fail()
            assert torch.equal(pair.last.weight, expected)
        with engine.step_scope():
            _ = pair.last.weight  # stays until the scope ends
            with pytest.raises(KeyError):
                fail()
            assert torch.equal(pair.last.weight, expected)
    assert torch.equal(pair.last.weight, expected)


@every_stage
def test_a_write_before_a_block_that_raises_is_kept(stage):
    pair = make_pair()

    def fail():
        with full_params(pair, writeback=True):
            past_autograd(pair.last.weight, 7.0)
            raise KeyError

    with running(pair, [adamw(pair)], stage, bucket_numel=1) as engine:
        with engine.step_scope():  # where any write to a weight that is there is kept
            in_place(pair.last.weight, 8.0)
            with pytest.raises(KeyError):
                fail()
        assert pair.last.weight.unique().tolist() == [8.0]
    assert pair.last.weight.unique().tolist() == [8.0]


@every_stage
@pytest.mark.parametrize("name", ["last.weight", "frozen.weight"])
def test_a_parameter_of_another_shape_is_not_kept(stage, name):
    pair = make_pair()
    expected = weights(pair)

    def convert():
        with full_params(pair, writeback=True):
            in_place(listed(pair, "first.weight"), 8.0)
            listed(pair, name).data = torch.zeros(2, 4, dtype=torch.float64)

    error = pytest.raises(RuntimeError, match=f"nothing was kept.*{name}.*float64")
    with running(pair, [adamw(pair)], stage, bucket_numel=1), error:
        convert()
    assert_equal(weights(pair), expected)


@every_stage
def test_what_an_inner_scope_keeps_is_no_write_of_the_outer_one(stage):
    pair = make_pair()

    def write_twice():
        with full_params(pair):
            with full_params(pair.last, writeback=True):
                past_autograd(pair.last.weight, 6.0)
            past_autograd(pair.last.weight, 5.0)

    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with full_params(pair):
            with full_params(pair.last, writeback=True):
                past_autograd(pair.last.weight, 8.0)
            with full_params([pair.first, pair.frozen], from_rank=0):
                in_place(pair.frozen.weight, 7.0)
            assert pair.last.weight.unique().tolist() == [8.0]
        assert pair.last.weight.unique().tolist() == [8.0]
        with pytest.raises(RuntimeError, match=r"last\.weight"):
            write_twice()
    assert pair.last.weight.unique().tolist() == [6.0]
    assert pair.frozen.weight.unique().tolist() == [7.0]


@every_stage
@every_write
def test_an_inner_scope_that_fails_leaves_the_writes_of_the_outer_one(stage, write):
    pair = make_pair()
    with running(pair, [adamw(pair)], stage, bucket_numel=1), full_params(pair, writeback=True):
        write(pair.last.weight, 8.0)
        with full_params(pair):  # older writes are not its own
            pass
        with pytest.raises(RuntimeError, match=r"last\.weight"), full_params(pair.last):
            write(pair.last.weight, 7.0)
        assert pair.last.weight.unique().tolist() == [8.0]
    assert pair.last.weight.unique().tolist() == [8.0]


@every_stage
def test_an_outer_scope_that_fails_leaves_what_an_inner_one_has_kept(stage):
    pair = make_pair()
    expected = pair.first.weight.detach().clone()

    def fail():
        with full_params(pair, writeback=True):
            in_place(pair.first.weight, 9.0)
            with full_params([pair.last, pair.frozen], writeback=True):
                past_autograd(pair.last.weight, 8.0)
                past_autograd(pair.frozen.weight, 7.0)
            in_place(pair.last.weight, 6.0)
            in_place(pair.frozen.weight, 5.0)
            raise KeyError

    with running(pair, [adamw(pair)], stage, bucket_numel=1):
        with pytest.raises(KeyError):
            fail()
        with full_params(pair):
            assert torch.equal(pair.first.weight, expected)
            assert pair.last.weight.unique().tolist() == [8.0]
    assert torch.equal(pair.first.weight, expected)
    assert pair.last.weight.unique().tolist() == [8.0]
    assert pair.frozen.weight.unique().tolist() == [7.0]


@every_stage
def test_weights_that_were_read_inside_of_a_scope_are_kept_as_elsewhere(stage):
    """``first`` is not held: it comes because it is read, and its write counts as any other."""
    pair = make_pair()
    with running(pair, [adamw(pair)], stage, bucket_numel=1), full_params(pair.last):
        past_autograd(pair.first.weight, 8.0)
    assert pair.first.weight.unique().tolist() == [8.0]


@every_stage
def test_an_optimizer_step_inside_is_refused(stage):
    pair = make_pair()
    optimizer = adamw(pair)
    with running(pair, [optimizer], stage) as engine:
        engine.backward(pair(inputs()))
        with full_params(pair), pytest.raises(RuntimeError, match="step was called inside"):
            engine.step(optimizer)
        engine.step(optimizer)


@every_stage
def test_a_forward_inside_sees_the_written_weights(stage):
    plain, pair = make_pair(), make_pair()
    in_place(plain.last.weight, 0.5)
    with running(pair, [adamw(pair)], stage, bucket_numel=1) as engine:
        with full_params(pair, writeback=True):
            in_place(pair.last.weight, 0.5)
            engine.backward(pair(inputs()))
        plain(inputs()).backward()
        assert torch.equal(full_grad(listed(pair, "first.weight")), plain.first.weight.grad)


@every_stage
@pytest.mark.parametrize("is_used", [True, False])
def test_a_write_between_forward_and_backward_is_an_error_as_in_plain_torch(stage, is_used):
    """Only if backward needs the weight: not for that of the first layer."""
    pair = make_pair()
    with running(pair, [adamw(pair)], stage, bucket_numel=1) as engine:
        loss = pair(inputs())
        name = "last.weight" if is_used else "first.weight"
        with full_params(pair, writeback=True):
            in_place(listed(pair, name), 0.5)
        if is_used:
            with pytest.raises(RuntimeError, match="modified by an in-?place operation"):
                engine.backward(loss)
            engine.abort_step()
        else:
            engine.backward(loss)


@pytest.mark.parametrize("stage", [2, 3])
def test_writes_are_stepped_from_also_with_master_weights(stage):
    pair = make_pair(dtype=torch.bfloat16)
    optimizer = SGD(pair.parameters(), lr=1.0)
    with running(pair, [optimizer], stage) as engine:
        engine.backward(pair(inputs(torch.bfloat16)) * 0.0)
        with full_params(pair, writeback=True):
            in_place(pair.last.weight, 8.0)
        engine.step(optimizer)
        master = full_optimizer_state(listed(pair, "last.weight"), "master_weight")
        assert master.dtype == torch.float32
        assert master.unique().tolist() == [8.0]


def test_parameters_that_no_engine_has_are_left_alone():
    pair = make_pair()
    with full_params([pair.first, pair.last.weight]):
        past_autograd(pair.first.weight, 8.0)
    assert pair.first.weight.unique().tolist() == [8.0]
    with pytest.raises(RuntimeError, match="no engine has 3 of the 3 parameters"):
        full_params(pair, from_rank=0).__enter__()
    mixed = [pair, nn.Parameter(torch.zeros(2))]
    with running(pair, [adamw(pair)], 3), pytest.raises(RuntimeError, match="has 1 of the 4"):
        full_params(mixed, from_rank=0).__enter__()


@pytest.mark.parametrize("wanted", [torch.zeros(2), "last", 3, [make_pair(), None]], ids=str)
def test_full_params_of_something_else_is_refused(wanted):
    with pytest.raises(TypeError, match="expected a module, a parameter or an iterable of both"):
        full_params(wanted).__enter__()
