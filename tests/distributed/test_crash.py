"""Runs that are killed at any moment: every visible checkpoint is whole, and none is lost."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_zero import ShardGroups, ZeroStrategy
from lightning_zero.checkpoint import folders, sharded
from lightning_zero.checkpoint.files import save_file
from lightning_zero.checkpoint.saves import ShardedSaves
from lightning_zero.checkpoint.stored import Part
from lightning_zero.checkpoint.valid import check_checkpoint, newest_valid
from tests.helpers import spawn
from tests.helpers.crash import (
    RANKS,
    SETTINGS,
    Campaign,
    Wide,
    check_end,
    hidden,
    save,
    step_of,
    stored,
    uninterrupted,
    visible,
)
from tests.helpers.models import equal, trainer, weights
from tests.helpers.spawn import run_ranks

KILLS = 3
"""Kills of each setting; `python -m tests.helpers.crash` makes more."""


# At random moments.


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run_ranks(uninterrupted, RANKS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.form}{setting.stage}")
def test_a_killed_run_goes_on_to_the_same_end(setting, expected, tmp_path):
    campaign = Campaign(tmp_path / "run", setting, random.Random(str(setting)))
    for _ in range(KILLS):
        campaign.kill_one()
    check_end(campaign.finish(), expected, setting.stage)
    figures = campaign.figures
    assert figures.kills == KILLS
    assert figures.checked > 0
    assert (figures.lost, figures.invalid) == (0, 0), figures
    assert hidden(campaign.folder) == []


# At every kind of moment of a sharded save, in one process without a Trainer.


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise OSError(errno.EIO, "no answer")


def then_die(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def last(*args: Any, **options: Any) -> None:
        function(*args, **options)
        die()

    return last


def halfway(path: Path, **_: Any) -> None:
    """A removal that is killed after one file."""
    next(path.glob("*.distcp")).unlink()
    die()


def rename_and_die(path: Path, target: Path) -> None:
    """Where names cannot be exchanged: the earlier folder has lost its name."""
    os.rename(path, target)
    if path.name == "last.ckpt":
        die()


def dies(folder: Path, moment: str) -> None:
    writer = ShardedSaves(ShardGroups.create())
    save(writer, folder / "old.ckpt", 1)
    save(writer, folder / "last.ckpt", 2)
    if moment == "data":
        sharded._Writer.write_data = then_die(sharded._Writer.write_data)
    elif moment == "before the marker":
        sharded._sum_of = die
    elif moment == "before the exchange":
        sharded.put_in_place = die
    elif moment == "after the exchange":
        sharded.put_in_place = then_die(sharded.put_in_place)
    elif moment == "removal of the earlier one":
        shutil.rmtree = halfway
    elif moment == "between two names":
        folders._exchange = lambda *_: False
        Path.rename = rename_and_die
    elif moment == "removal of an old one":
        shutil.rmtree = halfway
        writer.remove(folder / "old.ckpt")
    save(writer, folder / "last.ckpt", 3)


MOMENTS = {
    "data": 2,
    "before the marker": 2,
    "before the exchange": 2,
    "after the exchange": 3,
    "removal of the earlier one": 3,
    "between two names": 3,
    "removal of an old one": 2,
}
"""Step of the newest whole checkpoint after a death there."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_death_in_a_save(moment, tmp_path, monkeypatch):
    process = spawn.context.Process(target=dies, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert hidden(tmp_path)
    assert all(check_checkpoint(path) == "" for path in visible(tmp_path))
    newest = newest_valid(tmp_path)
    if moment == "between two names":
        assert [path.name for path in visible(tmp_path)] == ["old.ckpt"]
        assert step_of(newest) == 1  # visible ones first
        shutil.rmtree(tmp_path / "old.ckpt")
        newest = newest_valid(tmp_path)
    assert step_of(newest) == MOMENTS[moment]
    assert sharded.open_folder(newest)["w"].full().eq(MOMENTS[moment]).all()

    # What is whole stays until another is, and a save of another name cleans up.
    writer = ShardedSaves(ShardGroups.create())
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "put_in_place", fail)
        with pytest.raises(RuntimeError, match="no answer"):
            save(writer, tmp_path / "other.ckpt", 4)
    assert newest_valid(tmp_path) == newest
    save(writer, tmp_path / "other.ckpt", 4)
    assert hidden(tmp_path) == []
    assert step_of(newest_valid(tmp_path)) == 4


