"""Sums of squares and selected columns: against double precision and plain indexing."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.ops import (
    column_importance,
    column_words,
    gather_columns,
    scatter_columns_,
    sum_of_squares,
)
from lightning_zero.ops.columns import gather_columns_reference_, scatter_columns_reference_
from lightning_zero.ops.sums import column_squares_reference_, sum_of_squares_reference_

FORMATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("native")
each_format = pytest.mark.parametrize("dtype", FORMATS)


def mixed_tensors():
    torch.manual_seed(0)
    flat = torch.randn(200_003)
    odd = [torch.randn(n).to(FORMATS[n % 3]) for n in (0, 1, 15, 16, 17, 65_536, 65_537)]
    return [flat, flat[1:], torch.randn(30, 40).t(), torch.randn(60)[::2], *odd]


def test_sum_is_that_of_squares_in_double():
    tensors = mixed_tensors()
    expected = sum(t.double().square().sum() for t in tensors)
    found = sum_of_squares(tensors)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    total = torch.zeros((), dtype=torch.float64)
    sum_of_squares_reference_(tensors, total)
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=0)


def test_threads_do_not_change_sums():
    tensors = mixed_tensors()
    matrix = torch.randn(3000, 700)
    threads = torch.get_num_threads()
    found = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            columns = column_importance(matrix)
            found.add((sum_of_squares(tensors).item(), tuple(columns.tolist())))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1


@each_format
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_element_that_is_not_finite_shows(bad, dtype):
    tensors = [torch.ones(100_000, dtype=dtype), torch.ones(100_003, dtype=dtype)]
    assert sum_of_squares(tensors).item() == 200_003
    for place in (0, 77_777, 100_002):
        tensors[1].fill_(1)[place] = bad
        assert not sum_of_squares(tensors).isfinite()


def test_largest_finite_values_do_not_overflow():
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert sum_of_squares([largest]).isfinite()


def test_sum_of_nothing_is_zero():
    assert sum_of_squares([]).item() == 0.0
    assert sum_of_squares([torch.zeros(0)]).item() == 0.0


def test_sum_refuses_what_it_would_not_read_right():
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch.int64"):
        sum_of_squares([torch.ones(2), torch.ones(2).long()])
    with pytest.raises(ValueError, match=r"tensors\[1\] .* on meta"):
        sum_of_squares([torch.ones(2), torch.ones(2, device="meta")])


@each_format
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (1025, 513), (2100, 7), (0, 4), (4, 0)])
def test_importance_is_the_sum_of_squares_of_a_column(shape, dtype):
    torch.manual_seed(1)
    gradient = torch.randn(shape).to(dtype)
    expected = gradient.double().square().sum(0).float()
    torch.testing.assert_close(column_importance(gradient), expected, rtol=1e-6, atol=0)
    sums = torch.zeros(shape[1])
    column_squares_reference_(gradient, sums)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)


def test_importance_of_a_transposed_gradient_is_that_of_its_columns():
    gradient = torch.randn(40, 30).t()
    torch.testing.assert_close(column_importance(gradient), gradient.square().sum(0))


@each_format
def test_columns_are_taken_out_and_put_back(dtype):
    torch.manual_seed(2)
    matrix = torch.randn(100, 37).to(dtype)
    indices = torch.tensor([36, 0, 5, 17])
    packed = gather_columns(matrix, indices)
    assert torch.equal(packed, matrix[:, indices])
    also = torch.empty_like(packed)
    gather_columns_reference_(matrix, indices, also)
    assert torch.equal(also, packed)
    for scatter in (scatter_columns_, scatter_columns_reference_):
        changed, expected = matrix.clone(), matrix.clone()
        expected[:, indices] = packed * 2
        scatter(changed, indices, packed * 2)
        assert torch.equal(changed, expected)
    assert gather_columns(matrix, indices[:0]).shape == (100, 0)


@pytest.mark.parametrize("index", [-1, 37])
def test_column_that_is_not_there_is_an_error(index):
    matrix = torch.randn(100, 37)
    with pytest.raises(IndexError, match=f"no column {index}"):
        gather_columns(matrix, torch.tensor([0, index]))
    with pytest.raises(IndexError, match=f"no column {index}"):
        scatter_columns_(matrix, torch.tensor([index]), torch.zeros(100, 1))


def test_columns_that_do_not_fit_are_refused():
    matrix, indices = torch.zeros(3, 4), torch.tensor([1])
    for call, message in (
        (lambda: gather_columns(torch.zeros(3), indices), "must have two axes"),
        (lambda: gather_columns(matrix, indices.int()), "must be int64"),
        (lambda: scatter_columns_(matrix, indices, torch.zeros(3, 2)), r"must be .*\(3, 1\)"),
        (lambda: scatter_columns_(matrix.t(), indices, torch.zeros(4, 1)), "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_ops_pass_the_checks_of_torch():
    ops = torch.ops.lightning_zero
    matrix, indices = torch.randn(4, 5), torch.tensor([1, 3])
    total = torch.zeros((), dtype=torch.float64)
    torch.library.opcheck(ops.sum_of_squares_.default, ([matrix, indices.float()], total))
    torch.library.opcheck(ops.column_squares_.default, (matrix, torch.zeros(5)))
    torch.library.opcheck(ops.gather_columns_.default, (matrix, indices, torch.zeros(4, 2)))
    torch.library.opcheck(ops.scatter_columns_.default, (matrix, indices, torch.ones(4, 2)))


@pytest.mark.parametrize("numel", [0, 5, 1021, 5000, 100_001])
@pytest.mark.parametrize("columns", [1, 8, 1021])
def test_words_are_added_up_by_columns_and_wrap_around(numel, columns):
    words = torch.randint(-(2**63), 2**63 - 1, (numel,))
    padded = torch.cat((words, words.new_zeros(-numel % columns)))
    expected = padded.view(-1, columns).sum(0)
    assert column_words(words, columns).equal(expected)
