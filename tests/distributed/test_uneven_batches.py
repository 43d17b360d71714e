"""Ranks that run out of training batches at different times: one end for all of them.

What is trained is compared with DDP on data that was cut to the same number of batches before.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_zero import ZeroStrategy
from tests.helpers.models import difference, equal, trainer, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
FEATURES = 5


class Stream(IterableDataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class Promising(Stream):
    """Says that it has five batches, whatever it has."""

    def __len__(self) -> int:
        return 5


class Resumable:
    """A loader of its own kind that goes on where a checkpoint was saved."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.begin, self.position = rows, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for index in range(begin, len(self.rows)):
            self.position = index + 1
            yield self.rows[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["position"]


class Turning(Sampler):
    """A hand-made sampler: every second epoch begins with the second row."""

    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        is_turned = bool(self.epochs) and self.epochs[-1] % 2 == 1
        return iter([1, 0, *range(2, self.count)] if is_turned else range(self.count))

    def __len__(self) -> int:
        return self.count


def stream(rows: Tensor, rank: int = 0) -> Any:
    return DataLoader(Stream(rows), batch_size=None)


def promising(rows: Tensor, rank: int) -> Any:
    return DataLoader(Promising(rows), batch_size=None)


def workers(rows: Tensor, rank: int) -> Any:
    return DataLoader(Stream(rows), batch_size=None, num_workers=1, persistent_workers=True)


def sized(rows: Tensor, rank: int) -> Any:
    return DataLoader(rows, batch_size=None)


def sized_on_rank_0(rows: Tensor, rank: int) -> Any:
    return (stream if rank else sized)(rows, rank)


def sampled(rows: Tensor, rank: int) -> Any:
    return DataLoader(rows, batch_size=None, sampler=Turning(len(rows)))


def generator(rows: Tensor, rank: int) -> Any:
    return (row for row in rows)


def resumable(rows: Tensor, rank: int) -> Any:
    return Resumable(rows)


@dataclass
class Case:
    """Loaders, how many batches each rank has in them, and how many all of them train on."""

    make: Callable[[Tensor, int], Any]
    counts: list[tuple[int, ...]]
    even: list[int]
    steps: int
    warns: bool = True
    mode: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    module: type[Uneven] | None = None
    make_cut: Callable[[Tensor, int], Any] | None = None
    """Loaders of the comparison, where they cannot be of the same kind."""
    stages: tuple[int, ...] = (1, 3)
    rounds: tuple[int, ...] = ()
    """Stages that add micro-batches in another order than DDP: within 1e-6."""


class Uneven(pl.LightningModule):
    """Trains on the rows of its rank; ``record`` is what it has seen, and from ``asked_s`` on the
    next batch is asked for."""

    def __init__(self, case: Case, is_cut: bool = False) -> None:
        super().__init__()
        self.case, self.is_cut = case, is_cut
        self.record: list[float] = []
        self.asked_s = time.monotonic()
        self.loaders: list[Any] = []
        self.is_same_loader = self.is_same_val_loader = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.net = nn.Sequential(
                nn.Linear(FEATURES, 7), nn.Tanh(), nn.Dropout(0.1), nn.Linear(7, FEATURES)
            )

    def rows(self, loader: int, rank: int) -> Tensor:
        seed = torch.Generator().manual_seed(10 * self.trainer.current_epoch + 100 * loader + rank)
        count = self.case.counts[loader][rank]
        rows = torch.randn(count, 3, FEATURES, generator=seed)
        return rows[: self.case.even[loader]] if self.is_cut else rows

    def train_dataloader(self) -> Any:
        self.asked_s = time.monotonic()
        rank = self.trainer.global_rank
        make = (self.case.make_cut if self.is_cut else None) or self.case.make
        self.loaders = [
            make(self.rows(loader, rank), rank) for loader in range(len(self.case.counts))
        ]
        if self.case.mode is None:
            return self.loaders[0]
        return CombinedLoader(dict(zip("ab", self.loaders, strict=True)), self.case.mode)

    def val_dataloader(self) -> Any:
        self.val_loader = stream(self.rows(0, 1)[:1].repeat(2, 1, 1))
        return self.val_loader

    def loss(self, batch: Any) -> Tensor:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        given = [rows for rows in batches if rows is not None]
        self.record.append(sum(rows[0, 0].item() for rows in given))
        return sum((self.net(rows) - rows.roll(1, 1)).square().mean() for rows in given)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.asked_s = time.monotonic()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.loss(batch)
        self.is_same_val_loader = self.trainer.val_dataloaders is self.val_loader

    def on_train_end(self) -> None:
        self.is_same_loader = self.trainer.train_dataloader is self.loaders[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TakesIterator(Uneven):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        loss = self.loss(batch)
        self.asked_s = time.monotonic()
        return loss


class Scheduled(Uneven):
    """Asks how long training is, before and while the strategy is set up."""

    def setup(self, stage: str) -> None:
        self.record.append(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.record.append(self.trainer.estimated_stepping_batches)
        total_steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


WITH_VALIDATION = {"val_check_interval": 1, "limit_val_batches": 2, "num_sanity_val_steps": 1}
CASES = {
    "unsized": Case(stream, [(3, 2)], [2], 2, stages=STAGES),
    "unsized_other_rank": Case(stream, [(1, 4)], [1], 1),
    "unsized_even": Case(stream, [(3, 3)], [3], 3, warns=False),
    "unsized_workers": Case(workers, [(4, 2)], [2], 6, trainer={"max_epochs": 3}),
    "generator": Case(generator, [(3, 2)], [2], 2),
    "epochs_and_validation": Case(
        stream, [(5, 3)], [3], 9, trainer={"max_epochs": 3, **WITH_VALIDATION}, stages=STAGES
    ),
    "reloaded": Case(
        stream,
        [(2, 4)],
        [2],
        6,
        trainer={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1},
    ),
    "accumulated": Case(
        stream,
        [(6, 3)],
        [3],
        4,
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2},
        stages=STAGES,
        rounds=(2, 3),
    ),
    "accumulated_until_the_end": Case(  # Lightning does not know which batch will be the last
        stream,
        [(5, 3)],
        [3],
        2,
        trainer={"accumulate_grad_batches": 2, "max_epochs": 2, "limit_train_batches": 4},
        stages=STAGES,
        rounds=(2, 3),
    ),
    "iterator": Case(stream, [(2, 3)], [2], 2, module=TakesIterator),
    "max_steps": Case(stream, [(3, 2)], [2], 5, trainer={"max_steps": 5, "max_epochs": -1}),
    "limited": Case(stream, [(5, 3)], [5], 2, warns=False, trainer={"limit_train_batches": 2}),
    "promising": Case(promising, [(5, 3)], [3], 3),
    "sized_on_one_rank": Case(
        sized_on_rank_0, [(3, 2)], [2], 4, trainer={"max_epochs": 2}, make_cut=stream
    ),
    "sized_on_the_other_rank": Case(sized_on_rank_0, [(2, 3)], [2], 2, make_cut=stream),
    "sized": Case(sized, [(4, 2)], [2], 2, stages=STAGES),
    "sized_sampler": Case(sampled, [(4, 2)], [2], 6, trainer={"max_epochs": 3}),
    "sized_validation": Case(
        sized,
        [(6, 4)],
        [4],
        8,
        trainer={"max_epochs": 2, **WITH_VALIDATION, "val_check_interval": 0.5},
    ),
    "sized_scheduled": Case(sized, [(3, 5)], [3], 6, trainer={"max_epochs": 2}, module=Scheduled),
    "sized_even": Case(sized, [(3, 3)], [3], 3, warns=False),
    "sized_limited": Case(sized, [(4, 3)], [3], 2, warns=False, trainer={"limit_train_batches": 2}),
    "sized_part": Case(sized, [(5, 4)], [4], 2, warns=False, trainer={"limit_train_batches": 0.5}),
    "min_size": Case(stream, [(4, 3), (2, 3)], [3, 2], 2, mode="min_size"),
    "max_size": Case(stream, [(4, 3), (2, 3)], [3, 2], 3, mode="max_size"),
    "max_size_cycle": Case(
        stream, [(4, 3), (1, 2)], [3, 1], 6, mode="max_size_cycle", trainer={"max_epochs": 2}
    ),
    "sized_max_size_cycle": Case(
        sized, [(4, 3), (1, 2)], [3, 1], 6, mode="max_size_cycle", trainer={"max_epochs": 2}
    ),
}
SAME_LOADER = {"sized_even", "sized_limited", "sized_part"}


def said(found: list[warnings.WarningMessage]) -> list[str]:
    """What was said about batches that are left out."""
    return [str(w.message) for w in found if "left out" in str(w.message)]


def fit(case: Case, strategy: Any, is_cut: bool = False, **fit_options: Any) -> dict[str, Any]:
    module = (case.module or Uneven)(case, is_cut)
    torch.manual_seed(7)  # of dropout
    user = trainer(strategy, len(case.counts[0]), **case.trainer)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        user.fit(module, **fit_options)
    return {
        "weights": weights(module),
        "record": module.record,
        "steps": user.global_step,
        "said": said(found),
        "is_same_loader": module.is_same_loader,
        "is_same_val_loader": module.is_same_val_loader,
        "epochs": getattr(getattr(module.loaders[0], "sampler", None), "epochs", None),
    }


def compare() -> dict[str, dict[int, dict[str, Any]]]:
    """Each case under DDP on cut data, and as it is under each stage."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, case in CASES.items():
        expected = fit(case, DDPStrategy(), is_cut=True)
        found[name] = {}
        for stage in case.stages:
            got = fit(case, ZeroStrategy(stage, bucket_numel=20, timeout=10))
            got["expected"] = expected
            got["equal"] = equal(got["weights"], expected["weights"])
            got["difference"] = difference(got["weights"], expected["weights"])
            found[name][stage] = got
    return found


@pytest.fixture(scope="module")
def compared() -> list[dict[str, dict[int, dict[str, Any]]]]:
    return run_ranks(compare, 2)


@pytest.mark.parametrize("name", CASES)
def test_trains_as_ddp_on_data_that_was_cut_before(compared, name):
    case = CASES[name]
    for rank, ranks in enumerate(compared):
        for stage in case.stages:
            got, expected = ranks[name][stage], ranks[name][stage]["expected"]
            assert got["steps"] == expected["steps"] == case.steps, (stage, got["steps"])
            assert got["record"] == expected["record"], stage
            if stage in case.rounds:
                assert got["difference"] <= 1e-6, stage
            else:
                assert got["equal"], (stage, got["difference"])
            assert len(got["said"]) == (case.warns and rank == 0), (stage, got["said"])
            assert got["is_same_loader"] == (name in SAME_LOADER), stage
            assert got["is_same_val_loader"] in (None, True), stage


def test_what_is_said_names_rank_and_number(compared):
    ranks = compared[0]
    assert re.search(r"rank 1 ran out of training batches after 2 ", ranks["unsized"][3]["said"][0])
    assert "DataLoader of Stream" in ranks["unsized"][3]["said"][0]
    assert (
        "rank 0 ran out of training batches after 1 " in ranks["unsized_other_rank"][1]["said"][0]
    )
    assert "rank 1 can give 2 training batches" in ranks["sized"][2]["said"][0]
    assert "up to 4" in ranks["sized"][2]["said"][0]


def test_samplers_are_told_the_epoch(compared):
    for ranks in compared:
        for stage in CASES["sized_sampler"].stages:
            assert ranks["sized_sampler"][stage]["epochs"] == [0, 1, 2]


def three_ranks() -> tuple[dict[str, Any], dict[str, Any]]:
    case = Case(stream, [(2, 4, 2)], [2], 2)
    return fit(case, ZeroStrategy(3, timeout=10)), fit(case, DDPStrategy(), is_cut=True)


def test_two_of_three_ranks_run_out():
    """The order of sums over three ranks is not DDP's."""
    for rank, (got, expected) in enumerate(run_ranks(three_ranks, 3)):
        assert got["record"] == expected["record"]
        assert difference(got["weights"], expected["weights"]) <= 1e-6
        assert len(got["said"]) == (rank == 0)
        assert all("ranks 0, 2 ran out of training batches after 2" in w for w in got["said"])


class Kept(Uneven):
    """The same collection of loaders in every fit, and in evaluation."""

    kept: Any = None

    def train_dataloader(self) -> Any:
        if self.kept is None:
            self.kept = super().train_dataloader()
        return self.kept

    val_dataloader = train_dataloader

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)


def one_collection_of_loaders() -> list[int]:
    case = Case(stream, [(3, 2), (4, 2)], [], 0, mode="min_size", trainer={"limit_val_batches": 9})
    strategy = ZeroStrategy(2, timeout=10)
    module, user = Kept(case), trainer(strategy, 2, limit_val_batches=0)
    seen = []
    for use in (
        user.fit,
        lambda module: trainer(ZeroStrategy(1, timeout=10), 2, limit_val_batches=0).fit(module),
        lambda module: trainer(DDPStrategy(), 2, limit_val_batches=9).validate(
            module, verbose=False
        ),
    ):
        module.record.clear()
        use(module)
        seen.append(len(module.record))
    return seen


def test_loaders_are_free_again_after_a_fit():
    """Lightning keeps what a fit made of them in a CombinedLoader of the user."""
    assert run_ranks(one_collection_of_loaders, 2) == [[2, 2, 3], [2, 2, 2]]


# Going on from a checkpoint.


class Saving(Uneven):
    """Saves after its second batch, in the first epoch."""

    path = ""

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.trainer.global_step == 2 and self.path:
            self.trainer.save_checkpoint(self.path)


RESUMED = {
    "stateful": Case(resumable, [(7, 4)], [4], 5, trainer={"max_epochs": 2}),
    "unsized": Case(stream, [(4, 3)], [3], 8, trainer={"max_epochs": 2}),
    "sized": Case(sized, [(5, 3)], [3], 6, trainer={"max_epochs": 2}),
}


def resume(folder: str) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, case in RESUMED.items():
        found[name] = {}
        for stage in ("ddp", *STAGES):
            strategies = [
                DDPStrategy() if stage == "ddp" else ZeroStrategy(stage, timeout=10)
                for _ in range(2)
            ]
            path = f"{folder}/{name}-{stage}.ckpt"
            case.module = type("SavingHere", (Saving,), {"path": path})
            fit(case, strategies[0], is_cut=stage == "ddp")
            case.module = None
            found[name][stage] = fit(case, strategies[1], stage == "ddp", ckpt_path=path)
    return found


def test_goes_on_from_the_middle_of_an_epoch(tmp_path):
    """As DDP does; the loader's own state comes back where it has one."""
    for ranks in run_ranks(resume, 2, str(tmp_path)):
        for name in RESUMED:
            expected = ranks[name].pop("ddp")
            for stage, got in ranks[name].items():
                assert got["record"] == expected["record"], (name, stage)
                assert got["steps"] == expected["steps"], (name, stage)
                assert equal(got["weights"], expected["weights"]), (name, stage)


# Errors.


class Failing(Stream):
    """Cannot load its second batch."""

    def __iter__(self) -> Iterator[Tensor]:
        yield self.rows[0]
        raise ArithmeticError("row 1 is broken")


class NotStarting(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        raise ArithmeticError("there is no file")


class Stuck(Stream):
    """Takes longer for its second batch than anybody waits."""

    def __iter__(self) -> Iterator[Tensor]:
        yield self.rows[0]
        time.sleep(6)
        yield self.rows[1]


def on_rank_1(kind: type[Stream], **options: Any) -> Callable[[Tensor, int], Any]:
    return lambda rows, rank: DataLoader((kind if rank else Stream)(rows), None, **options)


ERROR = {"uneven_batches": "error"}
WRONG: dict[str, tuple[Case, dict[str, Any], str, str]] = {  # and what ranks 0 and 1 say
    "unsized": (
        Case(stream, [(3, 2)], [], 1),
        ERROR,
        r"RuntimeError: rank 1 ran out of training batches after 2 .*uneven_batches='stop'",
        "",
    ),
    "unsized_limited": (
        Case(stream, [(2, 4)], [], 2, trainer={"limit_train_batches": 3}),
        ERROR,
        r"RuntimeError: rank 0 ran out of training batches after 2 .*limit_train_batches=2",
        "",
    ),
    "sized": (
        Case(sized, [(4, 2)], [], 0),
        ERROR,
        r"RuntimeError: rank 1 can give 2 training batches .* up to 4.*uneven_batches='stop'",
        "",
    ),
    "empty_sized": (
        Case(sized, [(4, 0)], [], 0),
        {},
        r"RuntimeError: rank 1 can give 0 training batches.* drop its last samples\.$",
        "",
    ),
    "empty_unsized": (
        Case(stream, [(0, 3)], [], 0, trainer={"max_epochs": -1, "max_steps": 5}),
        {},
        r"RuntimeError: rank 0 had no training batch at all .* in two epochs running",
        "",
    ),
    "failing": (
        Case(on_rank_1(Failing), [(3, 3)], [], 0),
        {},
        r"RuntimeError: rank 1 could not load training batch 2 .*ArithmeticError: row 1 is broken",
        r"ArithmeticError: row 1 is broken",
    ),
    "failing_worker": (
        Case(on_rank_1(Failing, num_workers=1), [(3, 3)], [], 0),
        {},
        r"RuntimeError: rank 1 could not load training batch 2 .*ArithmeticError.*row 1 is broken",
        r"ArithmeticError: Caught .*row 1 is broken",
    ),
    "failing_at_once": (
        Case(on_rank_1(NotStarting), [(3, 3)], [], 0),
        {},
        r"RuntimeError: rank 1 could not load training batch 1 .*ArithmeticError: there is no file",
        r"ArithmeticError: there is no file",
    ),
    "stuck": (
        Case(on_rank_1(Stuck), [(3, 3)], [], 0),
        {"timeout": 2},
        r"RuntimeError: rank 0 waited for rank 1 to say whether there is a training batch 2 ",
        "RuntimeError: ",
    ),
}
SHORT = {"sized", "empty_sized", "empty_unsized", "failing", "failing_at_once"}
"""Cases that wait for nothing."""


def wrong_data() -> dict[tuple[str, int], tuple[str, int, float]]:
    """What every rank is answered, how many steps it took and how long after the last."""
    found = {}
    for name, (case, options, *_) in WRONG.items():
        for stage in STAGES if name == "unsized" else (1, 3) if name in SHORT else (3,):
            module = Uneven(case)
            try:
                user = trainer(ZeroStrategy(stage, **{"timeout": 10, **options}), 2, **case.trainer)
                user.fit(module)
                answer = "none"
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            found[name, stage] = answer, len(module.record), time.monotonic() - module.asked_s
    return found


def test_data_that_cannot_be_trained_on_is_an_error_on_every_rank():
    ranks = run_ranks(wrong_data, 2)
    for name, stage in ranks[0]:
        case, _, zero, one = WRONG[name]
        for found, words in zip(ranks, (zero, one or zero), strict=True):
            answer, steps, elapsed_s = found[name, stage]
            assert re.match(words, answer, re.DOTALL), (name, stage, answer)
            assert steps == case.steps, (name, stage)
            assert elapsed_s < 10, (name, stage)


def test_another_choice_is_refused():
    with pytest.raises(ValueError, match="uneven_batches must be 'stop' or 'error', got 'join'"):
        ZeroStrategy(uneven_batches="join")