def test_what_a_live_run_writes_is_left_alone(tmp_path):
    other = folders.SideFolder(tmp_path / "other.ckpt")
    other.path.mkdir()
    same = folders.SideFolder(tmp_path / "last.ckpt")
    same.path.mkdir()
    save(ShardedSaves(ShardGroups.create()), tmp_path / "last.ckpt", 1)
    assert other.path.is_dir()
    assert same.path.is_dir()
    other.close()
    same.close()
    assert hidden(tmp_path) == []


def test_leftovers_of_another_host_stay_for_a_day(tmp_path):
    """A lock that looks free may be held there; a save of the same name is the user's word."""
    for name in ("last.ckpt", "last.ckpt.more", "other.ckpt"):
        side = folders.SideFolder(tmp_path / name)
        side.path.mkdir()
        side._lock_path.write_text("another-host")
        os.close(side._lock)
    writer = ShardedSaves(ShardGroups.create())
    save(writer, tmp_path / "last.ckpt", 1)
    left = [name for name in hidden(tmp_path) if name.endswith(".part")]
    assert sorted(name.rsplit(".", 2)[0] for name in left) == [".last.ckpt.more", ".other.ckpt"]
    for lock in tmp_path.glob(".*.lock"):
        os.utime(lock, (time.time() - 25 * 3600,) * 2)
    save(writer, tmp_path / "last.ckpt", 2)
    assert hidden(tmp_path) == []


# The same for one file.


def dies_in_a_file(path: Path, moment: str) -> None:
    if moment == "half":
        written = torch.save

        def half(checkpoint: Any, file: Any, **options: Any) -> None:
            written(checkpoint, file, **options)
            file.truncate(2000)
            die()

        torch.save = half
    elif moment == "before it has its name":
        os.replace = die
    else:
        os.replace = then_die(os.replace)
    save_file({"global_step": 2, "w": torch.ones(1000)}, path)


@pytest.mark.parametrize(
    ("moment", "step"), [("half", 1), ("before it has its name", 1), ("after", 2)]
)
def test_death_in_a_file(moment, step, tmp_path):
    path = tmp_path / "last.ckpt"
    save_file({"global_step": 1}, path)
    with path.open("rb") as before:
        process = spawn.context.Process(target=dies_in_a_file, args=(path, moment))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert bool(hidden(tmp_path)) == (step == 1)
        assert newest_valid(tmp_path) == path
        assert step_of(path) == step
        save_file({"global_step": 3}, path)
        assert hidden(tmp_path) == []
        assert step_of(path) == 3
        # Written anew beside it, and never over it: who reads keeps what was there.
        assert torch.load(before)["global_step"] == 1


# What is removed, and when.


def test_a_checkpoint_is_not_removed_for_one_that_has_failed(tmp_path, monkeypatch):
    """Also if the failure came before the removal was asked for."""
    writer = ShardedSaves(ShardGroups.create())
    save(writer, tmp_path / "old.ckpt", 1)
    monkeypatch.setattr(sharded, "put_in_place", fail)
    writer.begin(tmp_path / "new.ckpt", *stored(2))
    writer._thread.join()
    writer.remove(tmp_path / "old.ckpt")
    with pytest.raises(RuntimeError, match=r"new\.ckpt was not saved; earlier ones .* no answer"):
        writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    assert check_checkpoint(tmp_path / "old.ckpt") == ""


