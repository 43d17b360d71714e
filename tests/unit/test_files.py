"""Files of checkpoints: whole or not there, read without a copy, refused with a reason."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf

from lightning_zero.checkpoint import files
from lightning_zero.checkpoint.files import ZeroCheckpointIO, leftovers, read_file, replacing
from lightning_zero.checkpoint.files import save_file as save
from tests.helpers.peak import counted_peak


class Mine:
    """Something that reading may not make."""


def checkpoint(numel=1000):
    return {"state_dict": {"a": torch.arange(numel).float()}, "epoch": 3}


def read_a(path):
    return read_file(path)["state_dict"]["a"]


# Writing.


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "last_one.ckpt"
    path.write_bytes(b"before")
    with replacing(path) as unfinished:
        assert unfinished.parent == tmp_path
        assert unfinished.name.startswith(".last-one.ckpt.")  # Lightning looks for "hpc_ckpt_"
        unfinished.write_bytes(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert os.listdir(tmp_path) == [path.name]


def write_in_part(path):
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"half")
        raise FileExistsError


def test_an_error_leaves_the_earlier_file_and_no_trace(tmp_path):
    path = tmp_path / "a.ckpt"
    for earlier in (None, b"before"):
        if earlier is not None:
            path.write_bytes(earlier)
        with pytest.raises(FileExistsError):
            write_in_part(path)
        assert os.listdir(tmp_path) == ([] if earlier is None else [path.name])
    assert path.read_bytes() == b"before"
    with pytest.raises(AttributeError, match="Can't pickle"):
        save({"x": lambda: 3}, path)
    with pytest.raises(IsADirectoryError), replacing(tmp_path):
        raise AssertionError("nothing is written first")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [path.name]


def test_a_link_is_replaced_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "best.ckpt").write_bytes(b"best")
    path = tmp_path / "last.ckpt"
    path.symlink_to(tmp_path / "best.ckpt")
    save(checkpoint(), path)
    assert not path.is_symlink()
    assert (tmp_path / "best.ckpt").read_bytes() == b"best"


def write_for_ever(path, started):
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"half")
        started.set()
        time.sleep(60)


def test_the_next_save_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    path, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    context = multiprocessing.get_context("fork")
    writers = []
    for target in (path, path, other):
        started = context.Event()
        writers.append(context.Process(target=write_for_ever, args=(target, started)))
        writers[-1].start()
        assert started.wait(20)
    try:
        for writer in (writers[0], writers[2]):
            writer.kill()
            writer.join(20)
        assert (len(leftovers(path)), len(leftovers(other))) == (2, 1)
        assert not path.exists()
        save(checkpoint(), path)
        assert (len(leftovers(path)), len(leftovers(other))) == (1, 1)  # one is at work still
        assert torch.equal(read_a(path), checkpoint()["state_dict"]["a"])
    finally:
        for writer in writers:
            writer.kill()
            writer.join(20)
    save(checkpoint(), path)
    save(checkpoint(), other)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_the_longest_name_has_room_for_an_unfinished_file(tmp_path):
    for name in ("n" * 255, "é" * 127):
        save(checkpoint(), tmp_path / name)
        assert (tmp_path / name).exists()


def anonymous_nbytes():
    """Memory of this process that no file backs."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def test_saving_and_reading_copy_nothing(tmp_path):
    large = checkpoint(2**24)  # 64 MiB
    path = tmp_path / "new folder" / "a.ckpt"
    with counted_peak() as peak:
        save(large, path)
    assert peak.nbytes < 2**20
    before_nbytes = anonymous_nbytes()
    found = read_file(path)
    assert found["state_dict"]["a"].sum() > 0
    assert anonymous_nbytes() - before_nbytes < 2**24
    found["state_dict"]["a"].zero_()  # a mapping that is written to, and not the file
    assert torch.equal(read_a(path), large["state_dict"]["a"])
    os.unlink(path)
    assert found["state_dict"]["a"].sum() == 0


# Reading.


