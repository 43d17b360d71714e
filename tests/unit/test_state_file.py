"""A file of states: its regions, its mappings, and what goes wrong with disks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import stat
from pathlib import Path

import pytest
import torch

from lightning_zero.memory.state_file import ALIGN_NBYTES, Region, StateFile, failure
from tests.helpers.disks import small_disk
from tests.helpers.forks import forked

MIB = 2**20


@pytest.fixture(params=["direct", "cached"])
def make(request, tmp_path, monkeypatch):
    """Makes a file of states, past the page cache or through it."""
    if request.param == "cached":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    made = []

    def make(region_nbytes):
        made.append(StateFile(tmp_path / f"{len(made)}.states", region_nbytes))
        if request.param == "direct" and not made[-1].is_direct:
            pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
        assert made[-1].is_direct is (request.param == "direct")
        return made[-1]

    yield make
    for file in made:
        file.close()


def aligned(nbytes, value=0):
    memory = torch.full((nbytes + ALIGN_NBYTES,), value, dtype=torch.uint8)
    begin = -memory.data_ptr() % ALIGN_NBYTES
    return memory[begin : begin + nbytes]


def content(file, region):
    found = aligned(region.nbytes, 77)
    file.read(region.offset_nbytes, found)
    return found


def test_regions_are_aligned_private_and_zero(make):
    file = make([1, 4096, 4097, 0, 3 * MIB])
    assert [region.nbytes // ALIGN_NBYTES for region in file.regions] == [1, 1, 2, 1, 768]
    end = 0
    for region in file.regions:
        assert region.offset_nbytes == end
        assert not content(file, region).any()
        assert not file.mapped(file.regions.index(region)).any()
        end = region.end_nbytes
    kind = file.path.stat()
    assert stat.S_IMODE(kind.st_mode) == 0o600
    assert kind.st_size == kind.st_blocks * 512 == file.nbytes == end  # all of it reserved
    assert file.largest_nbytes == 3 * MIB


def test_a_file_grows_and_keeps_what_it_has(make):
    file = make([])
    assert (file.nbytes, file.largest_nbytes, file.regions) == (0, 0, [])
    for number, nbytes in enumerate((5000, 100, 70_000)):
        (new,) = file.grow([nbytes])
        assert file.regions[number] == new
        file.write(new.offset_nbytes, aligned(new.nbytes, number + 1))
        mapped = file.mapped(number)
    for number, region in enumerate(file.regions):
        assert (content(file, region) == number + 1).all()
        assert (file.mapped(number) == number + 1).all()
    assert (mapped == 3).all()
    assert file.grow([]) == []


def test_mapped_regions_and_transfers_show_each_other_what_they_wrote(make):
    file = make([50_000, MIB, 8192])
    mapped = [file.mapped(index) for index in range(3)]
    for turn in range(1, 4):
        for index, region in enumerate(file.regions):
            mapped[index].fill_(10 * turn + index)
            file.flush()
            assert (content(file, region) == 10 * turn + index).all()
            file.write(region.offset_nbytes, aligned(region.nbytes, 20 * turn + index))
            assert (mapped[index] == 20 * turn + index).all()
            mapped[index][7] = 0  # beside what a transfer has written
            file.flush()
            assert content(file, region)[6:9].tolist() == [20 * turn + index, 0, 20 * turn + index]


def test_mapped_regions_stay_when_the_file_goes(make):
    file = make([MIB])
    file.write(0, aligned(MIB, 5))
    mapped = file.mapped(0)
    file.close()
    file.path.unlink()
    assert (mapped == 5).all()
    mapped.fill_(6)
    assert (mapped == 6).all()


def test_a_mapping_takes_memory_only_as_it_is_touched_and_none_after_a_flush(make):
    file = make([64 * MIB, 64 * MIB])
    mapped = [file.mapped(index) for index in (0, 1)]
    assert resident_nbytes(file.path) == 0
    mapped[1][: 8 * MIB].fill_(1)
    assert 8 * MIB <= resident_nbytes(file.path) < 16 * MIB
    assert is_cached(file.path, 64 * MIB)
    file.flush()
    assert resident_nbytes(file.path) == 0
    assert not is_cached(file.path, 64 * MIB)
    assert int(mapped[1][: 8 * MIB : 4096].sum()) == 2048


def resident_nbytes(path):
    """Memory of this process that maps a file."""
    entries = re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M
    )
    sizes = [re.search(r"^Rss:\s+(\d+) kB", e, re.M) for e in entries if str(path) in e]
    return sum(int(size[1]) * 1024 for size in sizes)


def is_cached(path, offset_nbytes):
    """Whether a page is in memory, of whomever; looking does not bring it there."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096, offset=offset_nbytes) as page:
        first = ctypes.c_char.from_buffer(page)
        found = ctypes.c_ubyte()
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        assert libc.mincore(address, ctypes.c_size_t(4096), ctypes.byref(found)) == 0
        del first, address
        return bool(found.value & 1)


def test_transfers_leave_nothing_in_the_page_cache(make):
    file = make([MIB])
    file.write(0, aligned(MIB, 5))
    assert not is_cached(file.path, 0)
    content(file, file.regions[0])
    assert not is_cached(file.path, 0)


def test_closed_files_say_so_and_leave_no_descriptor(make):
    descriptors = len(os.listdir("/proc/self/fd"))
    file = make([4096])
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1 + file.is_direct
    file.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for use in (
        lambda: file.mapped(0),
        file.flush,
        lambda: file.grow([1]),
        lambda: content(file, Region(0, 4096)),
    ):
        with pytest.raises(RuntimeError, match=r"0\.states was closed, and is used again"):
            use()
    file.close()


def test_a_file_that_somebody_cut_is_an_error_and_stays_as_it_is(make):
    file = make([MIB, MIB])
    os.truncate(file.path, MIB + 5000)
    says = rf"{MIB} bytes at {MIB} of {file.path} failed: the file has only {MIB + 5000} bytes"
    with pytest.raises(RuntimeError, match=f"reading {says}.*resumed from its last checkpoint"):
        content(file, file.regions[1])
    with pytest.raises(RuntimeError, match=f"writing {says}"):
        file.write(MIB, aligned(MIB, 1))
    assert file.path.stat().st_size == MIB + 5000
    assert not content(file, file.regions[0]).any()


def test_a_full_disk_is_an_error_before_anything_is_trained(tmp_path):
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        says = rf"{5 * MIB} bytes at 0 .*: the disk is full, {5 * MIB} bytes are needed and \d+ are"
        with pytest.raises(RuntimeError, match=says):
            StateFile(disk / "a.states", [5 * MIB])
        assert os.listdir(disk) == []
        file = StateFile(disk / "a.states", [MIB])
        file.write(0, aligned(MIB, 3))
        with pytest.raises(RuntimeError, match="the disk is full") as caught:
            file.grow([MIB, 3 * MIB])
        needed, free = re.search(
            r"(\d+) bytes are needed and (\d+) are free", str(caught.value)
        ).groups()
        assert int(needed) == 4 * MIB
        assert 2 * MIB < int(free) <= 3 * MIB
        assert file.nbytes == MIB == file.path.stat().st_size
        assert len(file.regions) == 1
        file.grow([2 * MIB])
        assert (content(file, file.regions[0]) == 3).all()
        file.close()


def test_a_limit_of_files_is_an_error(tmp_path):
    def try_it():
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        texts = []
        try:
            StateFile(tmp_path / "a.states", [2 * MIB])
        except RuntimeError as error:
            texts.append(str(error))
        return texts, os.listdir(tmp_path)

    with forked(try_it) as (texts, left):
        assert len(texts) == 1
        assert f"a file of {2 * MIB} bytes is more than a limit allows" in texts[0]
        assert "ulimit -f" in texts[0]
        assert left == []


def test_errors_say_what_to_do(tmp_path):
    path = tmp_path / "a.states"
    path.write_bytes(bytes(100))
    for code, says in (
        (errno.EDQUOT, "the quota of this user is used up, 60 bytes are needed. Have the quota"),
        (errno.EIO, "Input/output error (errno 5). See what the system log says of this disk"),
    ):
        error = failure("writing", path, Region(40, 60), OSError(code, os.strerror(code)))
        assert f"writing 60 bytes at 40 of {path} failed: " in str(error)
        assert says in str(error)


def test_what_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "taken").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("taken", "link", "missing/a"):
        with pytest.raises(RuntimeError, match=f"making a file 4096 bytes .*{name} failed"):
            StateFile(tmp_path / name, [4096])
    with pytest.raises(ValueError, match="a region of -1 bytes"):
        StateFile(tmp_path / "new", [4096, -1])
    assert sorted(os.listdir(tmp_path)) == ["link", "taken"]
