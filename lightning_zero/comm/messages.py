"""One-sided reads: a rank reads the shards of the others without a call of theirs.

[Note: one-sided reads]
Ranks of one job may run different modules: experts, branches on data, texts of different length, a
forward on rank 0 only. A collective gather would wait there for a call that never comes. So each
rank has a thread that answers reads of its shards, and what a rank runs is its own affair.

Shards change only between two *versions*. To change them, all ranks meet at a fence ("I have ended
all my reads"), change their shards, and publish the next version. A read of a version that is not
out yet is answered when it is. So no read is torn, or of a mixture of two versions, and it never
waits for more than the optimizer step of the rank that it reads from.

[Note: offered reads]
Steps are alike, so most reads can be foreseen: as many of each bucket as in the two versions
before, if all ranks have read alike there. They are *offered* when a version is published: the
sends are posted, and each goes when its reader posts the receive, without a request, and without
the interpreter of this process. What a rank does not read of them, it receives at the fence and
drops.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero import _compat
from lightning_zero._compat import unprofiled
from lightning_zero.comm.api import Handle
from lightning_zero.comm.reads import ShardReads

UNANSWERED_TIMEOUT = timedelta(days=365)
"""The thread waits for requests as long as the process lives."""

MAX_UNCHECKED_MESSAGES = 64
MAX_OFFERED_KEYS, MAX_OFFERED_READS = 2**12, 2**5
"""Buckets, and reads of each, that can be offered; the rest is requested."""

_READ, _FENCE, _END = 1, 2, 3
_REQUEST_TAG = 2**30  # answers use the tags below it, offers those above it


class _Request(NamedTuple):
    peer: int
    key: int
    version: int
    tag: int


class MessageReads(ShardReads):
    """Reads by messages over gloo, see [Note: one-sided reads].

    Args:
        group: A gloo group that nobody else uses, made with ``UNANSWERED_TIMEOUT``.
        timeout: Longest wait for another rank.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(rank=group.rank(), world_size=group.size())
        self._group = group
        self._timeout = timeout
        # Each rank begins with its right neighbour, so that no rank is everybody's first.
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._changed = threading.Condition()
        self._version = 0
        self._shards: MutableMapping[int, Tensor] = {}
        self._is_open = False
        self._early: list[_Request] = []
        self._fences: defaultdict[int, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        self._counts: Counter[int] = Counter()
        self._agreed_counts: Counter[int] = Counter()
        self._offered: Counter[int] = Counter()
        self._offers: list[Any] = []
        self._failure: Exception | None = None
        self._answers: deque[tuple[Any, Tensor]] = deque()
        self._messages: deque[tuple[Any, Tensor]] = deque()
        self._tag = 0
        self._thread: threading.Thread | None = None

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """See the base class.

        Raises:
            RuntimeError: The shards of another session are still offered.
        """
        if self._is_open:
            raise RuntimeError(
                "these ShardGroups already serve an engine that was not closed: its ranks would"
                " read the shards of this one. Close it, or give each engine groups of its own"
                " (ShardGroups.create())."
            )
        with self._changed:
            self._shards, self._is_open = dict(shards), True
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shard reads", daemon=True)
            self._thread.start()
        self.publish()

    def extend(self, shards: Mapping[int, Tensor]) -> None:
        """See the base class."""
        with self._changed:
            self._shards.update(shards)

    def all_gather(self, flat: Tensor, shard: Tensor, key: int) -> Handle:
        """See the base class."""
        place, self._counts[key] = self._counts[key], self._counts[key] + 1
        is_offered = place < self._offered[key]
        if not is_offered:
            self._tag = self._tag % (_REQUEST_TAG - 1) + 1
        tag = _offer_tag(key, place) if is_offered else self._tag
        numel = shard.numel()
        parts = {peer: flat[peer * numel : (peer + 1) * numel] for peer in self._peers}
        landing = parts
        if flat.device.type != "cpu":
            landing = {peer: torch.empty_like(part, device="cpu") for peer, part in parts.items()}
        works = []
        for peer in self._peers:
            with _from(peer):
                works.append((peer, unprofiled(self._group.recv, [landing[peer]], peer, tag)))
        for peer in () if is_offered else self._peers:
            with _from(peer):
                self._send(peer, torch.tensor([_READ, key, self._version, tag, 0]))
        return _Read(works, parts, landing, self._timeout)

    def fence(self, reason: str, note: int = 0) -> list[int]:
        """See the base class."""
        code = _code(reason)
        self._take_in_offers()
        digest = hash(tuple(sorted(self._counts.items())))
        for peer in self._peers:
            self._send(peer, torch.tensor([_FENCE, code, self._version, note, digest]))
        with self._changed:
            arrived = self._fences[self._version]
            self._changed.wait_for(
                lambda: len(arrived) == len(self._peers) or self._failure is not None,
                self._timeout.total_seconds(),
            )
            missing = [peer for peer in sorted(self._peers) if peer not in arrived]
            others = [peer for peer, (theirs, *_) in sorted(arrived.items()) if theirs != code]
            failure = self._failure
            if not missing:
                del self._fences[self._version]
        if missing:
            raise RuntimeError(
                f"rank {self.rank} waited at '{reason}' for rank(s) {missing}, which"
                f" {'are gone' if failure else 'did not come'} (timeout {self._timeout})."
                " Parameters that are sharded change on all ranks together: optimizer steps, and"
                " writes to weights, have to be made on every rank."
            ) from failure
        if others:
            raise RuntimeError(
                f"rank {self.rank} is at '{reason}' while rank(s) {others} change parameters for"
                " another reason: optimizer steps and writes to weights have to be made on every"
                " rank, in the same order"
            )
        while self._answers:  # who comes to the fence has received what it had asked for
            self._answers.popleft()[0].wait(self._timeout)
        for work in self._offers:
            work.wait(self._timeout)
        self._offers = []
        offered = sum(self._shards[key].nbytes * n for key, n in self._offered.items())
        self.sent_nbytes += offered * len(self._peers)
        self._foresee(all(theirs == digest for _, _, theirs in arrived.values()))
        notes = {peer: theirs for peer, (_, theirs, _) in arrived.items()} | {self.rank: note}
        return [notes[rank] for rank in range(self.world_size)]

    def publish(self) -> None:
        """See the base class."""
        if any(shard.device.type != "cpu" for shard in self._shards.values()):
            torch.accelerator.synchronize()  # the thread reads on a stream of its own
        with self._changed:
            self._version += 1
            early, self._early = self._early, []
            for request in early:
                self._answer(request)
            self._offers = [
                unprofiled(self._group.send, [self._shards[key]], peer, _offer_tag(key, place))
                for key, count in self._offered.items()
                for place in range(count)
                for peer in self._peers
            ]

    def _foresee(self, is_agreed: bool) -> None:
        """What to offer of the next version, see [Note: offered reads]."""
        counts = self._counts if is_agreed else Counter[int]()
        both = counts & self._agreed_counts
        self._agreed_counts, self._counts = counts, Counter()
        self._offered = Counter(
            {
                key: min(count, MAX_OFFERED_READS)
                for key, count in both.items()
                if key < MAX_OFFERED_KEYS and self._shards[key].device.type == "cpu"
            }
        )

    def _take_in_offers(self) -> None:
        """Receive and drop what was offered to this rank and not read."""
        for key, count in self._offered.items():
            shard = self._shards[key]
            for tag in (_offer_tag(key, place) for place in range(self._counts[key], count)):
                for peer in self._peers:
                    work = unprofiled(self._group.recv, [torch.empty_like(shard)], peer, tag)
                    with _from(peer):
                        work.wait(self._timeout)

    def close(self) -> None:
        """See the base class."""
        self.fence("end of training or evaluation")
        self._await_messages()  # this process may end next: what has not left it would be lost
        for counter in (self._offered, self._agreed_counts, self._counts):
            counter.clear()
        with self._changed:
            self._shards, self._is_open = {}, False

    def abandon(self) -> None:
        """See the base class."""
        with self._changed:
            self._shards = weakref.WeakValueDictionary(self._shards)

    def end(self) -> None:
        """See the base class."""
        for peer in self._peers:
            with suppress(RuntimeError):  # it has ended
                self._send(peer, torch.tensor([_END, 0, 0, 0, 0]))
        self._await_messages()
        if self._thread is not None:
            self._thread.join(self._timeout.total_seconds())
        dist.destroy_process_group(self._group)

    def _await_messages(self) -> None:
        while self._messages:
            with suppress(RuntimeError):  # a rank that has what it waited for may have ended
                self._messages.popleft()[0].wait(self._timeout)

    def _serve(self) -> None:
        """Answer the other ranks until the end, of the process or of one of them."""
        message = torch.empty(5, dtype=torch.int64)
        try:
            while True:
                # The group's own methods: each call that lets go of the interpreter's lock may
                # have to wait for it again, while the main thread waits for this one's.
                work = unprofiled(self._group.recv_anysource, [message], _REQUEST_TAG)
                work.wait()
                kind, first, version, last, digest = message.tolist()
                peer = _compat.source_rank(work)
                if kind == _END:
                    return
                with self._changed:
                    if kind == _READ:
                        self._answer(_Request(peer, first, version, last))
                    else:
                        self._fences[version][peer] = (first, last, digest)
                        self._changed.notify_all()
        except Exception as error:  # told to whoever waits; raising in a thread helps nobody
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _answer(self, request: _Request) -> None:
        if request.version > self._version:
            self._early.append(request)
            return
        if request.version < self._version:
            raise AssertionError(f"rank {request.peer} reads what it has said to have read")
        shard = self._shards.get(request.key)
        if shard is None:  # given up after an error; the reader's own deadline tells it so
            return
        self.sent_nbytes += shard.nbytes
        shard = shard if shard.device.type == "cpu" else shard.cpu()
        work = unprofiled(self._group.send, [shard], request.peer, request.tag)
        self._answers.append((work, shard))

    def _send(self, peer: int, message: Tensor) -> None:
        work = unprofiled(self._group.send, [message], peer, _REQUEST_TAG)
        self._messages.append((work, message))
        if len(self._messages) > MAX_UNCHECKED_MESSAGES:  # it has arrived long before that
            self._messages.popleft()[0].wait(self._timeout)


class _Read:
    """Handle of one read from all other ranks."""

    def __init__(
        self,
        works: list[tuple[int, Any]],
        parts: dict[int, Tensor],
        landing: dict[int, Tensor],
        timeout: timedelta,
    ) -> None:
        self._works, self._timeout = works, timeout
        self._parts, self._landing = parts, landing

    def wait(self, timeout: timedelta | None = None) -> None:
        for peer, work in self._works:
            with _from(peer):
                work.wait(timeout or self._timeout)
        if self._landing is not self._parts:
            for peer, part in self._parts.items():
                part.copy_(self._landing[peer])
        self._works, self._parts, self._landing = [], {}, {}


@contextmanager
def _from(peer: int) -> Iterator[None]:
    """Say from which rank something does not come."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"rank {peer} did not send its shard: {error}") from error


def make_reads(timeout: timedelta) -> ShardReads:
    """Reads over all ranks of the default group, of more than one; to be called on all ranks.

    Args:
        timeout: Longest wait for another rank.
    """
    return MessageReads(dist.new_group(backend="gloo", timeout=UNANSWERED_TIMEOUT), timeout)


def _offer_tag(key: int, place: int) -> int:
    return _REQUEST_TAG + 1 + key * MAX_OFFERED_READS + place


def _code(reason: str) -> int:
    """A number for a reason, the same in all processes."""
    return int.from_bytes(reason.encode()[:7].ljust(7), "little") ^ len(reason)
