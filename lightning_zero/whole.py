"""Gradients and optimizer state of one parameter, whole on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero import _compat
from lightning_zero.checkpoint.consolidated import (
    MASTER_KEY,
    State,
    dtype_if_elementwise,
    local_states,
)
from lightning_zero.comm import Collectives
from lightning_zero.optim.agreement import GradientAgreement
from lightning_zero.optim.masters import MasterShard
from lightning_zero.optim.pieces import MasterPiece, PieceTable
from lightning_zero.params.dense import flatten


class WholeTensors:
    """Puts the pieces of all ranks together; every call is one of all ranks.

    Args:
        names: Name of each parameter of the model.
        optimizers: The user's optimizers, as they are at any time.
        table: This rank's pieces.
        agreement: Knows whose gradients count.
        control: Group over which pieces are sent.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        optimizers: Sequence[Optimizer],
        table: PieceTable,
        agreement: GradientAgreement,
        control: Collectives,
    ) -> None:
        self._names = names
        self._optimizers = optimizers
        self._table = table
        self._agreement = agreement
        self._control = control

    def grad(self, parameter: nn.Parameter) -> Tensor | None:
        """The averaged gradient that an optimizer would step now, in the dtype it is stepped in.

        Args:
            parameter: One of the model, the same on all ranks.

        Returns:
            A copy of the parameter's shape; None where no rank has a gradient.

        Raises:
            RuntimeError: Ranks ask for different parameters, or only some have cleared it.
        """
        if _compat.in_backward():
            raise RuntimeError(
                "full_grad() inside of a backward: gradients are averaged when it has ended. Call"
                " it after backward (in on_after_backward or later)."
            )
        master = self._table.master_of(parameter)
        if master is None:
            return parameter.grad
        used = self._agreement.used()
        gradients, slot = self._table.place[parameter]
        is_there = parameter in used and not gradients.is_cleared(slot)
        every = self._meet("full_grad", parameter, is_there)
        if not any(every):
            return None
        if not all(every):
            cleared = [rank for rank, is_on_rank in enumerate(every) if not is_on_rank]
            raise RuntimeError(
                f"the gradient of {self._names[parameter]!r} was cleared on rank(s) {cleared} only:"
                " clear gradients on all ranks (zero_grad), or on none"
            )
        piece = self._table.piece(parameter)
        own = None if piece is None else _dense(piece, piece.grad)
        return self._join(master, slot, own, master.tensor.dtype)

    def state(self, parameter: nn.Parameter, key: str) -> Any:
        """One optimizer state of a parameter.

        Args:
            parameter: One of the model, the same on all ranks.
            key: Its name in the optimizer, or ``"master_weight"``.

        Returns:
            A copy: of the parameter's shape for element-wise state, any other state as the first
            rank that has a part of the parameter holds it. None where there is no state yet.

        Raises:
            KeyError: The parameter has state, but none of this name on any rank.
            RuntimeError: Ranks ask for different things.
        """
        piece = self._table.piece(parameter)
        mine: State = {}
        if piece is not None:
            for optimizer in reversed(self._optimizers):
                mine |= local_states(optimizer, piece)
        here = _Here.of(piece, mine, key)
        every: list[_Here] = self._meet(f"full_optimizer_state({key!r})", parameter, here)
        known = sorted({name for there in every for name in there.keys})
        if key not in known:
            if set(known) <= {MASTER_KEY}:
                return None
            raise KeyError(
                f"{self._names[parameter]!r} has no optimizer state {key!r}; it has {known}"
            )
        holders = [there for there in every if key in there.keys]
        undivided = next((there for there in holders if there.dtype is None), None)
        if undivided is not None:
            return undivided.value_for(parameter)
        master, dtype = self._table.master_of(parameter), holders[0].dtype
        if master is None or dtype is None:
            raise AssertionError(f"{self._names[parameter]!r} has state, but no master shard")
        own = None if piece is None or key not in mine else _dense(piece, mine[key])
        return self._join(master, self._table.place[parameter][1], own, dtype)

    def _join(
        self, master: MasterShard, slot: int, own: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """All pieces of a parameter, each sent by its rank to all others.

        Args:
            master: Master shard of its bucket.
            slot: Its place in the bucket.
            own: This rank's piece, 1-D in dense order; None stands for zeros.
            dtype: Dtype of the result.
        """
        layout = master.parameters.layout
        place = layout.slots[slot]
        flat = torch.zeros(place.numel, dtype=dtype, device=master.tensor.device)
        for rank in range(layout.world_size):
            for piece in layout.pieces(rank):
                if piece.slot != slot:
                    continue
                part = flat[piece.param_offset : piece.param_offset + piece.numel]
                if rank == master.parameters.rank and own is not None:
                    part.copy_(own)
                if layout.world_size > 1:
                    self._control.broadcast([part], rank)
        return flat.as_strided(place.shape, place.stride)

    def _meet(self, what: str, parameter: nn.Parameter, mine: Any) -> list[Any]:
        """What all ranks say, once it is sure that they ask for the same."""
        name = self._names[parameter]
        every = self._control.exchange_objects((what, name, mine), f"call {what}")
        asked = [f"rank {rank}: {call} of {of!r}" for rank, (call, of, _) in enumerate(every)]
        if any((call, of) != every[0][:2] for call, of, _ in every):
            raise RuntimeError(
                "ranks ask for different tensors at once, which are put together from all of them"
                f" ({'; '.join(asked)}): make the same calls on all ranks"
            )
        return [said for _, _, said in every]


class _Here(NamedTuple):
    """What one rank knows of a state."""

    keys: list[str]
    dtype: torch.dtype | None = None
    """Of a state with one entry per element of the piece; None for any other."""
    value: Any = None
    """Any other state, on the CPU."""
    is_on_cpu: bool = True
    """Whether it was there before."""

    @classmethod
    def of(cls, piece: MasterPiece | None, states: State, key: str) -> _Here:
        """Look up one of the states of a piece."""
        value, keys = states.get(key), sorted(states)
        dtype = None if piece is None else dtype_if_elementwise(piece, value)
        if dtype is not None or not isinstance(value, Tensor):
            return cls(keys, dtype, None if dtype is not None else value)
        return cls(keys, None, value.detach().cpu().clone(), value.device.type == "cpu")

    def value_for(self, parameter: nn.Parameter) -> Any:
        """A state that is not element-wise, where the optimizer has it."""
        return self.value if self.is_on_cpu else self.value.to(parameter.device)


def _dense(piece: MasterPiece, values: Tensor) -> Tensor:
    """Values of a piece, 1-D, in the dense memory order of its parameter."""
    return flatten(values, piece.slot.stride if piece.is_whole else (1,))