def test_what_users_keep_is_read_and_what_could_run_code_is_not(tmp_path):
    path = tmp_path / "a.ckpt"
    kept = {
        "namespace": argparse.Namespace(lr=0.1),
        "folder": Path("runs"),
        "limit": timedelta(hours=2),
        "config": OmegaConf.create(
            {"sizes": [1, 2, {"deep": 3.0}], "same": "${sizes}", "no": None}
        ),
    }
    save({"hyper_parameters": kept}, path)
    before = set(torch.serialization.get_safe_globals())
    assert read_file(path)["hyper_parameters"] == kept
    assert set(torch.serialization.get_safe_globals()) == before
    for old_form in (False, True):
        torch.save({"x": Mine()}, path, _use_new_zipfile_serialization=not old_form)
        for weights_only in (None, True):
            with pytest.raises(pickle.UnpicklingError) as caught:
                read_file(path, weights_only=weights_only)
            for said in (str(path), "test_files.Mine", "weights_only=False", "trust"):
                assert said in str(caught.value)
        assert isinstance(read_file(path, weights_only=False)["x"], Mine)
    save({"x": AttributeDict(a=1)}, path)
    with pytest.raises(pickle.UnpicklingError, match="AttributeDict"):
        read_file(path)
    with torch.serialization.safe_globals([Mine, argparse.Namespace]):
        save({"x": Mine(), "y": argparse.Namespace(z=1)}, path)
        for _ in range(2):  # what the user has allowed stays so
            assert isinstance(read_file(path)["x"], Mine)


def test_old_files_and_files_that_are_none(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(checkpoint(), path, _use_new_zipfile_serialization=False)
    assert torch.equal(read_a(path), checkpoint()["state_dict"]["a"])
    save(checkpoint(), path)
    whole = path.read_bytes()
    for content, said in (
        (whole[: len(whole) // 2], "is not whole"),
        (whole[:-1], "is not whole"),
        (whole[:5], "is not whole"),
        (b"", "is no checkpoint"),
        (b"hello world" * 100, "is no checkpoint"),
    ):
        path.write_bytes(content)
        for weights_only in (None, False):
            with pytest.raises(RuntimeError, match=said) as caught:
                read_file(path, weights_only=weights_only)
            assert f"{path} " in str(caught.value)
            assert f" {len(content)} bytes" in str(caught.value)
    torch.save(torch.ones(2), path)
    with pytest.raises(RuntimeError, match="a checkpoint is a dict, and this is a Tensor"):
        read_file(path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "b.ckpt")):
        read_file(tmp_path / "b.ckpt")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_file(tmp_path)


# The plugin.


@pytest.mark.parametrize("place", ["file", "memory"])
def test_the_plugin_writes_reads_and_removes(place, tmp_path):
    io = ZeroCheckpointIO()
    path = f"{place}://{tmp_path}/run/a.ckpt"
    io.save_checkpoint(checkpoint(), path)
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["a"], torch.arange(1000).float())
    with pytest.raises(AttributeError, match="Can't pickle"):
        io.save_checkpoint({"x": lambda: 3}, path)
    assert io.load_checkpoint(path)["epoch"] == 3
    io.save_checkpoint({"x": Mine()}, path)
    with pytest.raises(pickle.UnpicklingError, match=r"a.ckpt holds .*test_files.Mine"):
        io.load_checkpoint(path)
    assert isinstance(io.load_checkpoint(path, weights_only=False)["x"], Mine)
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    with pytest.raises(FileNotFoundError, match=r"a.ckpt"):
        io.load_checkpoint(path)
    io.save_checkpoint(checkpoint(), path)
    with fsspec.open(path, "rb") as file:
        start = file.read(2000)
    with fsspec.open(path, "wb") as file:
        file.write(start)
    with pytest.raises(RuntimeError, match=r"a.ckpt is not whole, 2000 bytes are there"):
        io.load_checkpoint(path)
    io.remove_checkpoint(f"{place}://{tmp_path}/run")
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)


def test_storage_options_are_those_of_the_file_system(tmp_path, monkeypatch):
    io, asked = ZeroCheckpointIO(), []
    real = files.url_to_fs

    def url_to_fs(path, **options):
        asked.append(options)
        return real(path)

    monkeypatch.setattr(files, "url_to_fs", url_to_fs)
    io.save_checkpoint(checkpoint(), "memory://run/b.ckpt", storage_options={"key": "x"})
    assert asked == [{"key": "x"}]
    for path in (tmp_path / "a.ckpt", "memory://run/c.ckpt"):
        with pytest.raises(TypeError, match="options"):
            io.save_checkpoint(checkpoint(), path, storage_options=["key"])
    with pytest.raises(TypeError, match="no effect on a local file"):
        io.save_checkpoint(checkpoint(), tmp_path / "a.ckpt", storage_options={"key": "x"})
    assert os.listdir(tmp_path) == []
