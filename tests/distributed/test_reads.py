"""One-sided reads: versions, fences, and what they say when a rank does not come."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero import ShardGroups
from lightning_zero.comm.messages import MessageReads
from tests.helpers.spawn import RanksFailed, run_ranks

NUMEL, KEYS, VERSIONS = 1000, 3, 40


def connected(timeout_s):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return ShardGroups.create(timedelta(seconds=timeout_s)).reads()


def value(rank, key, version):
    return float(rank * 10_000 + key * 1000 + version)


def read_whole(reads, key, version):
    """Read a bucket; whether each rank's part is of one version."""
    own = torch.full((NUMEL,), value(reads.rank, key, version))
    flat = torch.empty(reads.world_size * NUMEL)
    flat[reads.rank * NUMEL : (reads.rank + 1) * NUMEL] = own
    handle = reads.all_gather(flat, own, key)
    return handle, flat


def is_of(flat, key, version, world_size):
    expected = [value(rank, key, version) for rank in range(world_size)]
    return torch.equal(flat.view(world_size, NUMEL), torch.tensor([[v] * NUMEL for v in expected]))


def versions_never_mix():
    """Each rank reads what and when it likes, several reads at a time, some of them early."""
    reads = connected(30)
    dice = random.Random(reads.rank)
    shards = {key: torch.full((NUMEL,), value(reads.rank, key, 0)) for key in range(KEYS)}
    reads.open(shards)
    wrong = []
    count = 0
    for version in range(VERSIONS):
        keys = [dice.randrange(KEYS) for _ in range(dice.randrange(4))]
        handles = [(key, *read_whole(reads, key, version)) for key in keys]
        time.sleep(dice.random() * 0.004)
        for key, handle, flat in dice.sample(handles, len(handles)):
            handle.wait()
            count += 1
            if not is_of(flat, key, version, reads.world_size):
                wrong.append((version, key))
        with reads.update("test", note=reads.rank + version) as notes:
            assert notes == [rank + version for rank in range(reads.world_size)]
            for key, shard in shards.items():
                shard.fill_(-1.0)  # what a torn read would see
                time.sleep(dice.random() * 0.002)
                shard.fill_(value(reads.rank, key, version + 1))
    sent = reads.sent_nbytes
    reads.close()
    # A second session over the same group, whose shards are others.
    reads.open({key: shard + 0.5 for key, shard in shards.items()})
    flat = torch.empty(reads.world_size * NUMEL)
    own = slice(reads.rank * NUMEL, (reads.rank + 1) * NUMEL)
    flat[own] = shards[0] + 0.5
    reads.all_gather(flat, flat[own], 0).wait()
    expected = [value(rank, 0, VERSIONS) + 0.5 for rank in range(reads.world_size)]
    again = torch.equal(flat.view(-1, NUMEL)[:, 0], torch.tensor(expected))
    reads.close()
    return wrong, count, sent, again


@pytest.mark.parametrize("world_size", [2, 3])
def test_versions_never_mix_whoever_reads_when(world_size):
    found = run_ranks(versions_never_mix, world_size)
    assert [wrong for wrong, *_ in found] == [[]] * world_size
    assert all(again for *_, again in found)
    counts = [count for _, count, _, _ in found]
    for rank, (_, _, sent, _) in enumerate(found):
        assert sent == 4 * NUMEL * sum(counts[:rank] + counts[rank + 1 :])


