"""Cases that run at every stage on ranks which stay: what a case is, and what it is held against.

A *cell* is a case at a stage. Each module of cases has one :class:`Cases` named ``CASES``; ranks
find a case by the name of its module and its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_zero import ZeroStrategy
from tests.helpers.models import trainer, weights
from tests.helpers.spawn import RankError

STAGES = (1, 2, 3)
TIMEOUT_S = 8.0
"""Longest wait for another rank within a cell."""


class PerRank(list):
    """Rank r is to observe element r."""


class OnSomeRank:
    """At least one rank is to observe it."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class AtMost:
    """A bound, for figures that are not exact."""

    bound: float


LIKE_DDP = "what DDP gives"
Expected = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | str


@dataclass(frozen=True)
class Case:
    """One situation and its right outcome."""

    row: str
    """What it belongs to, such as ``"A02"``."""

    name: str
    run: Callable[[User], Mapping[str, Any]]
    """Runs on every rank; returns what the rank observes."""

    title: str
    expected: Expected = LIKE_DDP
    """Values by name, a function that computes them, or :data:`LIKE_DDP`: what the same function
    observes under DDP."""

    tolerance: float = 0.0
    """Largest difference relative to the larger of 1 and the expected value."""

    ranks: int = 2
    stages: tuple[int, ...] = STAGES
    error: str | None = None
    """The only right outcome is an error on every rank whose text has this pattern."""

    is_offered: bool = True
    """False where the package has no such option yet, and says so."""

    refused: Mapping[int, str] = field(default_factory=dict)
    """Stages at which it is refused on every rank, and with which words."""

    limit_s: float = 180.0
    timeout_s: float | None = None
    """Longest wait for another rank, of a case that lets ranks wait: it gets ranks of its own."""

    zero: Mapping[str, Any] = field(default_factory=dict)
    """Options of every ZeroStrategy that the case makes."""

    ddp: Mapping[str, Any] = field(default_factory=lambda: {"find_unused_parameters": True})
    """Options of every DDPStrategy that the case makes."""

    @property
    def id(self) -> str:
        return f"{self.row}-{self.name}"

    def error_at(self, stage: int) -> str | None:
        """The pattern of the error that a stage is to raise."""
        return self.refused.get(stage, self.error)


class Cases:
    """The cases of one theme, in order."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.by_id: dict[str, Case] = {}

    def __call__(self, row: str, expected: Expected = LIKE_DDP, **options: Any) -> Any:
        """Decorator: a function becomes a case with its name; its docstring is the title."""

        def register(run: Callable[[User], Mapping[str, Any]]) -> Any:
            self.add(row, run.__name__, run.__doc__ or "", run, expected, **options)
            return run

        return register

    def add(
        self,
        row: str,
        name: str,
        title: str,
        run: Callable[[User], Mapping[str, Any]],
        expected: Expected = LIKE_DDP,
        **options: Any,
    ) -> None:
        """As the decorator, for variants of one function."""
        case = Case(row, name, run, " ".join(title.split()).rstrip("."), expected, **options)
        assert case.id not in self.by_id, case.id
        assert case.title, f"{case.id} needs a title"
        self.by_id[case.id] = case

    def not_offered(self, row: str, name: str, title: str, **options: Any) -> None:
        """Options that do not exist yet: the constructor must not take them without a word."""
        words = f"unexpected keyword argument '{next(iter(options))}'"

        def run(user: User) -> Mapping[str, Any]:
            user.strategy(**options)
            return {}

        self.add(row, name, title, run, error=words, is_offered=False)

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Identifier and stage of every cell."""
        return [(case.id, stage) for case in self.by_id.values() for stage in case.stages]

    def __iter__(self) -> Iterator[Case]:
        return iter(self.by_id.values())


