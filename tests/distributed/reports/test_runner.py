"""A cell that goes wrong is a failure, and of itself alone."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.helpers.cells import AtMost, Cases, check_value
from tests.helpers.crew import run_cells
from tests.helpers.small import Small, product

CASES = Cases("cells that go wrong")


def one_step(user):
    return user.fit(Small(product, w=0.0))


@CASES("wrong", {"w": -1.0})
def right(user):
    """Right."""
    return one_step(user)


@CASES("wrong", {"w": -1.001}, tolerance=1e-4)
def value(user):
    """Another value than expected."""
    return one_step(user)


@CASES("wrong")
def unlike_ddp(user):
    """Another value than DDP's, by one bit."""
    found = one_step(user)["w"]
    return {"w": found if user.stage is None else torch.nextafter(found, torch.zeros(1))}


@CASES("wrong", {"w": -1.0}, limit_s=2)
def hang(user):
    """Rank 1 never comes back."""
    if user.rank == 1:
        time.sleep(60)
    return one_step(user)


@CASES("wrong", {"w": -1.0})
def death(user):
    """Rank 1 dies."""
    if user.rank == 1:
        os._exit(1)
    return {"w": -1.0}


@CASES("wrong", error="this rank")
def error_of_one(user):
    """An error that only rank 1 raises."""
    if user.rank == 1:
        raise ValueError("this rank")
    return {}


@CASES("wrong", error="that rank")
def another_error(user):
    """Another error than the right one."""
    raise ValueError("this rank")


@CASES("wrong", error="name")
def unclear_error(user):
    """An error that nobody meant to raise."""
    raise AttributeError("no name")


CASES.add("wrong", "right_again", "Right after all that", one_step, {"w": -1.0})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cells = [(case.id, 2) for case in CASES]
    return run_cells(__name__, CASES, cells, tmp_path_factory.mktemp("runner"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("value", "is tensor.*not -1.001"),
        ("unlike_ddp", "is tensor.*not tensor"),
        ("hang", "rank 1: was still waiting after 2"),
        ("death", "rank 1: died without a word"),
        ("error_of_one", "raised nothing"),
        ("another_error", "raised another error"),
        ("unclear_error", "AttributeError"),
    ],
)
def test_what_is_wrong_is_a_failure(found, name, words):
    with pytest.raises(AssertionError, match=words):
        found.check((f"wrong-{name}", 2))


@pytest.mark.parametrize("name", ["right", "right_again"])
def test_what_is_right_is_not(found, name):
    found.check((f"wrong-{name}", 2))


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (1.0, 2.0),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (float("nan"), 1.0),
        ([1.0], [1.0, 2.0]),
        (["a"], ["b"]),
        (True, False),
        (3.0, AtMost(2.0)),
    ],
)
def test_values_that_differ(observed, expected):
    with pytest.raises(AssertionError, match="it.* is |it has "):
        check_value("it", observed, expected, 1e-6)