def reads_that_are_foreseen():
    """Ranks read alike for some versions, then one of them reads less, another one more."""
    reads = connected(20)
    shards = {key: torch.full((NUMEL,), value(reads.rank, key, 0)) for key in range(KEYS)}
    reads.open(shards)
    counts = [{0: 2, 1: 1}] * 5  # of each key, by version
    counts += [{0: 2 - (reads.rank == 0), 1: 1 + (reads.rank == 1), 2: reads.rank}]
    counts += [{0: 2, 1: 1}] * 5
    wrong, offered = [], []
    for version, wanted in enumerate(counts):
        offered.append(dict(reads._offered))
        for key, count in wanted.items():
            for _ in range(count):
                handle, flat = read_whole(reads, key, version)
                handle.wait()
                if not is_of(flat, key, version, reads.world_size):
                    wrong.append((version, key))
        with reads.update("test"):
            for key, shard in shards.items():
                shard.fill_(value(reads.rank, key, version + 1))
    sent = reads.sent_nbytes
    reads.close()
    return wrong, offered, sent


def test_reads_are_offered_once_two_versions_were_alike_on_all_ranks():
    found = run_ranks(reads_that_are_foreseen, 2)
    alike = {0: 2, 1: 1}
    for wrong, offered, _ in found:
        assert wrong == []
        # The sixth version is not alike, so nothing is foreseen until there are two more.
        assert offered == [{}, {}, *[alike] * 4, {}, {}, *[alike] * 3]
    # Rank 0 leaves one read out and takes it in unread; rank 1 reads two more.
    usual = 4 * NUMEL * 3 * 11
    assert found[1][2] == usual
    assert found[0][2] == usual + 4 * NUMEL * 2


def failing_fences():
    reads = connected(1.5)
    reads.open({0: torch.zeros(4)})
    texts = []
    try:
        reads.fence("optimizer step" if reads.rank == 0 else "writing to weights")
    except RuntimeError as error:
        texts.append(str(error))
    dist.barrier()
    begin_s = time.monotonic()
    if reads.rank == 0:
        try:
            reads.fence("optimizer step")
        except RuntimeError as error:
            texts.append(str(error))
    took_s = time.monotonic() - begin_s
    dist.barrier()
    return texts, took_s


def test_fence_names_who_did_not_come_and_who_came_for_something_else():
    (first, took_s), (second, _) = run_ranks(failing_fences, 2)
    assert "rank 0 is at 'optimizer step' while rank(s) [1]" in first[0]
    assert "rank 1 is at 'writing to weights' while rank(s) [0]" in second[0]
    assert "rank 0 waited at 'optimizer step' for rank(s) [1], which did not come" in first[1]
    assert 1.4 < took_s < 5


def one_leaves(log):
    reads = connected(20)
    reads.open({0: torch.zeros(4)})
    dist.barrier()
    if reads.rank == 1:
        os._exit(0)
    begin_s = time.monotonic()
    try:
        while time.monotonic() - begin_s < 15:
            reads.all_gather(torch.zeros(8), torch.zeros(4), 0).wait()
            time.sleep(0.1)
    except RuntimeError as error:
        Path(log).write_text(str(error))
        raise


def test_rank_that_is_gone_is_named_at_once(tmp_path):
    log = tmp_path / "text"
    with pytest.raises(RanksFailed, match="rank 1 died"):
        run_ranks(one_leaves, 2, str(log))
    assert "rank 1 did not send its shard" in log.read_text()


class Busy(MessageReads):
    """Its thread begins to listen late."""

    def _serve(self):
        time.sleep(1.0)
        super()._serve()


def one_ends_first(log):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    kind = MessageReads if dist.get_rank() else Busy
    reads = kind(dist.new_group(backend="gloo"), timedelta(seconds=20))
    reads.open({0: torch.zeros(4)})
    dist.barrier()
    try:
        reads.close()
        text = "closed"
    except RuntimeError as error:
        text = str(error)
    if reads.rank == 0:
        Path(log).write_text(text)
    os._exit(0)


def test_rank_that_ends_first_has_told_the_others(tmp_path):
    """Its last message may be on its way while its process ends."""
    log = tmp_path / "text"
    with pytest.raises(RanksFailed, match="died"):  # both of them, by themselves
        run_ranks(one_ends_first, 2, str(log))
    assert log.read_text() == "closed"
