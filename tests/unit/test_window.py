"""States that pass through a window: the same as in memory, bounded, and what goes wrong."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zero.memory import io_threads
from lightning_zero.memory.state_file import StateFile
from lightning_zero.memory.window import Window
from tests.helpers.forks import forked
from tests.helpers.limits import HANG_S

MIB = 2**20


class Gated(StateFile):
    """A disk that is as slow as a test wants, and says what it does."""

    def __init__(self, path, region_nbytes):
        self.reads, self.writes, self.attempts = [], [], 0
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self._said = threading.Condition()
        super().__init__(path, region_nbytes)

    def read(self, offset_nbytes, into):
        self.attempts += 1
        assert self.may_read.wait(HANG_S)
        super().read(offset_nbytes, into)
        self._say(self.reads, offset_nbytes)

    def write(self, offset_nbytes, data):
        assert self.may_write.wait(HANG_S)
        super().write(offset_nbytes, data)
        self._say(self.writes, offset_nbytes)

    def _say(self, done, offset_nbytes):
        with self._said:
            done.append(offset_nbytes // self.regions[0].nbytes)
            self._said.notify_all()

    def wait_until(self, condition):
        with self._said:
            assert self._said.wait_for(condition, HANG_S)


@pytest.fixture
def small_blocks(monkeypatch):
    """So that a region takes several, as a large one does."""
    monkeypatch.setattr(io_threads, "BLOCK_NBYTES", 8192)
    monkeypatch.setattr("lightning_zero.memory.window.BLOCK_NBYTES", 8192)


@pytest.fixture
def opened(tmp_path):
    """Makes a file, whose region has its index as content, and a window."""
    made = []

    def opened(regions, kind=StateFile, nbytes=40_000, **options):
        file = kind(tmp_path / f"{len(made)}.states", [nbytes] * regions)
        window = Window(file, **options)
        made.append((window, file))
        for index, region in enumerate(file.regions):
            window.write(index, torch.full((region.nbytes,), index, dtype=torch.uint8))
        return window, file

    yield opened
    for window, file in made:
        window.close()
        file.close()
        assert not io_thread_names()


def io_thread_names():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("states-")]


def values(window, count):
    """The content of regions of which each has one value."""
    found = []
    for _, memory in window.scan(range(count)):
        assert (memory == memory[0]).all()
        found.append(int(memory[0]))
    return found


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("is_direct", [True, False])
def test_after_any_accesses_the_file_equals_what_was_done_in_memory(
    tmp_path, monkeypatch, is_direct
):
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    number = iter(range(10**6))

    @settings(max_examples=25)
    @given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(1, 9))
    def check(seed, buffer_count, threads, regions):
        draw = random.Random(seed)
        file = StateFile(tmp_path / f"{next(number)}.states", sizes(draw, regions))
        window = Window(file, buffer_count=buffer_count, threads=threads)
        try:
            compare_with_memory(draw, file, window, buffer_count)
        finally:
            window.close()
            file.close()

    check()


def sizes(draw, count):
    return [draw.choice((1, 4096, 8192, 30_000, 100_000)) for _ in range(count)]


def compare_with_memory(draw, file, window, buffer_count):
    twin = [torch.zeros(region.nbytes, dtype=torch.uint8) for region in file.regions]
    for turn in range(1, 9):
        order = draw.sample(range(len(twin)), draw.randint(0, len(twin)))
        match draw.randrange(5):
            case 0:
                for index, memory in window.sweep(order):
                    assert torch.equal(memory, twin[index])
                    memory.mul_(3).add_(turn)
                    twin[index].mul_(3).add_(turn)
            case 1:
                reads = [window.begin_read(index) for index in order]
                if len(reads) <= buffer_count:
                    draw.shuffle(reads)
                for read in reads:
                    assert torch.equal(read.wait(), twin[read.index])
                    read.release()
            case 2:
                for index in order:
                    data = torch.randint(256, (twin[index].numel() - draw.choice((0, 9)),))
                    window.write(index, data.to(torch.uint8))
                    twin[index].zero_()[: data.numel()] = data
            case 3:
                for index in order:
                    file.mapped(index)[3:90] = twin[index][3:90] = turn
                file.flush()
            case 4:
                new = file.grow(sizes(draw, 2))
                twin += [torch.zeros(region.nbytes, dtype=torch.uint8) for region in new]
    for index, memory in window.scan(range(len(twin))):
        assert torch.equal(memory, twin[index])
        assert torch.equal(file.mapped(index), twin[index])


def test_regions_are_read_ahead_and_written_behind(opened):
    window, file = opened(8, Gated, buffer_count=4)
    file.reads.clear()
    file.writes.clear()
    sweep = window.sweep(range(8))
    assert next(sweep)[0] == 0
    file.wait_until(lambda: len(file.reads) == 4)  # without being asked for
    file.may_write.clear()
    for index in (1, 2, 3):
        assert next(sweep)[0] == index  # though what came before is not written yet
    assert file.writes == []
    assert sorted(file.reads) == [0, 1, 2, 3]  # bounded: all 4 buffers are in use
    file.may_write.set()
    assert [index for index, _ in sweep] == [4, 5, 6, 7]
    assert sorted(file.writes) == list(range(8))


def test_a_region_that_is_being_written_is_read_after_that(opened):
    window, file = opened(3, Gated)
    file.may_write.clear()
    sweep = window.sweep(range(2))
    next(sweep)[1].fill_(9)
    next(sweep)
    read = window.begin_read(0)
    other = window.begin_read(2)
    assert (other.wait() == 2).all()  # others do not wait
    assert not read.is_ready
    file.may_write.set()
    assert (read.wait() == 9).all()
    read.release()
    other.release()
    assert list(sweep) == []


def test_more_reads_than_buffers_begin_as_others_are_released_in_any_order(opened):
    window, file = opened(6, Gated, buffer_count=2)
    file.reads.clear()
    reads = [window.begin_read(index) for index in range(6)]
    file.wait_until(lambda: len(file.reads) == 2)
    assert (reads[1].wait() == 1).all()
    reads[1].release()
    assert (reads[2].wait() == 2).all()
    reads[3].release()  # before it has begun: its turn goes to the next
    reads[0].release()
    assert (reads[4].wait() == 4).all()
    with pytest.raises(RuntimeError, match="region 5 .* waits for one of 2 buffers, and all are"):
        reads[5].wait()
    reads[2].release()
    assert (reads[5].wait() == 5).all()
    for read in reads:
        read.release()
        read.release()
        with pytest.raises(RuntimeError, match=f"the read of region {read.index} was released"):
            read.wait()
    assert sorted(file.reads) == [0, 1, 2, 4, 5]
    assert values(window, 6) == list(range(6))  # all buffers are back


def test_a_read_that_is_released_on_its_way_gives_its_buffer_back(opened):
    window, file = opened(2, Gated, buffer_count=1)
    file.may_read.clear()
    read = window.begin_read(0)
    read.release()
    after = window.begin_read(1)
    file.may_read.set()
    assert (after.wait() == 1).all()
    after.release()


def test_a_read_on_its_way_is_not_mixed_with_what_is_written(opened):
    window, file = opened(1, Gated)
    file.may_read.clear()
    read = window.begin_read(0)
    writer = threading.Thread(target=window.write, args=(0, torch.full((40_960,), 9).byte()))
    file.writes.clear()
    writer.start()
    writer.join(0.2)
    assert file.writes == []
    file.may_read.set()
    assert (read.wait() == 0).all()
    writer.join(HANG_S)
    read.release()
    assert values(window, 1) == [9]


@pytest.mark.usefixtures("small_blocks")
def test_of_a_region_that_failed_no_more_is_tried(opened):
    window, file = opened(1, Gated, threads=1)
    os.truncate(file.path, 0)
    file.attempts = 0
    with pytest.raises(RuntimeError, match="somebody has cut"):
        window.begin_read(0).wait()
    window.close()
    assert file.attempts == 1  # of 5 blocks


@pytest.mark.usefixtures("small_blocks")
def test_tensors_of_any_kind_can_be_written(opened):
    window, file = opened(1)
    base = torch.randn(30, 70)
    for data in (base, base.t(), base.bfloat16(), base > 0, base[3, 4], base[:0], base.double()):
        window.write(0, data.requires_grad_(data.is_floating_point()))
        wanted = data.detach().contiguous().reshape(-1).view(torch.uint8)
        found = file.mapped(0)
        assert torch.equal(found[: wanted.numel()], wanted)
        assert not found[wanted.numel() :].any()
    with pytest.raises(ValueError, match=r"40961 bytes .* to region 0 of .*, which has 40960"):
        window.write(0, torch.zeros(40961, dtype=torch.uint8))


class Stop(Exception):
    pass


@pytest.mark.parametrize("how", ["raises", "breaks", "closes"])
def test_a_consumer_that_leaves_early_leaves_the_rest_as_it_was(opened, how):
    window, _ = opened(8)
    sweep = window.sweep(range(8))

    def consume():
        for index, memory in sweep:
            memory.fill_(100 + index)
            if index == 3 and how == "breaks":
                break
            if index == 3 and how == "raises":
                raise Stop
            if index == 3:
                sweep.close()

    if how == "raises":
        with pytest.raises(Stop):
            consume()
        del sweep
    else:
        consume()
        sweep.close()
    assert values(window, 8) == [100, 101, 102, 3, 4, 5, 6, 7]
    assert [index for index, _ in window.sweep(range(8))] == list(range(8))


def test_a_failing_read_is_raised_where_the_region_is_asked_for(opened):
    window, file = opened(6, buffer_count=2)
    nbytes = file.regions[0].nbytes
    os.truncate(file.path, 4 * nbytes + 100)
    seen = []
    sweep = window.sweep(range(6))
    with pytest.raises(RuntimeError, match=f"reading .* at {4 * nbytes} of .* somebody has cut"):
        seen.extend(index for index, memory in sweep if memory.fill_(50) is not None)
    assert seen == [0, 1, 2, 3]
    read = window.begin_read(5)
    with pytest.raises(RuntimeError, match="somebody has cut"):
        read.wait()
    read.release()
    with pytest.raises(RuntimeError, match="writing .* somebody has cut"):
        window.write(5, torch.ones(3))
    assert values(window, 4) == [50] * 4  # the window is of use, and each region whole
    assert file.path.stat().st_size == 4 * nbytes + 100


def test_a_failing_write_is_raised_in_the_consumer(tmp_path):
    def try_it():
        file = StateFile(tmp_path / "a.states", [MIB] * 6)
        window = Window(file, buffer_count=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))
        seen, errors = [], []
        for use in (
            lambda: [m.fill_(seen.append(i) or 7) for i, m in window.sweep(range(6))],
            lambda: window.write(4, torch.ones(5)),
            lambda: [m.fill_(8) for _, m in window.sweep([5])],  # the last: when it ends
        ):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))
        found = values(window, 6)
        window.close()
        return seen, errors, found, len(io_thread_names())

    with forked(try_it) as (seen, errors, found, threads):
        assert 4 <= len(seen) < 6
        for error, offset in zip(errors, (3, 4, 5), strict=True):
            assert f"writing {MIB} bytes at {offset * MIB} of {tmp_path}" in error
            assert "more than a limit allows" in error
        assert found == [7, 7, 7, 0, 0, 0]
        assert threads == 0


@pytest.mark.parametrize("is_swept", [True, False])
def test_a_window_that_is_closed_in_the_middle_ends_all_that_waits(opened, is_swept):
    window, file = opened(8, Gated, buffer_count=2)
    sweep = window.sweep(range(8)) if is_swept else window.scan(range(8))
    next(sweep)
    file.wait_until(lambda: file.reads.count(1) == 1)
    waiting = window.begin_read(5)
    window.close()
    with pytest.raises(RuntimeError, match="the window of states was closed"):
        waiting.wait()
    waiting.release()
    with pytest.raises(RuntimeError, match="the window of states was closed"):
        list(sweep)
    sweep.close()
    assert io_thread_names() == []
    for use in (lambda: window.begin_read(0), lambda: window.write(0, torch.ones(1))):
        with pytest.raises(RuntimeError, match="the window of states was closed"):
            use()
    window.close()


def test_a_thread_that_waits_is_woken_by_close(opened):
    window, file = opened(3, Gated, buffer_count=1)
    file.may_read.clear()
    reads = [window.begin_read(index) for index in range(2)]
    errors = []

    def wait():
        try:
            reads[1].wait()
        except RuntimeError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=window.close)
    closer.start()
    waiter.join(HANG_S)
    file.may_read.set()
    closer.join(HANG_S)
    assert "the window of states was closed" in errors[0]
    assert (reads[0].wait() == 0).all()  # what had begun is there
    assert not closer.is_alive()


def test_threads_end_when_nobody_uses_the_window(opened, tmp_path):
    file = StateFile(tmp_path / "own.states", [9000] * 3)
    window = Window(file, threads=3)
    next(window.sweep([0, 1]))
    assert len(io_thread_names()) == 3
    del window
    gc.collect()
    assert io_thread_names() == []
    file.close()


def test_a_file_that_is_closed_first_is_an_error(opened):
    window, file = opened(2)
    file.close()
    with pytest.raises(RuntimeError, match="was closed, and is used again"):
        list(window.sweep([0, 1]))


def test_what_would_lose_an_update_is_refused(opened):
    window, _ = opened(4)
    with pytest.raises(ValueError, match=r"through regions \[1\] more than once"):
        window.sweep([0, 1, 2, 1])
    sweep = window.sweep([0, 1, 2])
    next(sweep)
    with pytest.raises(RuntimeError, match=r"two sweeps pass through regions \[2\]"):
        next(window.sweep([2, 3]))
    with pytest.raises(RuntimeError, match="region 2 .* written while a sweep passes through it"):
        window.write(2, torch.ones(4))
    window.write(3, torch.ones(4))
    sweep.close()
    window.write(2, torch.ones(4))
    assert [index for index, _ in window.sweep([2, 3])] == [2, 3]
    for use in (window.begin_read, lambda n: window.sweep([n]), lambda n: list(window.scan([n]))):
        for index in (-1, 4):
            with pytest.raises(IndexError, match=f"region {index} of .* which has 4"):
                use(index)


def test_windows_need_a_buffer_and_a_thread(tmp_path):
    file = StateFile(tmp_path / "a.states", [9000])
    with pytest.raises(ValueError, match="buffer_count=0"):
        Window(file, buffer_count=0)
    with pytest.raises(ValueError, match="0 threads"):
        Window(file, threads=0)
    file.close()
    assert io_thread_names() == []


def test_memory_is_that_of_the_buffers_however_large_the_file_is(tmp_path):
    file_nbytes, region_nbytes, limit_nbytes = 256 * MIB, 4 * MIB, 96 * MIB

    def try_it():
        used = data_nbytes("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit_nbytes, used + limit_nbytes))
        before = data_nbytes("RssAnon")
        file = StateFile(tmp_path / "a.states", [region_nbytes] * (file_nbytes // region_nbytes))
        window = Window(file)
        most = 0
        for _ in range(2):
            for index, memory in window.sweep(range(len(file.regions))):
                memory[:: 2**16].add_(index)
                most = max(most, data_nbytes("RssAnon") - before)
        return window.nbytes, most

    with forked(try_it) as (nbytes, most):
        assert nbytes == 4 * region_nbytes
        assert 3 * region_nbytes < most < 5 * region_nbytes


def data_nbytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (int(line.split()[1]) for line in lines if line.startswith(name + ":"))
    return value * 1024
