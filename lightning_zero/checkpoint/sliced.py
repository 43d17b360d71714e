"""The state dict of a model that is sharded while no engine trains it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_zero.memory.spool import gathering
from lightning_zero.params.sliced import owner_of


def resting_state_dict(module: nn.Module) -> dict[str, Any]:
    """The module's state dict; to be called on all ranks.

    Of a model that is sharded, with full tensors on the CPU of rank 0, and empty on other ranks.

    Args:
        module: A model that no engine trains, or a part of it.
    """
    slices = owner_of(module)
    if slices is None:
        return dict(module.state_dict())
    slices.rest()
    state: dict[str, Any] = module.state_dict()
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names.setdefault(value.data_ptr(), []).append(name)
    is_writer = slices.transfers.rank == 0
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    with gathering(nbytes if is_writer else 0) as keep:
        for parameter in module.parameters():
            known = slices.known(parameter)
            if known is None or not slices.holds(parameter):
                continue
            whole = slices.transfers.gather_on_first(known)
            if whole is not None:
                kept = keep(whole)
                state.update((name, kept) for name in names.get(known.pointer, ()))
            del whole  # before the next one comes
    return state if is_writer else {}
