"""Scopes in which a user sees whole parameters, and whether what is written in them is kept.

[Note: scopes in scopes]
What an inner scope keeps is no change to an outer one, and stays if the outer one is undone. What
an outer scope has written so far is there when an inner one begins, and is kept with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.comm import Collectives
from lightning_zero.params import parameter_dict
from lightning_zero.params.dense import fingerprint
from lightning_zero.params.part import BucketPart, Part, WholePart
from lightning_zero.plan.wording import some
from lightning_zero.prefetch.coordinator import ParameterCoordinator

Wanted = nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]


def listed(wanted: Wanted) -> list[nn.Module | nn.Parameter]:
    """The modules and parameters that are wanted, in order.

    Raises:
        TypeError: Something is neither a module nor a parameter.
    """
    if isinstance(wanted, (nn.Module, nn.Parameter)):
        return [wanted]
    if isinstance(wanted, (Tensor, str)) or not isinstance(wanted, Iterable):
        raise TypeError(
            "expected a module, a parameter or an iterable of both, got"
            f" {type(wanted).__name__}: {wanted!r:.80}"
        )
    return [found for each in wanted for found in listed(each)]


def parameters_in(wanted: Wanted) -> list[nn.Parameter]:
    """All parameters that are wanted, each once; nothing is fetched for it.

    Raises:
        TypeError: Something is neither a module nor a parameter.
    """
    found: dict[nn.Parameter, None] = {}
    for each in listed(wanted):
        if isinstance(each, nn.Parameter):
            found[each] = None
            continue
        for module in each.modules():
            own = parameter_dict.plain(module).values()
            found.update((parameter, None) for parameter in own if parameter is not None)
    return list(found)


class Writes(ABC):
    """What becomes of what is written in a scope."""

    is_watched = False
    """Whether parts are asked if they were changed."""
    is_undone = True
    """Whether what is not kept is undone, also in parameters that stay in memory."""

    @abstractmethod
    def settle(self, parts: Sequence[Part]) -> bool:
        """The scope has ended without an error; returns whether what is in the parts is kept.

        Raises:
            RuntimeError: Something was written that cannot be kept.
        """


class NoWrites(Writes):
    """Nothing may be written. Ranks do not meet: one that only reads may be alone."""

    is_watched = True

    def settle(self, parts: Sequence[Part]) -> bool:
        """See the base class."""
        changed = [part.label for part in parts if part.is_changed()]
        if changed:
            raise RuntimeError(
                f"{some(changed)} was written to inside of full_params() that was entered without"
                " writeback=True, so nothing of it was kept: say writeback=True to keep what is"
                " written"
            )
        return False


class TrustedWrites(Writes):
    """Every rank writes the same, as when all of them load one file; nobody compares."""

    is_undone = False

    def settle(self, parts: Sequence[Part]) -> bool:
        """See the base class."""
        for part in parts:
            part.take_in()
        return True


class AgreedWrites(Writes):
    """What is written is kept if it is the same on all ranks.

    Args:
        control: Group over which ranks compare.
    """

    _what = "full_params(writeback=True)"

    def __init__(self, control: Collectives) -> None:
        self._control = control

    def settle(self, parts: Sequence[Part]) -> bool:
        """See the base class."""
        refusal = _taken_in(parts)
        is_alone = self._control.world_size == 1
        mine = [] if is_alone or refusal else [part.fingerprint() for part in parts]
        every = self._meet(parts, refusal, mine)
        differing = [
            part
            for part, found in zip(parts, zip(*every, strict=True), strict=False)
            if len(set(found)) > 1
        ]
        if differing:
            raise RuntimeError(
                f"{self._what}: the ranks have written different values, so nothing was kept:"
                f" {self._describe(differing)}. Write the same on every rank, or say whose values"
                " are meant: full_params(..., from_rank=0)."
            )
        return True

    def _meet(self, parts: Sequence[Part], refusal: str, mine: list[int]) -> list[list[int]]:
        """What all ranks say, once it is sure that they are at the same point."""
        labels = [part.label for part in parts]
        every = self._exchange((self._what, labels, refusal, mine))
        strangers = [rank for rank, there in enumerate(every) if there[:2] != every[0][:2]]
        if strangers:
            raise RuntimeError(
                f"rank(s) {strangers} are at the end of another scope, or of one of other"
                f" parameters, than rank 0, which is at that of {every[0][0]} of"
                f" {some(every[0][1])}: enter the same scopes on all ranks. Nothing was kept."
            )
        refusals = [f"rank {rank}: {said}" for rank, (_, _, said, _) in enumerate(every) if said]
        if refusals:
            raise RuntimeError(f"{self._what}: nothing was kept. {'; '.join(refusals)}")
        return [prints for _, _, _, prints in every]

    def _describe(self, parts: Sequence[Part]) -> str:
        mine = {name: fingerprint(v) for part in parts for name, v in part.named_values().items()}
        every = self._exchange(mine)
        told = []
        for name in mine:
            ranks_of: dict[int, list[int]] = {}
            for rank, prints in enumerate(every):
                ranks_of.setdefault(prints[name], []).append(rank)
            if len(ranks_of) > 1:
                groups = " from ".join(f"rank(s) {ranks}" for ranks in ranks_of.values())
                told.append(f"{name!r} differs on {groups}")
        return some(told or [part.label for part in parts])

    def _exchange(self, mine: Any) -> list[Any]:
        return self._control.exchange_objects(mine, f"leave {self._what}")


class WritesOfRank(AgreedWrites):
    """What one rank has written is kept on all of them.

    Args:
        control: Group over which values are sent.
        rank: The rank.
    """

    def __init__(self, control: Collectives, rank: int) -> None:
        super().__init__(control)
        is_rank = isinstance(rank, int) and not isinstance(rank, bool)
        if not is_rank or not 0 <= rank < control.world_size:
            raise ValueError(
                f"from_rank must be a rank of 0 to {control.world_size - 1}, got {rank!r}"
            )
        self._rank = rank
        self._what = f"full_params(from_rank={rank})"

    def settle(self, parts: Sequence[Part]) -> bool:
        """See the base class."""
        is_source = self._control.rank == self._rank
        self._meet(parts, _taken_in(parts) if is_source else "", [])
        for part in parts:
            if not is_source:
                part.drop_writes()
            self._control.broadcast([part.values], self._rank)
        return True


class HeldParameters:
    """Makes parameters of a model whole for a user, and keeps what is written if it is wanted.

    Args:
        names: Name of each parameter of the model.
        coordinator: Brings buckets in.
        control: Group over which ranks agree.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        coordinator: ParameterCoordinator,
        control: Collectives,
    ) -> None:
        self._names = names
        self._coordinator = coordinator
        self._control = control
        self._scopes: list[list[Part]] = []

    def chosen(self, writeback: bool, from_rank: int | None) -> Writes:
        """What becomes of writes, as users say it.

        Args:
            writeback: Keep what all ranks have written alike.
            from_rank: Keep what this rank has written.

        Raises:
            ValueError: There is no such rank.
        """
        if from_rank is not None:
            return WritesOfRank(self._control, from_rank)
        return AgreedWrites(self._control) if writeback else NoWrites()

    @contextmanager
    def scope(self, parameters: Iterable[nn.Parameter] | None, writes: Writes) -> Iterator[None]:
        """While inside, parameters are whole, see [Note: scopes in scopes].

        Args:
            parameters: Those of the model count; None for all of them.
            writes: What becomes of what is written.
        """
        coordinator = self._coordinator
        coordinator.visits.settle()
        wanted = set(self._names if parameters is None else parameters)
        parts = self._parts(wanted, writes.is_watched)
        with coordinator.held([part.bucket for part in parts if isinstance(part, BucketPart)]):
            if writes.is_undone:
                with torch.no_grad():
                    for part in parts:
                        part.remember()
            self._scopes.append(parts)
            try:
                yield
                with torch.no_grad():
                    if writes.settle(parts):
                        self._keep(parts)
            except BaseException:
                with torch.no_grad():
                    for part in parts:
                        part.undo()
                raise
            finally:
                self._scopes = [scope for scope in self._scopes if scope is not parts]

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While inside, weights may be loaded on all ranks, with the same values.

        The parameters of a module are whole while ``load_state_dict`` is at it.
        """
        if self._scopes:  # what is whole already is, and belongs to somebody
            with self.scope(None, TrustedWrites()):
                yield
            return
        self._coordinator.release_all()
        with self._coordinator.visits.loading():
            yield

    def check_left(self, what: str) -> None:
        """Make sure that no scope is open.

        Raises:
            RuntimeError: One is.
        """
        if self._scopes:
            raise RuntimeError(
                f"{what} inside of full_params(): it changes the shards of parameters that are held"
                " whole there. Leave the `with` block first."
            )

    def forget(self) -> None:
        """No scope counts any more, after an error."""
        self._scopes = []

    def _parts(self, wanted: set[nn.Parameter], is_watched: bool) -> list[Part]:
        """The parts of a scope in model order, the same on all ranks."""
        buckets = {self._coordinator.bucket_of(parameter) for parameter in wanted}
        parts: list[Part] = [
            BucketPart(bucket, self._coordinator.residency.give_back, is_watched)
            for bucket in self._coordinator.buckets.values()
            if bucket in buckets
        ]
        for parameter, name in self._names.items():
            if parameter in wanted and self._coordinator.bucket_of(parameter) is None:
                parts.append(WholePart(name, parameter))
        return parts

    def _keep(self, parts: Sequence[Part]) -> None:
        with self._coordinator.residency.update("full_params(writeback=True)"):
            for part in parts:
                part.keep()
        kept = {part.label for part in parts}
        for outer in self._scopes[:-1]:
            for part in outer:
                if part.label in kept:
                    part.remember()


def _taken_in(parts: Sequence[Part]) -> str:
    """Why a part cannot take in what was assigned to its parameters; empty if all have."""
    try:
        for part in parts:
            part.take_in()
    except RuntimeError as error:
        return str(error)
    return ""
