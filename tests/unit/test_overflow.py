"""What is told of steps whose gradients are not finite, and when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_zero.optim.overflow import (
    LOUD_AFTER,
    NonfiniteGradients,
    NonfiniteSteps,
    check_scale,
)

WHERE = NonfiniteGradients((1,), ("a.weight", "b", "c", "d", "e", "f", "g"))


@pytest.fixture
def optimizer():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_the_first_skip_is_told_and_the_next_few_are_only_counted(optimizer):
    steps = NonfiniteSteps()
    text, is_warning = steps.scaled(optimizer, 7, 65536.0, WHERE)
    assert not is_warning
    assert "step 7 was skipped on all ranks" in text
    assert "loss scale 65536" in text
    assert "on rank 1, in a.weight, b, c, d, e and 2 more" in text
    assert steps.scaled(optimizer, 8, 32768.0, WHERE) == ("", False)
    assert (steps.count, steps.in_a_row(optimizer)) == (2, 2)


def test_a_frozen_run_is_a_warning_ever_more_seldom(optimizer):
    steps = NonfiniteSteps()
    warned = []
    for number in range(1, 100 * LOUD_AFTER + 1):
        text, is_warning = steps.scaled(optimizer, 0, 1.0, WHERE)
        if is_warning:
            assert f"{number} steps in a row" in text
            warned.append(number)
    assert warned == [LOUD_AFTER, 10 * LOUD_AFTER, 100 * LOUD_AFTER]


def test_a_finite_step_ends_a_row_but_not_the_count(optimizer):
    steps = NonfiniteSteps()
    for _ in range(3):
        for _ in range(LOUD_AFTER - 1):
            assert not steps.scaled(optimizer, 0, 1.0, WHERE)[1]
        steps.end_row(optimizer)
    assert (steps.count, steps.in_a_row(optimizer)) == (3 * (LOUD_AFTER - 1), 0)


def test_rows_are_those_of_one_optimizer(optimizer):
    """One network of two that is lost is told, though the other one trains."""
    steps, other = NonfiniteSteps(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    told = []
    for step in range(2 * LOUD_AFTER):
        told.append(steps.taken(optimizer, step, WHERE, "skip"))
        steps.end_row(other)
    assert [step for step, text in enumerate(told) if text] == [0, LOUD_AFTER - 1]


def test_each_action_says_what_happens(optimizer):
    texts = {
        action: NonfiniteSteps().taken(optimizer, 3, WHERE, action)
        for action in ("step", "skip", "error")
    }
    for text in texts.values():
        assert "step 3: gradients are not finite. They arose on rank 1, in a.weight" in text
    assert "steps with them, as under DDP" in texts["step"]
    assert "All ranks skip the step" in texts["skip"]


def test_the_sum_may_overflow_on_no_rank_alone():
    assert str(NonfiniteGradients((), ("a",))) == "in a sum of finite gradients, in a"
    assert str(NonfiniteGradients((0, 3), ("a",))) == "on ranks 0, 3, in a"
    assert not NonfiniteGradients((0,))
    assert str(NonfiniteGradients()) == "nowhere"


def test_a_loss_scale_that_has_vanished_ends_the_run():
    check_scale(2.0**-126, 5, WHERE)
    with pytest.raises(RuntimeError, match=r"step 5: the loss scale has fallen to .*on rank 1"):
        check_scale(2.0**-127, 5, WHERE)
