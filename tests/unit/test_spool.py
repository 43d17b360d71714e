"""Copies of tensors in memory, or in a file where memory is scarce."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_zero.memory import room, spool
from tests.helpers.peak import counted_peak

MIB = 2**20


def tensors():
    base = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        yield base.to(dtype)
    yield base.float().to(memory_format=torch.channels_last)
    yield base.float()[:, 1]
    yield base[0, 0].t()
    yield nn.Parameter(base.half())
    yield base.half().expand(2, 2, 3, 4, 5)
    yield torch.tensor(3.0)
    yield torch.empty(0, 4)
    yield base.float().to_sparse()


@pytest.mark.parametrize("free", [2**40, 0])
def test_copies_equal_what_clone_makes(free, tmp_path):
    with spool.gathering(MIB, free, [tmp_path]) as keep:
        copies = [(tensor, keep(tensor)) for tensor in tensors()]
    for tensor, copy in copies:
        clone = tensor.detach().clone()
        assert (copy.dtype, copy.shape, copy.layout) == (clone.dtype, clone.shape, clone.layout)
        assert copy.requires_grad is False
        if copy.layout is torch.strided:
            assert copy.stride() == clone.stride()
            assert copy.untyped_storage().nbytes() == clone.untyped_storage().nbytes()
            assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()
            assert torch.equal(copy, clone)
            copy.zero_()
            assert torch.equal(tensor, clone)  # a copy
    assert os.listdir(tmp_path) == []  # the file has no name


def test_scarce_is_more_than_a_share_of_what_is_free(tmp_path):
    for nbytes, is_file in ((50, False), (51, True)):
        with spool.gathering(nbytes, 100, [tmp_path]) as keep:
            assert (keep is not spool.copied) is is_file
    with spool.gathering(0, 0, [tmp_path]) as keep:  # a rank that does not gather
        assert keep is spool.copied
    assert 0 < room.free_nbytes() < 2**50


def test_a_file_takes_no_memory_and_goes_with_the_last_copy(tmp_path):
    parts = [torch.randn(MIB) for _ in range(40)]
    files = len(os.listdir("/proc/self/fd"))
    with counted_peak() as peak, spool.gathering(160 * MIB, 0, [tmp_path]) as keep:
        copies = [keep(part) for part in parts]
    assert peak.nbytes < MIB
    assert len(os.listdir("/proc/self/fd")) <= files + 4  # few mappings
    assert all(torch.equal(a, b) for a, b in zip(parts, copies, strict=True))
    del keep
    torch.save(copies[0], tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 5 * MIB  # and not what lies beside it
    copies.clear()
    assert len(os.listdir("/proc/self/fd")) == files


def test_memory_is_used_where_no_file_can_be(tmp_path, monkeypatch):
    disk, missing, shared = tmp_path, tmp_path / "missing", Path("/dev/shm")
    assert spool.folder_on_disk([missing, disk], MIB) == disk.resolve()
    assert spool.folder_on_disk([disk], 2**60) is None
    assert spool.folder_on_disk([missing], MIB) is None
    monkeypatch.setattr(spool, "_mounts", lambda: {Path("/"): "ext4", shared: "tmpfs"})
    assert spool.folder_on_disk([shared], MIB) is None
    with spool.gathering(MIB, 0, [missing]) as keep:
        assert keep is spool.copied

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with spool.gathering(MIB, 0, [disk]) as keep:
        assert torch.equal(keep(torch.ones(5)), torch.ones(5))
