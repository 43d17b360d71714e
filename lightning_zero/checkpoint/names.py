"""Names of parameters, as checkpoints keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

NAMES_KEY = "param_names"
"""Under which a saved optimizer keeps the names of the parameters of each group."""

COMPILED_PREFIX = "_orig_mod."
"""What torch.compile puts into the names of the module that it wraps."""

T = TypeVar("T")


def plain_name(name: str) -> str:
    """A name as it is without torch.compile, so that a checkpoint fits with and without it."""
    return name.replace(COMPILED_PREFIX, "")


def with_plain_names(state: Mapping[str, T]) -> dict[str, T]:
    """A state dict under names without torch.compile."""
    return {plain_name(name): value for name, value in state.items()}


def with_names_of(state: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """A state dict under the names that a module has for the same entries.

    Args:
        state: From a checkpoint, compiled or not.
        names: Names of the module's state dict, compiled or not.
    """
    own = {plain_name(name): name for name in names}
    return {own.get(plain_name(name), name): value for name, value in state.items()}


def names_by_group(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Names of an optimizer's parameters, by group; empty for what is no part of the model."""
    return [
        [plain_name(names.get(parameter, "")) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def frozen_names(module: nn.Module) -> set[str]:
    """Names, without torch.compile, of all parameters that are not trained."""
    every = module.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, parameter in every if not parameter.requires_grad}


def in_torch_form(
    optimizer: Optimizer, state: Mapping[int, Any], names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """State and options of an optimizer as its ``state_dict`` has them, and names by group.

    Args:
        optimizer: The optimizer.
        state: State of each parameter, by its number in the order of the groups.
        names: Name of each parameter of the model.
    """
    groups, first = [], 0
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        end = first + len(group["params"])
        groups.append({**options, "params": list(range(first, end))})
        first = end
    return {
        "state": dict(sorted(state.items())),
        "param_groups": groups,
        NAMES_KEY: names_by_group(optimizer, names),
    }
