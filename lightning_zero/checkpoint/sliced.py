"""The state dict of a model that is sharded while no engine trains it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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
    for parameter in module.parameters():
        known = slices.known(parameter)
        if known is None or not slices.holds(parameter):
            continue
        whole = slices.transfers.gather_on_first(known)
        if whole is not None:
            state.update((name, whole) for name in names.get(known.pointer, ()))
    return state if slices.transfers.rank == 0 else {}
