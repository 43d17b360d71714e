"""Cutting a module into units: the subtrees whose parameters travel together."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is unsharded before its forward and resharded after it."""

    name: str
    """Fully qualified name of the module, empty for the root."""

    module: nn.Module
    """The module."""

    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Name and parameter of those that no earlier unit holds."""

    uses: tuple[nn.Parameter, ...]
    """All parameters that its forward may read, tied and external ones included."""


LeafModule = str | type[nn.Module]


def module_units(
    root: nn.Module,
    bucket_numel: int,
    leaf_modules: Sequence[LeafModule] = (),
    whole: Collection[nn.Module] = (),
) -> list[Unit]:
    """Cut a module into the largest subtrees that fit into one bucket.

    A repeated block that fits is one unit, so its inner modules need no hooks of their own. A
    module that does not fit, has no forward of its own (``ModuleList``) or is the root, is cut
    further; the parameters that such a module itself owns are a unit, too. Tied parameters belong
    to the unit that comes first.

    Args:
        root: The whole model; never one unit, since Lightning does not call its forward.
        bucket_numel: Capacity of a bucket in elements.
        leaf_modules: Modules that are units whatever their size: classes, names of classes, full
            names of modules, or endings of full names that begin with a dot.
        whole: More modules that are units whatever their size.

    Raises:
        ValueError: A leaf module, or an external parameter, is not in the model.
    """
    leaves = _leaves(root, leaf_modules) | set(whole)
    _check_externals(root)
    seen: set[nn.Parameter] = set()
    found = []
    for name, module, is_whole in _subtrees("", root, root, bucket_numel, leaves):
        listed = list(module.named_parameters(prefix=name, recurse=is_whole))
        fresh = tuple((fqn, parameter) for fqn, parameter in listed if parameter not in seen)
        seen.update(parameter for _, parameter in fresh)
        uses = [parameter for _, parameter in listed]
        for reader in module.modules() if is_whole else [module]:
            if reader is not root:
                uses += external_parameters(reader)
        if uses:
            found.append(Unit(name, module, fresh, tuple(dict.fromkeys(uses))))
    return found


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's forward reads a parameter that is not its own.

    Raises:
        ValueError: The module has no forward.
    """
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward of its own, so there is no time at which an"
            " external parameter would come: register it for the module whose forward reads it"
        )
    known = _externals.setdefault(module, [])
    if all(parameter is not other for other in known):
        known.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back :func:`register_external_parameter`.

    Raises:
        ValueError: It was not registered.
    """
    known = external_parameters(module)
    kept = [other for other in known if other is not parameter]
    if len(kept) == len(known):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is not registered as external for this"
            f" {type(module).__name__}, which has {len(known)} external parameter(s)"
        )
    _externals[module] = kept


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What was registered for a module."""
    return list(_externals.get(module, ()))


_externals: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()


def _check_externals(root: nn.Module) -> None:
    owned = set(root.parameters())
    for name, module in root.named_modules():
        strangers = [tuple(p.shape) for p in external_parameters(module) if p not in owned]
        if strangers:
            raise ValueError(
                f"external parameter(s) of shapes {strangers} are registered for"
                f" {name or 'the whole model'!r}, but they are not in the model (any more, if they"
                " were replaced or tied since): register parameters that the model has, after all"
                " of its parts are built"
            )


def _leaves(root: nn.Module, wanted: Sequence[LeafModule]) -> set[nn.Module]:
    """The modules that are named as leaves."""
    found: set[nn.Module] = set()
    for leaf in wanted:
        matches = {module for name, module in root.named_modules() if is_named(name, module, leaf)}
        if not matches - {root}:
            raise ValueError(
                f"leaf_modules names {leaf!r}, but no module of the model below its root is called"
                " so, ends so, or is of that class"
            )
        found |= matches - {root}
    return found


def is_named(name: str, module: nn.Module, leaf: LeafModule) -> bool:
    """Whether a module is of a class, or is called by its class, its full name, or an ending of it.

    Args:
        name: Full name of the module.
        module: The module.
        leaf: See :func:`module_units`.
    """
    if not isinstance(leaf, str):
        return isinstance(module, leaf)
    kind = type(module)
    names = {name, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
    return leaf in names or (leaf.startswith(".") and name.endswith(leaf))


def _subtrees(
    name: str, module: nn.Module, root: nn.Module, bucket_numel: int, leaves: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Name, module, and whether its children are in it."""
    is_whole = module in leaves or (has_forward(module) and _numel(module) <= bucket_numel)
    if module is not root and is_whole:
        yield name, module, True
        return
    yield name, module, False
    for child_name, child in module.named_children():
        child_fqn = f"{name}.{child_name}" if name else child_name
        yield from _subtrees(child_fqn, child, root, bucket_numel, leaves)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called; a ``ModuleList`` cannot."""
    return type(module).forward is not nn.Module.forward


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
