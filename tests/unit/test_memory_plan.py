"""Bytes of model states per rank, against the figures of the ZeRO paper."""

from __future__ import annotations

import pytest

from lightning_zero.plan.memory import ModelStateBytes, model_state_nbytes


@pytest.mark.parametrize(
    ("mixed_precision", "stage", "expected"),
    [  # parameters, gradients, optimizer: bytes for 64 elements on 4 ranks
        (True, 0, (128, 128, 768)),
        (True, 1, (128, 128, 192)),
        (True, 2, (128, 32, 192)),
        (True, 3, (32, 32, 192)),
        (False, 0, (256, 256, 512)),
        (False, 1, (256, 256, 128)),
        (False, 2, (256, 64, 128)),
        (False, 3, (64, 64, 128)),
    ],
)
def test_model_state_bytes_of_each_stage(mixed_precision, stage, expected):
    assert model_state_nbytes(64, stage, 4, mixed_precision) == ModelStateBytes(*expected)


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)]
)  # figure 1 of arXiv:1910.02054: 7.5 B parameters on 64 ranks
def test_model_state_bytes_equal_the_papers_figure(stage, gigabytes):
    states = model_state_nbytes(7_500_000_000, stage, 64, mixed_precision=True)
    assert states.total_nbytes / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_shares_are_rounded_up():
    states = model_state_nbytes(1, 3, 3, mixed_precision=True)
    assert states == ModelStateBytes(1, 1, 4)


@pytest.mark.parametrize("mixed_precision", [True, False])
def test_one_rank_holds_everything_at_any_stage(mixed_precision):
    totals = {model_state_nbytes(1000, s, 1, mixed_precision).total_nbytes for s in range(4)}
    assert totals == {16_000}


@pytest.mark.parametrize("stage", [-1, 4, "1", None])
def test_unknown_stage_is_refused(stage):
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3"):
        model_state_nbytes(1, stage, 1, mixed_precision=True)
