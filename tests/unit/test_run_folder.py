"""Folders of runs: unique, private, gone with their process, or removed by the next one."""

from __future__ import annotations

import gc
import os
import stat
import threading

import pytest

from lightning_zero.memory import run_folder
from lightning_zero.memory.run_folder import RunFolder
from tests.helpers.forks import forked


def fill(folder):
    (folder.path / "a.states").write_bytes(b"x" * 100)
    return folder


KEPT = []
"""Of a forked child, as long as it lives."""


def made_and_kept(root, rank):
    KEPT.append(fill(RunFolder(root, rank)))
    return KEPT[-1].path


def test_a_folder_is_private_and_says_its_rank(tmp_path):
    folder = RunFolder(tmp_path, 13)
    assert folder.path.parent == tmp_path
    assert folder.path.name.startswith("lightning_zero-rank13-")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "lock").stat().st_mode) == 0o600
    fill(folder).close()
    assert os.listdir(tmp_path) == []
    folder.close()


def test_a_folder_goes_with_its_object(tmp_path):
    gc.collect()  # what earlier tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    fill(RunFolder(tmp_path, 0))
    gc.collect()
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_two_runs_in_one_place_do_not_meet(tmp_path):
    first, second = fill(RunFolder(tmp_path, 0)), fill(RunFolder(tmp_path, 0))
    assert first.path != second.path
    first.close()
    assert [path.name for path in second.path.parent.iterdir()] == [second.path.name]
    assert (second.path / "a.states").exists()
    second.close()


def test_what_a_killed_run_left_goes_with_the_next_run(tmp_path):
    with forked(lambda: made_and_kept(tmp_path, 1)) as live:
        with forked(lambda: made_and_kept(tmp_path, 0)) as dead:
            assert {path.name for path in tmp_path.iterdir()} == {live.name, dead.name}
        assert dead.is_dir()  # killed
        folder = RunFolder(tmp_path, 0)
        assert {path.name for path in tmp_path.iterdir()} == {live.name, folder.path.name}
        assert (live / "a.states").exists()
        folder.close()
    assert run_folder.remove_dead(tmp_path) == [live.name]
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path):
    folder = fill(RunFolder(tmp_path, 0))
    with forked(folder.close):
        assert (folder.path / "a.states").exists()
        assert run_folder.remove_dead(tmp_path) == []
    folder.close()
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "lock").write_text(run_folder._this_host())
    (outside / "a.states").write_text("of a user")
    (root / "lightning_zero-rank0-linked00").symlink_to(outside)
    for name, mode, said in (
        ("lightning_zero-rank0-foreign0", 0o700, "something else"),  # a lock of another program
        ("lightning_zero-rank0-open0000", 0o755, run_folder._this_host()),
        ("lightning_zero-results", 0o700, run_folder._this_host()),
        ("lightning_zero-rank0-host0000", 0o700, "lightning_zero\nanother-host\nstarted\n"),
    ):
        (root / name).mkdir(mode=mode)
        (root / name / "lock").write_text(said)
        (root / name / "a.states").write_text("of a user")
    unlocked = root / "lightning_zero-rank0-unlocked"
    unlocked.mkdir(mode=0o700)
    (unlocked / "notes").write_text("of a user")
    (root / "lightning_zero-rank0-afile000").write_text("of a user")
    before = sorted(path for path in tmp_path.rglob("*"))
    RunFolder(root, 0).close()
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_links_in_a_dead_folder_are_not_followed(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    treasure = tmp_path / "treasure"
    treasure.write_text("of a user")
    with forked(lambda: made_and_kept(root, 0)) as dead:
        (dead / "linked.states").symlink_to(treasure)
    RunFolder(root, 0).close()
    assert treasure.read_text() == "of a user"


@pytest.mark.parametrize("said", [None, "", "lightning_zero\nold-name\n{started}\n"])
def test_a_folder_whose_maker_died_early_goes(tmp_path, said):
    folder = tmp_path / "lightning_zero-rank0-died0000"
    folder.mkdir(mode=0o700)
    if said is not None:  # else before there was a lock
        started = run_folder._this_host().splitlines()[2]
        (folder / "lock").write_text(said.format(started=started))
    assert run_folder.remove_dead(tmp_path) == [folder.name]
    assert os.listdir(tmp_path) == []


def test_many_ranks_begin_at_once_beside_what_dead_runs_left(tmp_path):
    for number in range(20):
        folder = tmp_path / f"lightning_zero-rank0-dead{number:04}"
        folder.mkdir(mode=0o700)
        (folder / "lock").write_text(run_folder._this_host())
    made, gate = [], threading.Barrier(8)

    def begin(rank):
        gate.wait()
        made.extend(fill(RunFolder(tmp_path, rank)) for _ in range(10))

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(os.listdir(tmp_path)) == sorted(folder.path.name for folder in made)
    assert all((folder.path / "a.states").exists() for folder in made)
    assert len(made) == 80


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, "found None"),
        ("missing/further", "does not exist"),
        ("file", "is not a folder"),
        ("/proc", "no files for states can be made in /proc"),
    ],
)
def test_a_place_that_cannot_be_is_refused(tmp_path, name, says):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=says) as caught:
        RunFolder(name and tmp_path / name, 0)
    assert "folder" in str(caught.value)


def test_a_place_is_made_if_only_it_is_missing(tmp_path):
    folder = RunFolder(tmp_path / "states", 0)
    assert stat.S_IMODE(os.stat(tmp_path / "states").st_mode) == 0o700
    folder.close()
    assert list((tmp_path / "states").iterdir()) == []
