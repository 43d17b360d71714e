"""Ops on a CUDA device: what their host versions give."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.ops import (
    adam_step_,
    adam_step_undo_,
    column_importance,
    dequantize_blocks,
    gather_columns,
    quantize_blocks,
    scatter_columns_,
    sum_of_squares,
)
from lightning_zero.ops.libraries import is_native
from tests.ops.pieces import Pieces, random_pieces

FORMATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def library():
    if not is_native(torch.device("cuda")):
        pytest.skip("needs nvcc")


def on_device(pieces: Pieces) -> Pieces:
    return Pieces(**{name: [t.cuda() for t in tensors] for name, tensors in vars(pieces).items()})


def assert_equal(found: Pieces, expected: Pieces):
    for name, tensors in vars(expected).items():
        for one, other in zip(getattr(found, name), tensors, strict=True):
            assert torch.equal(one.cpu(), other), name


@pytest.mark.parametrize("copy_dtype", [None, *FORMATS])
@pytest.mark.parametrize("grad_dtype", FORMATS)
def test_steps_have_the_bits_of_the_host(grad_dtype, copy_dtype):
    host = random_pieces([1, 77, 0, 100_003], grad_dtype, copy_dtype, has_undo=True)
    device = on_device(host)
    for count in (1, 2, 3):
        for pieces in (host, device):
            pieces.step(adam_step_, count, grad_scale=0.37)
    assert_equal(device, host)
    for p in (host, device):
        adam_step_undo_(p.masters, p.exp_avgs, p.exp_avg_sqs, p.undo, p.copies)
    assert_equal(device, host)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FORMATS)
def test_integers_are_those_of_the_host(dtype, bits):
    torch.manual_seed(0)
    values = torch.randn(100_003).to(dtype)
    values[5] = float("inf")
    packed, scales = quantize_blocks(values, bits, 1024)
    on_gpu = quantize_blocks(values.cuda(), bits, 1024)
    assert torch.equal(on_gpu[0].cpu(), packed)
    assert torch.equal(on_gpu[1].cpu(), scales)
    settings = {"numel": values.numel(), "dtype": dtype}
    read = dequantize_blocks(*on_gpu, bits, 1024, **settings)
    assert torch.equal(read.cpu(), dequantize_blocks(packed, scales, bits, 1024, **settings))


@pytest.mark.parametrize("dtype", FORMATS)
def test_sums_and_columns_are_those_of_the_host(dtype):
    torch.manual_seed(1)
    matrix = torch.randn(3001, 300).to(dtype)
    there = matrix.cuda()
    sums = [sum_of_squares([m, m[:7]]) for m in (matrix, there)]
    torch.testing.assert_close(sums[1].cpu(), sums[0], rtol=1e-13, atol=0)
    assert torch.equal(sum_of_squares([there, there[:7]]), sums[1])
    assert torch.equal(column_importance(there).cpu(), column_importance(matrix))
    indices = torch.tensor([299, 0, 4])
    packed = gather_columns(there, indices.cuda())
    assert torch.equal(packed.cpu(), matrix[:, indices])
    scatter_columns_(there, indices.cuda(), packed * 2)
    matrix[:, indices] *= 2
    assert torch.equal(there.cpu(), matrix)


def test_ops_pass_the_checks_of_torch():
    pieces = on_device(random_pieces([5, 6], torch.bfloat16, torch.bfloat16, has_undo=True))
    numbers = (1e-3, 0.9, 0.999, 1e-8, 0.1, True, False, 1.0)
    lists = (pieces.masters, pieces.exp_avgs, pieces.exp_avg_sqs, pieces.grads, [1.0, 2.0])
    torch.library.opcheck(
        torch.ops.lightning_zero.adam_step_.default, (*lists, *numbers, pieces.copies, pieces.undo)
    )
