"""Adam by columns: against whole pieces of the columns that have taken as many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.ops import adam_columns as module
from lightning_zero.ops import adam_columns_step_, adam_step_

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

pytestmark = [pytest.mark.usefixtures("native"), pytest.mark.timeout(300)]  # it may be built first


def states(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Master, averages and gradient."""
    torch.manual_seed(0)
    weights, averages = torch.randn(numel), torch.randn(numel) * 0.1
    return [weights, averages, averages.square(), torch.randn(numel).to(dtype)]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("columns", "first"), [(1, 0), (7, 3), (64, 0), (100, 99), (5000, 17)])
def test_equal_steps_give_the_bits_of_a_whole_piece(columns, first, dtype, decoupled):
    options = {**OPTIONS, "decoupled": decoupled, "maximize": columns == 64, "grad_scale": 0.37}
    whole, ours = states(1003, dtype), states(1003, dtype)
    copies = [torch.empty(1003, dtype=torch.bfloat16) for _ in range(2)]
    adam_step_(*([t] for t in whole), [5.0], copies=[copies[0]], **options)
    counts = torch.full((columns,), 5)
    adam_columns_step_(*ours, counts, first_column=first, copy=copies[1], **options)
    pairs = zip([*whole, copies[0]], [*ours, copies[1]], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(("columns", "first"), [(3, 2), (33, 5), (70, 0)])
def test_each_column_is_stepped_as_its_own_count_says(columns, first, is_native, monkeypatch):
    found, expected = states(777, torch.float32), states(777, torch.float32)
    counts = torch.arange(columns) % 4 + 1
    options = {**OPTIONS, "decoupled": True}
    own = counts[(torch.arange(777) + first) % columns]
    for count in range(1, 5):
        where = own == count
        packed = [t[where] for t in expected]
        adam_step_(*([t] for t in packed), [float(count)], **options)
        for whole, part in zip(expected, packed, strict=True):
            whole[where] = part
    if not is_native:
        monkeypatch.setattr(module, "is_native", lambda device: False)
    adam_columns_step_(*found, counts, first_column=first, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0.0 if is_native else 1e-5, atol=0.0 if is_native else 1e-7
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": torch.tensor([0, 1])}, "a step count is 0.0: counts include this step"),
        ({"steps": torch.tensor([])}, "there is no column 0 in a matrix of 0"),
        ({"first_column": 2}, "there is no column 2 in a matrix of 2"),
        ({"grad": torch.zeros(9)}, "grad"),
        ({"master": torch.zeros(8, dtype=torch.float64)}, "master.* is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    names = ("master", "exp_avg", "exp_avg_sq", "grad")
    arguments = dict(zip(names, states(8, torch.float32), strict=True))
    arguments |= {"steps": torch.tensor([1, 1]), **change}
    with pytest.raises(ValueError, match=words):
        adam_columns_step_(**arguments, **OPTIONS, decoupled=True)
