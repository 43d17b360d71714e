"""Training batches that end on all ranks together.

[Note: ranks in step]
A training step needs every rank, so a rank that runs out of batches would leave the others waiting.
Where the loaders of all ranks have the same number of batches, nothing is done. Where the numbers
are known and differ, the smallest holds for all of them. Where one is not known, ranks tell each
other before every batch whether they have one: one sum of one number. A length that an iterable
dataset claims is not known, since nothing holds the dataset to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal
from warnings import warn

import torch
from torch.utils.data import IterableDataset

from lightning_zero.comm import Collectives

UnevenBatches = Literal["stop", "error"]

MOST_NAMED_RANKS = 8
REMEDY = (
    "Give every rank the same number of batches: DistributedSampler does, and a stream can repeat"
    " or drop its last samples"
)


class EvenBatches:
    """Makes training loaders end on all ranks after the same number of batches.

    Args:
        uneven: ``"stop"`` ends the epoch on all ranks when the first of them has no batch left, and
            says so once. ``"error"`` raises on all ranks.

    Raises:
        ValueError: ``uneven`` is neither.
    """

    def __init__(self, uneven: UnevenBatches = "stop") -> None:
        if uneven not in ("stop", "error"):
            raise ValueError(
                f"uneven_batches must be 'stop' or 'error', got {uneven!r}: 'stop' ends an epoch on"
                " all ranks when one of them has no training batch left, 'error' raises"
            )
        self.uneven = uneven
        self._control: Collectives | None = None
        self._device = torch.device("cpu")
        self._is_announced = False

    @property
    def is_open(self) -> bool:
        """Whether a fit is under way, in which all ranks ask for batches together."""
        return self._control is not None

    def begin(self, control: Collectives, device: torch.device) -> None:
        """Open, if it is not open yet.

        Args:
            control: Group of the agreements.
            device: Where the numbers that are agreed about have to be for this group.
        """
        if self._control is None:
            self._control, self._device, self._is_announced = control, device, False

    def end(self) -> None:
        """Close: loaders that were wrapped do what they did before."""
        self._control = None

    def wrap(self, loader: Any, limit: int | float = 1.0) -> Any:
        """Make one training loader end on all ranks together; to be called on all ranks.

        Args:
            loader: The loader of this rank, any iterable of batches.
            limit: Most batches of an epoch that are used: a number of batches, or as a float the
                part of the loader's length.

        Returns:
            The loader itself where nothing has to be done, else one that passes everything but
            iteration and length on to it.

        Raises:
            RuntimeError: The known lengths differ, and that is an error; or one of them is 0.
        """
        if isinstance(loader, EvenLoader):  # left in a collection of loaders by an earlier fit
            loader = loader.wrapped
        control = self._group()
        if control.world_size == 1:
            return loader
        with self._waiting(f"how many training batches there are ({describe(loader)})"):
            told = control.exchange_objects((_length(loader), _is_exact(loader)))
        lengths = [length for length, _ in told if length is not None]
        if len(lengths) < len(told):
            return even_loader(loader, self, None, is_guarded=True)
        if len({_used(length, limit) for length in lengths}) > 1:
            self._meet_uneven_lengths(lengths, describe(loader))
        elif all(is_exact for _, is_exact in told):
            return loader
        is_guarded = not all(is_exact for _, is_exact in told)
        return even_loader(loader, self, min(lengths), is_guarded)

    def all_have_one(
        self, has_batch: bool, failure: Exception | None, taken: int, asked: EvenLoader
    ) -> bool:
        """Whether every rank has one more batch; to be called on all ranks together.

        Args:
            has_batch: Whether this rank has one.
            failure: What this rank's loader raised instead, if it did.
            taken: Batches that every rank has had from this loader in this epoch.
            asked: The loader.

        Raises:
            RuntimeError: A rank has none while others have, and that is an error; or the loader of
                another rank raised; or another rank did not answer.
        """
        control = self._group()
        ranks = control.world_size
        # More than all ranks can add up to says that a loader raised.
        answer = float(ranks + 1) if failure is not None else float(has_batch)
        total = torch.tensor([answer], dtype=torch.float64, device=self._device)
        told: list[tuple[bool, str]] = []
        question = f"whether there is a training batch {taken + 1} ({asked.description})"
        with self._waiting(question, failure):
            control.agree(total)
            is_unanimous = total.item() in (0.0, float(ranks))
            if not is_unanimous:
                said = "" if failure is None else f"{type(failure).__name__}: {failure}"
                told = control.exchange_objects((has_batch, said))
        if failure is not None:
            raise failure
        broken = [(rank, said) for rank, (_, said) in enumerate(told) if said]
        if broken:
            raise RuntimeError(
                f"{_named([rank for rank, _ in broken])} could not load training batch {taken + 1}"
                f" ({asked.description}), so no rank can go on: {broken[0][1]}"
            )
        if not is_unanimous:
            without = [rank for rank, (has_one, _) in enumerate(told) if not has_one]
            self._meet_end(without, taken, asked)
        return is_unanimous and has_batch

    def _group(self) -> Collectives:
        if self._control is None:
            raise AssertionError("batches are agreed about only while a fit is under way")
        return self._control

    @contextmanager
    def _waiting(self, question: str, failure: Exception | None = None) -> Iterator[None]:
        """Say what the other ranks were asked, where they do not answer."""
        try:
            yield
        except RuntimeError as error:
            if failure is not None:
                raise failure from None
            rank, ranks = self._group().rank, range(self._group().world_size)
            others = _named([other for other in ranks if other != rank])
            raise RuntimeError(
                f"rank {rank} waited for {others} to say {question}, and got no answer: a rank has"
                f" failed, or is busy with something else ({type(error).__name__}: {error})"
            ) from error

    def _meet_end(self, without: list[int], taken: int, asked: EvenLoader) -> None:
        """Some ranks have no batch left, others have."""
        what = f"{_named(without)} ran out of training batches after {taken}"
        if self.uneven == "error":
            self._refuse(f"{what} ({asked.description}), while other ranks have more", taken)
        asked.empty_epochs += taken == 0
        if asked.empty_epochs > 1:
            raise RuntimeError(
                f"{_named(without)} had no training batch at all ({asked.description}) in two"
                f" epochs running, while other ranks have some: no rank can train. {REMEDY}."
            )
        self._announce(
            f"{what} ({asked.description}), while other ranks have more. All ranks end the epoch"
            " there, and the remaining batches of the others are left out. This is said once; it"
            " may happen in any epoch. ZeroStrategy(uneven_batches='error') makes it an error."
        )

    def _meet_uneven_lengths(self, lengths: list[int], description: str) -> None:
        fewest, most = min(lengths), max(lengths)
        least = [rank for rank, length in enumerate(lengths) if length == fewest]
        what = (
            f"{_named(least)} can give {fewest} training batches an epoch ({description}), other"
            f" ranks up to {most}"
        )
        if fewest == 0 or self.uneven == "error":
            self._refuse(what, fewest)
        self._announce(
            f"{what}. All ranks end each epoch after {fewest}, and what is left of the others (up"
            f" to {most - fewest} batches a rank) is left out. ZeroStrategy(uneven_batches='error')"
            " makes it an error."
        )

    def _refuse(self, what: str, fewest: int) -> None:
        limit = f", or set Trainer(limit_train_batches={fewest})" if fewest else ""
        stop = ", or use uneven_batches='stop', which ends the epoch on all ranks there"
        raise RuntimeError(
            f"{what}. A training step needs all ranks, so none of them can go on alone."
            f" {REMEDY}{limit}{stop if fewest else ''}."
        )

    def _announce(self, message: str) -> None:
        if not self._is_announced and self._group().rank == 0:
            warn(message, stacklevel=2)
        self._is_announced = True


class EvenLoader:
    """A training loader that ends on all ranks together; all else is the wrapped loader's.

    Args:
        wrapped: The loader of this rank.
        batches: Who agrees with the other ranks.
        length: Batches that every rank has; None if that is not known.
        is_guarded: Ranks have to agree before each batch.
    """

    def __init__(
        self, wrapped: Any, batches: EvenBatches, length: int | None, is_guarded: bool
    ) -> None:
        self.wrapped = wrapped
        self.description = describe(wrapped)
        self.empty_epochs = 0
        """Latest epochs in a row in which some rank had no batch at all, and others had."""
        self._batches = batches
        self._length = length
        self._is_guarded = is_guarded

    def __iter__(self) -> Iterator[Any]:
        if not self._batches.is_open:
            return iter(self.wrapped)
        if not self._is_guarded:
            return islice(self.wrapped, self._length)
        try:  # at once, as without a wrapper: this may start workers and draws a random number
            return _InStep(iter(self.wrapped), self._batches, self)
        except Exception as error:  # said when the other ranks ask for the first batch
            return _InStep(_raising(error), self._batches, self)

    def __len__(self) -> int:
        if not self._batches.is_open:
            return len(self.wrapped)
        if self._length is None:
            raise TypeError("the number of training batches is not known on every rank")
        return self._length

    def __getattr__(self, name: str) -> Any:
        if "wrapped" not in vars(self):  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)


_OWN = {"wrapped", "description", "empty_epochs", "_batches", "_length", "_is_guarded"}


class StatefulEvenLoader(EvenLoader):
    """The same for a loader that can be resumed, which is looked for in the class."""

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped loader."""
        state: dict[str, Any] = self.wrapped.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand a state to the wrapped loader."""
        self.wrapped.load_state_dict(state_dict)


class _InStep(Iterator[Any]):
    """One pass over a loader, in which ranks agree before each batch."""

    def __init__(self, batches: Iterator[Any], agreement: EvenBatches, loader: EvenLoader) -> None:
        self._own: Iterator[Any] | None = batches
        self._agreement, self._loader = agreement, loader
        self._taken = 0

    def __next__(self) -> Any:
        own, self._own = self._own, None  # ended, unless everybody has a batch
        if own is None:
            raise StopIteration
        batch, has_batch, failure = None, True, None
        try:
            batch = next(own)
        except StopIteration:
            has_batch = False
        except Exception as error:
            has_batch, failure = False, error
        if not self._agreement.all_have_one(has_batch, failure, self._taken, self._loader):
            raise StopIteration
        if self._taken == 0:
            self._loader.empty_epochs = 0
        self._own = own
        self._taken += 1
        return batch


def describe(loader: Any) -> str:
    """Class of a loader, and of its dataset if it has one."""
    dataset = getattr(loader, "dataset", None)
    of = "" if dataset is None else f" of {type(dataset).__name__}"
    return f"{type(loader).__name__}{of}"


def even_loader(
    loader: Any, batches: EvenBatches, length: int | None, is_guarded: bool
) -> EvenLoader:
    """The wrapper that suits a loader; arguments as for :class:`EvenLoader`."""
    is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    kind = StatefulEvenLoader if is_stateful else EvenLoader
    return kind(loader, batches, length, is_guarded)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _is_exact(loader: Any) -> bool:
    return not isinstance(getattr(loader, "dataset", None), IterableDataset)


def _used(length: int, limit: int | float) -> int:
    """Batches that are used of a loader."""
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:MOST_NAMED_RANKS])
    more = len(ranks) - MOST_NAMED_RANKS
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{f' and {more} more' * (more > 0)}"


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield
