"""Who restores what from whose checkpoint; the README's table is what comes out here.

``make restore-matrix`` writes the table into the README.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero.cli import main
from tests.helpers import readme
from tests.helpers.models import difference, equal, weights
from tests.helpers.restoring import MOST_GAP, SAVED_AFTER, fitted, gap_at_end, lost_in, world_size
from tests.helpers.spawn import run_ranks

NAME = "restore matrix"
WORLD_SIZES = (1, 2, 3, 4)
COLUMNS = ("ddp", "zero1", "zero2", "zero3")
NAMES = {"single": "one process", "ddp": "DDP", "fsdp": "FSDP, full file"} | {
    f"zero{stage}": f"stage {stage}" for stage in (1, 2, 3)
}


class Source(NamedTuple):
    """Who wrote a checkpoint."""

    kind: str
    world_size: int
    is_sharded: bool = False

    @property
    def label(self) -> str:
        ranks = f", {self.world_size} ranks" if self.world_size > 1 else ""
        one = ", 1 rank" if self.world_size == 1 and self.kind != "single" else ""
        return f"{NAMES[self.kind]}{' sharded' if self.is_sharded else ''}{ranks}{one}"


SOURCES = (
    *(Source("single", 1), Source("zero3", 1, True)),
    *(Source("ddp", 2), Source("fsdp", 2)),
    *(Source(f"zero{stage}", 2, form) for form in (False, True) for stage in (1, 2, 3)),
    *(Source("zero1", 3), Source("zero2", 3, True)),
    *(Source("zero2", 4), Source("zero3", 4, True)),
)


class Outcome(NamedTuple):
    """What a reader made of a checkpoint."""

    lost: list[str]
    gap: float


def reader(column: str, ranks: int) -> str:
    """DDP on one rank is what one process does."""
    return "single" if column == "ddp" and ranks == 1 else column


def has_same_sums(source: Source, column: str, ranks: int) -> bool:
    """Whether the reader adds in the order of the writer, so that all bits are to be equal.

    Beyond two ranks, the ring of DDP adds in another order than the stages; its own order is
    another one in the first step after a start.
    """
    if source.world_size != ranks:
        return False
    return ranks <= 2 or (source.kind.startswith("zero") and column != "ddp")


# On the ranks.


def write_all(folder: Path) -> None:
    """One checkpoint in the middle of each training that is never interrupted, and its end."""
    for source in SOURCES:
        if source.world_size != world_size():
            continue
        place = folder / source.label
        keeper = ModelCheckpoint(
            place, filename="{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1
        )
        options = {"checkpoint": "sharded"} if source.is_sharded else {}
        watch, module = fitted(source.kind, callbacks=(keeper,), **options)
        if source.is_sharded:  # there, nobody has full states to look at
            watch, other = fitted(source.kind)
            assert equal(weights(module), weights(other))
        if watch.rank == 0:
            torch.save(watch.end, place / "end.pt")


def read_all(folder: Path) -> dict[tuple[Source, str, int], Outcome]:
    """Every checkpoint, continued by every strategy."""
    found, ranks = {}, world_size()
    for source in SOURCES:
        place = folder / source.label
        for column in COLUMNS:
            is_folder_read = source.is_sharded and column != "ddp"
            path = place / (f"step={SAVED_AFTER}.ckpt" if is_folder_read else "one.ckpt")
            found[source, column, ranks] = _read(reader(column, ranks), path, place)
    return found


def _read(kind: str, path: Path, place: Path) -> Outcome:
    watch, module = fitted(kind, path)
    expected = torch.load(place / "end.pt", weights_only=False)
    file = torch.load(place / "one.ckpt", weights_only=False)
    lost = lost_in(watch.start, file) if watch.rank == 0 else []
    return Outcome(lost, gap_at_end(watch, module, expected))


def read_without_first_moments(folder: Path) -> dict[str, Outcome]:
    """What is measured where a checkpoint is not restored."""
    source = SOURCES[4]
    place, path = folder / source.label, folder / "less.ckpt"
    if torch.distributed.is_initialized():
        raise AssertionError("one process")
    file = torch.load(place / "one.ckpt", weights_only=False)
    for state in file["optimizer_states"][0]["state"].values():
        state["exp_avg"].zero_()
    torch.save(file, path)
    return {kind: _read(kind, path, place) for kind in ("single", "zero3")}


# The table.


def measure(folder: Path) -> dict[tuple[Source, str, int], Outcome]:
    """Write all checkpoints and read all of them; the worst of all ranks."""
    for ranks in WORLD_SIZES:
        run_ranks(write_all, ranks, folder)
    for source in SOURCES:
        path, one = (folder / source.label / n for n in (f"step={SAVED_AFTER}.ckpt", "one.ckpt"))
        if source.is_sharded:
            assert main(["consolidate", str(path), str(one)]) == 0
        else:
            one.symlink_to(path)
    found: dict[Any, Outcome] = {}
    for ranks in WORLD_SIZES:
        for answers in run_ranks(read_all, ranks, folder):
            for case, (lost, gap) in answers.items():
                earlier = found.get(case, Outcome([], 0.0))
                found[case] = Outcome(earlier.lost + lost, max(earlier.gap, gap))
    return found


def entry(source: Source, column: str, ranks: int, outcome: Outcome) -> str:
    """Equal bits are named only where they have to be equal."""
    if outcome.lost:
        return f"lost: {', '.join(outcome.lost)}"
    if has_same_sums(source, column, ranks) and outcome.gap == 0:
        return "bit"
    return "1e-6" if outcome.gap <= MOST_GAP else f"{outcome.gap:.0e}"


def table(found: dict[tuple[Source, str, int], Outcome]) -> str:
    """Markdown; each cell has one entry for each number of the reader's ranks."""
    numbers = " · ".join(map(str, WORLD_SIZES))
    head = [f"DDP on {numbers}", *(NAMES[column] for column in COLUMNS[1:])]
    lines = [f"| written by | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for source in SOURCES:
        cells = []
        for column in COLUMNS:
            cases = [(source, column, ranks) for ranks in WORLD_SIZES]
            cells.append(" · ".join(entry(*case, found[case]) for case in cases))
        lines.append(f"| {source.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def found(folder):
    return measure(folder)


def test_every_strategy_on_every_number_of_ranks_restores_everything(found):
    assert len(found) == len(SOURCES) * len(COLUMNS) * len(WORLD_SIZES)
    assert {case: outcome.lost for case, outcome in found.items() if outcome.lost} == {}
    assert {case: o.gap for case, o in found.items() if o.gap > MOST_GAP} == {}
    same = {case: o.gap for case, o in found.items() if has_same_sums(*case)}
    assert len(same) > 40
    assert {case: gap for case, gap in same.items() if gap} == {}


def test_the_uninterrupted_trainings_are_those_of_one_process(found, folder):
    ends = [torch.load(folder / s.label / "end.pt", weights_only=False) for s in SOURCES]
    gaps = [difference(end["weights"], ends[0]["weights"]) for end in ends]
    assert max(gaps) <= MOST_GAP, gaps


def test_what_is_not_restored_is_seen(found, folder):
    (outcomes,) = run_ranks(read_without_first_moments, 1, folder)
    for lost, gap in outcomes.values():
        assert lost == ["moments"]
        assert gap > 1e3 * MOST_GAP


def test_the_table_in_the_readme_is_the_one_measured(found):
    assert readme.written(NAME) == table(found), (
        "run `make restore-matrix` if this is as it should be"
    )


def measured_table() -> str:
    """What the README is to say."""
    with tempfile.TemporaryDirectory() as folder:
        return table(measure(Path(folder)))


if __name__ == "__main__":
    readme.main(NAME, measured_table)
