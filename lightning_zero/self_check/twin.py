"""A copy of a user's optimizer that steps whole parameters of the replica."""

from __future__ import annotations

import copy as copying
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.checkpoint.consolidated import MASTER_KEY, local_states
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.pieces import parameters_of
from lightning_zero.self_check.copies import Copy

STEP_SETTINGS = ("grad_scale", "found_inf")
"""What a loss scaler hangs on fused optimizers for one step."""


class Twin:
    """Steps the replica as a user's optimizer steps its pieces.

    Args:
        optimizer: The user's optimizer.
        copies: The replica, by the user's parameters.

    Raises:
        ValueError: The optimizer cannot be copied.
    """

    def __init__(self, optimizer: Optimizer, copies: Mapping[nn.Parameter, Copy]) -> None:
        self._copies = copies
        self._groups: list[list[nn.Parameter]] = []
        self._settings: list[dict[str, Any]] = []
        try:
            self._twin = _unstepped(optimizer, copies)
        except Exception as error:
            raise ValueError(
                f"self_check cannot copy {type(optimizer).__name__}, which it has to step beside"
                f" the training ({type(error).__name__}: {error}): train without self_check"
            ) from error

    @property
    def state(self) -> dict[Any, Any]:
        """Optimizer state by whole parameters of the replica."""
        return self._twin.state

    def note_groups(self, optimizer: Optimizer) -> None:
        """Remember whose parameters are to be stepped."""
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def copies(self) -> list[Copy]:
        """Parameters of the replica that are trained by this optimizer, each once."""
        named = (parameter for group in self._groups for parameter in group)
        found = {p: self._copies[p] for p in named if p in self._copies}
        return [copy for copy in found.values() if copy.is_trained]

    def is_whole(self, optimizer: Optimizer) -> bool:
        """Whether the replica has all that the optimizer trains."""
        return all(
            p in self._copies for p in parameters_of(optimizer) if p.requires_grad and p.numel()
        )

    def before_step(self, optimizer: Optimizer) -> None:
        """Take the hyperparameters that the optimizer is about to step with."""
        self._settings = [
            {name: copying.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for name in STEP_SETTINGS:
            if hasattr(optimizer, name):
                setattr(self._twin, name, getattr(optimizer, name))

    def step(self, gradients: Mapping[Copy, torch.Tensor], *args: Any, **options: Any) -> None:
        """Step the replica.

        Args:
            gradients: Whole gradients, 1-D; parameters without one are not stepped.
            *args: As for the optimizer's step.
            **options: As for the optimizer's step.
        """
        trained = set(self.copies())
        for copy in trained:
            grad = gradients.get(copy)
            copy.weight.grad = None if grad is None else copy.shaped(grad)
        self._twin.param_groups = [
            {**settings, "params": self._weights(group, trained)}
            for settings, group in zip(self._settings, self._groups, strict=True)
        ]
        with torch.no_grad():
            self._twin.step(*args, **options)
        for copy in trained:
            copy.weight.grad = None

    def _weights(self, group: Sequence[nn.Parameter], trained: set[Copy]) -> list[nn.Parameter]:
        here = (self._copies[p] for p in group if p in self._copies)
        return [copy.weight for copy in here if copy in trained]


def _unstepped(optimizer: Optimizer, copies: Mapping[nn.Parameter, Copy]) -> Optimizer:
    """An optimizer of the same class and attributes, without groups and state.

    Not by ``deepcopy``: torch's optimizers lose attributes of their own in it.
    """
    kind = type(optimizer)
    twin: Optimizer = kind.__new__(kind)
    memo: dict[int, Any] = {id(optimizer): twin}
    memo.update({id(parameter): copy.weight for parameter, copy in copies.items()})
    twin.__setstate__(
        {
            "defaults": copying.deepcopy(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": [],
        }
    )
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):  # schedulers wrap `step`
            setattr(twin, name, copying.deepcopy(value, memo))
    return twin


def take_states(twin: Twin, optimizer: Optimizer, engine: ZeroEngine) -> None:
    """Give a twin the states that an optimizer begins with; for all ranks to call."""
    mine: dict[str, list[str]] = {}
    for copy in twin.copies():
        piece = engine.table.piece(copy.parameter)
        if piece is not None:
            mine[copy.name] = [key for key in local_states(optimizer, piece) if key != MASTER_KEY]
    every = engine.groups.control.exchange_objects(mine, "begin a self-check")
    for copy in twin.copies():
        keys = sorted({key for there in every for key in there.get(copy.name, ())})
        if keys:
            twin.state[copy.weight] = {key: engine.whole.state(copy.parameter, key) for key in keys}
