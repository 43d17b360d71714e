"""Caps that keep files readable in one sitting."""

from __future__ import annotations

import pytest

from tests.architecture.source import (
    PACKAGE,
    ROOT,
    classes,
    decorators,
    is_dataclass,
    methods,
    trees,
)

MAX_LINES = 600
GOAL_LINES = 450
MAX_METHODS = 25
MAX_PARAMETERS = 8
OVER_GOAL: set[str] = {"engine.py", "strategy.py"}  # order all rooms, take all options
MANY_PARAMETERS = {"ZeroStrategy"}  # takes Lightning's own options besides ours

FILES = sorted(trees())
CLASSES = [(file, kind) for file in FILES for kind in classes(trees()[file])]
by_class = pytest.mark.parametrize(
    ("file", "kind"), CLASSES, ids=[f"{file}:{kind.name}" for file, kind in CLASSES]
)


def lines(path):
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("file", FILES)
def test_file_can_be_read_in_one_sitting(file):
    found = lines(PACKAGE / file)
    assert found <= (MAX_LINES if file in OVER_GOAL else GOAL_LINES)


@by_class
def test_class_has_few_methods(file, kind):
    """Properties are attributes, and what overrides Lightning's hooks is as many as it asks for."""
    counted = [m for m in methods(kind) if not decorators(m) & {"property", "setter", "override"}]
    assert len(counted) <= MAX_METHODS


@by_class
def test_constructor_has_few_parameters(file, kind):
    if is_dataclass(kind) or kind.name in MANY_PARAMETERS:
        return
    for method in methods(kind):
        if method.name == "__init__":
            arguments = method.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            assert len(named) - 1 <= MAX_PARAMETERS


def test_there_is_no_room_for_leftovers():
    names = {file.split("/")[-1] for file in FILES}
    assert not names & {"utils.py", "helpers.py", "misc.py", "common.py"}


def test_recipe_is_short():
    assert lines(ROOT / "recipes" / "pretrain.py") <= 150