class User:
    """What a case sees on its rank. ``stage`` is None where DDP is to tell what is right."""

    def __init__(self, case: Case, stage: int | None, rank: int, folder: Path) -> None:
        self.case, self.stage, self.rank, self.folder = case, stage, rank, folder
        self.messages: list[str] = []
        self.strategy_options: dict[str, Any] = {}
        """Of every ZeroStrategy that is made from here on."""

    @property
    def world_size(self) -> int:
        return self.case.ranks

    def strategy(self, **options: Any) -> Any:
        """A strategy of the stage, or DDP."""
        if self.stage is None:
            return DDPStrategy(**self.case.ddp)
        timeout_s = self.case.timeout_s or TIMEOUT_S
        options = {"timeout": timeout_s, **self.case.zero, **self.strategy_options, **options}
        return ZeroStrategy(self.stage, **options)

    def trainer(self, strategy: Any = None, **options: Any) -> pl.Trainer:
        """A quiet Trainer on all ranks; validates where a module has data for it."""
        options = {"limit_val_batches": 1.0, "default_root_dir": self.folder, **options}
        if any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in options.get("callbacks", ())):
            options.setdefault("enable_checkpointing", True)
        return trainer(strategy or self.strategy(), self.world_size, **options)

    def fit(
        self, module: pl.LightningModule, ckpt_path: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """Train with a Trainer of its own; the weights and buffers that this rank ends with."""
        self.trainer(**options).fit(module, ckpt_path=ckpt_path)
        return weights(module)

    def said(self, pattern: str) -> int:
        """How many warnings of this rank have a pattern."""
        return sum(bool(re.search(pattern, text, re.IGNORECASE)) for text in self.messages)


def observe(case: Case, user: User) -> dict[str, Any]:
    """Run a case on this rank, with its warnings written down."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: user.messages.append(str(message))
        return {name: plain(value) for name, value in case.run(user).items()}


def plain(value: Any) -> Any:
    """A value that does not share memory with anything of the rank."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


# What is right.

Outcome = dict[str, Any] | RankError


@dataclass
class Outcomes:
    """What all ranks of the chosen cells observed; stage None is DDP."""

    cases: Cases
    found: Mapping[tuple[str, int | None], Sequence[Outcome]]

    def check(self, cell: tuple[str, int]) -> None:
        """Fail unless a cell came out right."""
        name, stage = cell
        check(self.cases.by_id[name], stage, self.found[cell], self.found.get((name, None), ()))


def every_cell(cases: Cases) -> Callable[[Any], Any]:
    """Decorator: one test for each cell, with the arguments ``outcomes`` and ``cell``.

    All cells run before the first test. Each has a limit of its own, see ``Case.limit_s``, so the
    limit of a test is not for their sum.
    """
    names = [f"{name}-{stage}" for name, stage in cases.cells]
    every = pytest.mark.parametrize("cell", cases.cells, ids=names)
    return lambda test: pytest.mark.timeout(func_only=True)(every(test))


CLEAR_ERRORS = {"RuntimeError", "ValueError", "TypeError", "MisconfigurationException"}
CLEAR_ERRORS |= {"KeyError", "FileNotFoundError", "IsADirectoryError", "UnpicklingError"}


def check(case: Case, stage: int, outcomes: Sequence[Outcome], ddp: Sequence[Outcome]) -> None:
    """Fail unless all ranks of a cell observed what is right."""
    pattern = case.error_at(stage)
    errors = {r: o for r, o in enumerate(outcomes) if isinstance(o, RankError)}
    if pattern is not None:
        missing = set(range(case.ranks)) - errors.keys()
        assert not missing, f"ranks {missing} raised nothing"
        for rank, error in errors.items():
            assert re.search(pattern, error.message, re.IGNORECASE | re.DOTALL), (
                f"rank {rank} raised another error:\n{error.trace}"
            )
            assert error.kind in CLEAR_ERRORS, error.trace
        return
    assert not errors, "\n".join(f"rank {rank}: {error.trace}" for rank, error in errors.items())
    if case.expected == LIKE_DDP:
        broken = [o.trace for o in ddp if isinstance(o, RankError)]
        assert not broken, "DDP itself: " + "\n".join(broken)
        for rank, (found, expected) in enumerate(zip(outcomes, ddp, strict=True)):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                check_value(f"rank {rank}: {name}", found[name], value, case.tolerance)
        return
    assert not isinstance(case.expected, str)
    expected = case.expected() if callable(case.expected) else case.expected
    for name, value in expected.items():
        values = [found[name] for found in outcomes]
        if isinstance(value, OnSomeRank):
            assert value.value in values, f"{name}: no rank has {value.value}, but {values}"
            continue
        for rank, found in enumerate(values):
            wanted = value[rank] if isinstance(value, PerRank) else value
            tolerance = case.tolerance or 2e-7
            check_value(f"rank {rank}: {name}", found, wanted, tolerance)


def check_value(where: str, found: Any, expected: Any, tolerance: float) -> None:
    """Compare one value; a number stands for every element of a tensor or list."""
    if isinstance(expected, AtMost):
        assert found <= expected.bound, f"{where} is {found}, over {expected.bound}"
        return
    if expected is None or isinstance(expected, (str, bool, dict)):
        assert found == expected, f"{where} is {found!r}, not {expected!r}"
        return
    if isinstance(expected, list) and not isinstance(found, Tensor):
        assert isinstance(found, list), f"{where} is {found!r}"
        assert len(found) == len(expected), f"{where} is {found!r}, not {expected!r}"
        for index, pair in enumerate(zip(found, expected, strict=True)):
            check_value(f"{where}[{index}]", *pair, tolerance)
        return
    got, wanted = torch.as_tensor(found), torch.as_tensor(expected)
    if not isinstance(expected, (int, float)):
        assert got.shape == wanted.shape, f"{where} has shape {got.shape}, not {wanted.shape}"
    if isinstance(expected, Tensor):
        assert got.dtype == wanted.dtype, f"{where} is {got.dtype}, not {wanted.dtype}"
    got, wanted = torch.broadcast_tensors(got.double(), wanted.double())
    is_close = torch.isclose(got, wanted, rtol=0, atol=tolerance, equal_nan=True)
    is_close |= (got - wanted).abs() <= tolerance * wanted.abs()
    assert bool(is_close.all()), f"{where} is {found}, not {expected} (within {tolerance})"
