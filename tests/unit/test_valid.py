"""Which checkpoints are whole, which is the newest, and what the command says."""

from __future__ import annotations

import os

import torch

from lightning_zero import ShardGroups
from lightning_zero.checkpoint.saves import ShardedSaves
from lightning_zero.checkpoint.valid import check_checkpoint, newest_valid
from lightning_zero.cli import main
from tests.helpers.crash import save


def test_newest_valid_passes_over_what_is_not_whole(tmp_path, capsys):
    assert newest_valid(tmp_path / "absent") is None
    assert newest_valid(tmp_path) is None
    assert main(["check", str(tmp_path)]) == 1
    writer = ShardedSaves(ShardGroups.create())
    save(writer, tmp_path / "a.ckpt", 1)
    torch.save({"global_step": 2, "w": torch.ones(1000)}, tmp_path / "b.ckpt")
    save(writer, tmp_path / "c.ckpt", 3)
    torch.save({"global_step": 4, "w": torch.ones(1000)}, tmp_path / "d.ckpt")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "e.ckpt").symlink_to("d.ckpt")
    found = []
    for damage in (None, "d.ckpt", "c.ckpt/__0_0.distcp", "b.ckpt", "a.ckpt/complete.json"):
        if damage == "b.ckpt":  # a part is missing
            data = (tmp_path / damage).read_bytes()
            (tmp_path / damage).write_bytes(data[:-100])
        elif damage and damage.endswith("json"):
            (tmp_path / damage).unlink()
        elif damage:  # one bit of a tensor
            data = bytearray((tmp_path / damage).read_bytes())
            value = 3.0 if damage.startswith("c") else 1.0
            data[data.index(torch.full((99,), value).numpy().tobytes())] ^= 1
            times = (tmp_path / damage).stat()
            (tmp_path / damage).write_bytes(data)
            os.utime(tmp_path / damage, ns=(times.st_atime_ns, times.st_mtime_ns))
        newest = newest_valid(tmp_path)
        found.append(newest and newest.name)
    assert found == ["d.ckpt", "c.ckpt", "b.ckpt", "a.ckpt", None]
    assert main(["check", str(tmp_path)]) == 1
    capsys.readouterr()


def test_check_tells_the_newest_or_what_is_wrong(tmp_path, capsys):
    save(ShardedSaves(ShardGroups.create()), tmp_path / "a.ckpt", 1)
    for path in (tmp_path, tmp_path / "a.ckpt"):
        assert main(["check", str(path)]) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "rest.pt").write_bytes(b"")
    assert main(["check", str(tmp_path / "a.ckpt")]) == 1
    assert "rest.pt is damaged" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "b.ckpt")]) == 1
    (tmp_path / "c.ckpt").write_text("no zip")
    assert "not whole" in check_checkpoint(tmp_path / "c.ckpt")
    (tmp_path / "d.ckpt").symlink_to("nowhere")
    assert "leads to nowhere" in check_checkpoint(tmp_path / "d.ckpt")


def test_files_without_check_sums_are_taken(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(9)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert check_checkpoint(tmp_path / "a.ckpt") == ""