def test_a_link_is_replaced_and_what_it_led_to_stays(tmp_path):
    writer = ShardedSaves(ShardGroups.create())
    save(writer, tmp_path / "old.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("old.ckpt")
    save(writer, tmp_path / "last.ckpt", 2)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert [step_of(tmp_path / name) for name in ("old.ckpt", "last.ckpt")] == [1, 2]
    (tmp_path / "file.ckpt").write_text("of the other form")
    save(writer, tmp_path / "file.ckpt", 3)
    assert step_of(tmp_path / "file.ckpt") == 3
    assert hidden(tmp_path) == []


# Errors of one rank.


def one_rank_fails(folder: Path) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = torch.distributed.get_rank()
    groups = ShardGroups.create(timedelta(seconds=3))
    writer = ShardedSaves(groups)
    checkpoint, parts = stored(1)
    own = parts if rank == 0 else list
    writer.begin(folder / "last.ckpt", checkpoint, own)
    writer.wait()
    found: dict[str, Any] = {}

    def refuses() -> list[Part]:
        raise MemoryError("no room for a copy")

    begin_s = time.monotonic()
    try:
        writer.begin(folder / "last.ckpt", stored(2)[0], refuses if rank == 1 else stored(2)[1])
    except Exception as error:
        found["copy"] = type(error).__name__, str(error), time.monotonic() - begin_s

    # A rank that gives up takes nothing from the folder that rank 0 completes.
    finish = sharded._Writer.finish

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(5)
        finish(*args, **options)

    sharded._Writer.finish = slowly
    writer.begin(folder / "last.ckpt", stored(3)[0], stored(3)[1] if rank == 0 else list)
    try:
        writer.wait()
    except RuntimeError as error:
        found["timeout"] = str(error)
    return found


def test_an_error_of_one_rank_is_raised_on_all_and_harms_nothing(tmp_path):
    first, second = run_ranks(one_rank_fails, 2, tmp_path)
    assert first["copy"][0] == "RuntimeError"
    assert "rank 1: MemoryError: no room for a copy" in first["copy"][1]
    assert second["copy"][:2] == ("MemoryError", "no room for a copy")
    assert max(first["copy"][2], second["copy"][2]) < 2
    assert "timeout" in second
    assert check_checkpoint(tmp_path / "last.ckpt") == ""
    assert step_of(tmp_path / "last.ckpt") == 3
    assert hidden(tmp_path) == []


# Ends of a run while a save is under way.


class Ending(Wide):
    """Ends in its own way when a slow save has begun."""

    def __init__(self, ending: type[BaseException]) -> None:
        super().__init__()
        self.ending = ending

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 3:
            raise self.ending


def slow_trainer(folder: Path, save_last: Any = None, **options: Any) -> Any:
    keeper = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=save_last
    )
    strategy = ZeroStrategy(3, checkpoint="sharded", timeout=30)
    options = {"max_steps": 3, **options}
    return trainer(strategy, RANKS, callbacks=[keeper], enable_checkpointing=True, **options)


def endings(folder: Path) -> dict[str, Any]:
    finish = sharded._Writer.finish

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.5)
        finish(*args, **options)

    sharded._Writer.finish = slowly
    found: dict[str, Any] = {}
    for ending in (KeyboardInterrupt, SystemExit, ValueError):
        user = slow_trainer(folder / ending.__name__, max_steps=9)
        try:
            user.fit(Ending(ending))
        except BaseException as error:
            found[ending.__name__] = type(error).__name__
        names = [thread.name for thread in threading.enumerate()]
        found[f"{ending.__name__} waits"] = "checkpoint" not in names

    # The same Trainer and strategy, after an error.
    user.fit(module := Wide(), ckpt_path=folder / "ValueError" / "step=3.ckpt")
    found["again"] = weights(module)
    trainer(ZeroStrategy(3, timeout=30), RANKS, max_steps=9).fit(module := Wide())
    found["expected"] = weights(module)

    # One name, again and again, while the save before is still running; then the end.
    user = slow_trainer(folder / "same", max_steps=4)

    class Saving(Wide):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(folder / "same" / "own.ckpt")

    user.fit(Saving())
    found["same"] = step_of(folder / "same" / "own.ckpt")

    # A link to the newest.
    user = slow_trainer(folder / "link", save_last="link", max_steps=6)
    user.fit(Wide())

    user.save_checkpoint(folder / "after.ckpt")
    return found  # and exits at once


def test_a_save_under_way_is_completed_when_the_run_ends(tmp_path):
    for found in run_ranks(endings, 2, tmp_path):
        assert found["KeyboardInterrupt"] == "SystemExit"  # as Lightning answers Ctrl-C
        assert found["SystemExit"] == "SystemExit"
        assert found["ValueError"] == "ValueError"
        for ending in ("KeyboardInterrupt", "SystemExit", "ValueError"):
            assert found[f"{ending} waits"]
        assert equal(found["again"], found["expected"])
        assert found["same"] == 4
    for ending in ("KeyboardInterrupt", "SystemExit"):
        assert [path.name for path in (tmp_path / ending).iterdir()] == ["step=3.ckpt"]
        assert check_checkpoint(tmp_path / ending / "step=3.ckpt") == ""
    assert (tmp_path / "link" / "last.ckpt").is_symlink()
    assert step_of(tmp_path / "link" / "last.ckpt") == 6
    for path in (*visible(tmp_path / "link"), *visible(tmp_path / "same"), tmp_path / "after.ckpt"):
        assert check_checkpoint(path) == "", path
        assert hidden(path.parent) == []
