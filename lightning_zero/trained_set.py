"""Which parameters are to be trained, while that changes: unfrozen, attached and replaced ones.

[Note: when it is seen]
A parameter that is unfrozen is found by a look at those that were frozen; one that is attached, by
torch's notice of a registration anywhere in the process, which is followed by a look at the whole
module. Both looks are taken before a forward, so that all ranks have the same values in it, and
after a backward, where a gradient that came early is still the rank's own and can be averaged.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from lightning_zero.comm import Collectives
from lightning_zero.config import ZeroOptions
from lightning_zero.global_hooks import GlobalHooks
from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.optim.pieces import PieceTable, parameters_of
from lightning_zero.params import parameter_dict
from lightning_zero.partition import check_newcomers
from lightning_zero.plan.wording import MAX_NAMED, some


class TrainedSet:
    """Finds parameters that are to be trained, but were not when the model was partitioned.

    Args:
        module: The whole model.
        names: Name of each parameter of the model, in model order; kept up to date.
        table: Knows what is partitioned for training.
        control: Group over which ranks agree.
    """

    def __init__(
        self,
        module: nn.Module,
        names: dict[nn.Parameter, str],
        table: PieceTable,
        control: Collectives,
    ) -> None:
        self._module = module
        self._names = names
        self._table = table
        self._control = control
        self._registrations = _Registrations()
        self._resting: list[nn.Parameter] = []
        self.note()

    def newcomers(self) -> dict[nn.Parameter, str]:
        """Parameters, by name, that came into the model or require gradients since :meth:`note`."""
        found = {p: self._names[p] for p in self._resting if p.requires_grad}
        if self._registrations.take() or found:
            here = dict(self._walk())  # what was taken out of the model is trained no more
            found = {p: here[p] for p in here if p in found or p not in self._names}
        return found

    def take_in(
        self,
        found: Mapping[nn.Parameter, str],
        optimizers: Sequence[Optimizer],
        options: ZeroOptions,
    ) -> None:
        """Make newcomers part of the model's names, if they can be trained; for all ranks to call.

        Args:
            found: As :meth:`newcomers`.
            optimizers: The user's optimizers.
            options: What is sharded.

        Raises:
            RuntimeError: Ranks have found different ones, or an optimizer steps what was replaced.
            ValueError: An optimizer or a parameter cannot be used.
        """
        mine = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for p, name in found.items()]
        every = self._control.exchange_objects(mine, "partition newly trained parameters")
        if any(theirs != every[0] for theirs in every):
            told = "; ".join(
                f"rank {rank}: {some(repr(name) for name, *_ in theirs) or 'none'}"
                for rank, theirs in enumerate(every)
            )
            raise RuntimeError(
                f"ranks have unfrozen or attached different parameters ({told}). What is trained"
                " has to be the same on all ranks: unfreeze and attach the same everywhere."
            )
        self._follow_names()
        check_newcomers(found, self._names, optimizers, options, self._control.world_size)
        notice = told_of_idle(found, self._names, optimizers)
        if notice and self._control.rank == 0:
            warnings.warn(notice, stacklevel=2)

    def _follow_names(self) -> None:
        """Take new names in, and tell those of replaced parameters apart from them."""
        known = dict(self._names)
        self._names.clear()
        self._names.update(self._walk())
        for parameter, name in known.items():
            self._names.setdefault(parameter, f"{name.removesuffix(REPLACED)}{REPLACED}")

    def note(self) -> None:
        """What requires gradients now is partitioned."""
        self._resting = [p for p, _ in self._walk() if not self._is_watched(p)]

    def close(self) -> None:
        """Look no more."""
        self._registrations.close()

    def _is_watched(self, parameter: nn.Parameter) -> bool:
        place = self._table.place.get(parameter)
        return place is not None and place[1] in place[0].watched

    def _walk(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Parameters of the model as it is now; nothing is fetched for it."""
        seen: set[nn.Parameter] = set()
        for prefix, module in self._module.named_modules():
            for name, parameter in parameter_dict.plain(module).items():
                if parameter is not None and parameter not in seen:
                    seen.add(parameter)
                    yield parameter, f"{prefix}.{name}" if prefix else name


REPLACED = " (replaced)"
"""Follows the name of a parameter that is in the model no more."""


class _Registrations:
    """Whether any module has got a parameter or a module since it was last asked."""

    def __init__(self) -> None:
        self._has_come = False
        own = weakref.ref(self)

        def note(module: nn.Module, name: str, value: Any) -> None:
            found = own()
            if found is not None and value is not None:
                found._has_come = True

        handles = [
            register_module_parameter_registration_hook(note),
            register_module_module_registration_hook(note),
        ]
        self._hooks = GlobalHooks(self, handles)

    def take(self) -> bool:
        """The answer, which is given once."""
        found, self._has_come = self._has_come, False
        return found

    def close(self) -> None:
        self._hooks.remove()


def in_model_order(
    buckets: Iterable[GradientBucket], names: Iterable[nn.Parameter]
) -> list[GradientBucket]:
    """Buckets by their first parameter: the order in which gradients come, backwards.

    Args:
        buckets: The buckets.
        names: All parameters, in model order.
    """
    place = {parameter: number for number, parameter in enumerate(names)}
    return sorted(buckets, key=lambda bucket: min(place[p] for p in bucket.parameters))


def check_stepped(
    optimizer: Optimizer, table: PieceTable, names: Mapping[nn.Parameter, str]
) -> None:
    """Make sure that an optimizer trains nothing but what is partitioned.

    Args:
        optimizer: The optimizer.
        table: Knows what is partitioned.
        names: Parameters that are or were in the model; the latter may stay where they get no
            gradients.

    Raises:
        RuntimeError: It holds parameters that are not in the model.
    """
    strays = [
        tuple(p.shape)
        for p in parameters_of(optimizer)
        if p.requires_grad and p not in table and (p not in names or p.grad is not None)
    ]
    if strays:
        raise RuntimeError(
            f"{type(optimizer).__name__} is to train parameter(s) of shapes {strays[:MAX_NAMED]}"
            " that are not in the model: they would not be averaged over the ranks. Register them"
            " in the model."
        )


def told_of_idle(
    found: Mapping[nn.Parameter, str],
    names: Mapping[nn.Parameter, str],
    optimizers: Sequence[Optimizer],
) -> str:
    """What to tell of parameters that require gradients, but that no optimizer steps.

    Args:
        found: New parameters, by name.
        names: All parameters, replaced ones included.
        optimizers: The user's optimizers.

    Raises:
        RuntimeError: An optimizer holds the parameter that one of them has replaced instead.
    """
    stepped = {p for optimizer in optimizers for p in parameters_of(optimizer)}
    idle = [name for p, name in found.items() if p.requires_grad and p not in stepped]
    left_behind = {names[p] for p in stepped if p in names}
    replaced = [name for name in idle if f"{name}{REPLACED}" in left_behind]
    if replaced:
        raise RuntimeError(
            f"{some(map(repr, replaced))} was replaced by a new parameter after training was set"
            " up, but the optimizer still steps the old one, so the new one would not be trained."
            " Replace it before trainer.fit, write the values into the old one (load_state_dict),"
            " or give the new one to the optimizer (optimizer.add_param_group)."
        )
    if not idle:
        return ""
    return (
        f"{some(map(repr, idle))} require(s) gradients since training has begun, but no optimizer"
        " steps it: it is averaged over the ranks, and stays as it is. Give it to an optimizer"
        " (optimizer.add_param_group), or freeze it."
    )
