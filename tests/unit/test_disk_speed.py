"""How fast a disk is."""

from __future__ import annotations

import os
import threading
import time

import pytest

from lightning_zero.memory.disk_speed import DiskSpeed, measure_disk_speed
from lightning_zero.memory.io_threads import BLOCK_NBYTES
from lightning_zero.memory.state_file import StateFile


class Metered(StateFile):
    """A disk that moves so many bytes a second, one block at a time, and says what it moved."""

    read_nbytes_per_s, write_nbytes_per_s = 800e6, 400e6

    def __init__(self, path, region_nbytes):
        super().__init__(path, region_nbytes)
        self.moved, self._arm = [], threading.Lock()

    def read(self, offset_nbytes, into):
        self._serve("read", offset_nbytes, into.nbytes / self.read_nbytes_per_s)

    def write(self, offset_nbytes, data):
        self._serve("write", offset_nbytes, data.nbytes / self.write_nbytes_per_s)

    def _serve(self, what, offset_nbytes, duration_s):
        with self._arm:
            time.sleep(duration_s)
            self.moved.append((what, offset_nbytes))


def test_finds_the_speed_of_a_disk(tmp_path):
    file = Metered(tmp_path / "a.states", [5 * BLOCK_NBYTES + 4096])
    speed = measure_disk_speed(file)
    file.close()
    assert 500e6 < speed.read_nbytes_per_s <= 800e6
    assert 250e6 < speed.write_nbytes_per_s <= 400e6
    assert 333e6 < speed.both_nbytes_per_s <= 534e6  # 2 / (1 / 800 + 1 / 400)
    offsets = range(0, file.nbytes, BLOCK_NBYTES)
    assert sorted(file.moved) == sorted(
        (what, offset) for what in ("read", "write") for offset in offsets for _ in range(2)
    )
    assert speed.sweep_s(1000) == 2000 / speed.both_nbytes_per_s


def test_a_sweep_reads_and_writes_each_byte():
    assert DiskSpeed(3e9, 2e9, 4e9).sweep_s(10**9) == 0.5


def test_a_disk_that_fails_is_an_error(tmp_path):
    file = StateFile(tmp_path / "a.states", [3 * BLOCK_NBYTES])
    os.truncate(file.path, BLOCK_NBYTES)
    with pytest.raises(RuntimeError, match="somebody has cut"):
        measure_disk_speed(file)
    file.close()
