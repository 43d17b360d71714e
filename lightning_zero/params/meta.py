"""Modules on the meta device get memory and values, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_zero.params import parameter_dict


def materialize(
    root: nn.Module, device: torch.device, watch: Callable[[nn.Module], None] | None = None
) -> None:
    """Give every module with tensors on the meta device real ones, and let it initialize them.

    In order of ``root.modules()``. Tied parameters stay tied and keep the values of the module that
    comes first; what a module holds of real tensors stays as it is.

    Args:
        root: The model.
        device: Where its tensors are to be.
        watch: Called with each module before its tensors are made.

    Raises:
        RuntimeError: A module has no ``reset_parameters``, or it leaves a tensor without values.
    """
    waiting = [(name, module) for name, module in root.named_modules() if _on_meta(module)]
    helpless = [
        f"{name or 'the root'} ({type(module).__name__}: {', '.join(_on_meta(module))})"
        for name, module in waiting
        if not callable(getattr(module, "reset_parameters", None))
    ]
    if helpless:
        raise RuntimeError(
            f"modules on the meta device have no reset_parameters() to give them values:"
            f" {'; '.join(helpless)}. Write one, or make these modules on a real device."
        )
    made: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for name, module in waiting:
        if watch is not None:
            watch(module)
        _materialize_one(name, module, device, made)


def _materialize_one(
    name: str,
    module: nn.Module,
    device: torch.device,
    made: dict[nn.Parameter, tuple[nn.Module, str]],
) -> None:
    keys = _on_meta(module)
    tied = {
        key: p for key, p in parameter_dict.plain(module).items() if key in keys and p is not None
    }
    if any(tied.get(key) not in made for key in keys):
        with _real_ones_kept(module):
            module.to_empty(device=device, recurse=False)
        for key in keys:
            if _can_be_nan(getattr(module, key)):  # what is forgotten must not look like a value
                getattr(module, key).data.fill_(float("nan"))
        reset: Any = module.reset_parameters
        reset()
        empty = [
            k for k in keys if _can_be_nan(getattr(module, k)) and _has_nan(getattr(module, k))
        ]
        if empty:
            raise RuntimeError(
                f"reset_parameters() of {name!r} ({type(module).__name__}) gave no values to"
                f" {empty}, which were on the meta device: let it fill all parameters and buffers."
            )
    for key, parameter in tied.items():
        if parameter in made:
            first, its_key = made[parameter]
            setattr(module, key, getattr(first, its_key))
        else:
            made[parameter] = (module, key)  # not the new one, which could not be cut then
            getattr(module, key).__dict__.update(parameter.__dict__)  # marks that the user has set


@contextmanager
def _real_ones_kept(module: nn.Module) -> Iterator[None]:
    """What a module holds of real tensors comes out as it went in."""
    parameters = [key for key, p in parameter_dict.plain(module).items() if _is_real(p)]
    values = {key: getattr(module, key).data for key in parameters}
    buffers = {key: buffer for key, buffer in module._buffers.items() if _is_real(buffer)}
    yield
    for key, data in values.items():
        getattr(module, key).data = data
    for key, buffer in buffers.items():
        setattr(module, key, buffer)


def _on_meta(module: nn.Module) -> list[str]:
    """Names of a module's own tensors on the meta device."""
    own = {**parameter_dict.plain(module), **module._buffers}
    return [
        key
        for key, tensor in own.items()
        if tensor is not None and tensor.is_meta and not is_lazy(tensor)
    ]


def _is_real(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_meta and not is_lazy(tensor)


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _has_nan(tensor: Tensor) -> bool:
    return _can_be_nan(tensor) and bool(tensor.detach().isnan().any())
