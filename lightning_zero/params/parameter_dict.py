"""Reading a parameter that is not there brings it back."""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, ValuesView
from typing import Any

from torch import nn

OnAccess = Callable[[nn.Parameter], None]
OnListing = Callable[["ZeroParameterDict"], None]


class ZeroParameterDict(dict[str, "nn.Parameter | None"]):
    """The ``_parameters`` of a module, telling the engine of each read.

    ``module.weight`` is a read. Listing (``module.parameters()``, ``state_dict()``) is told apart:
    an optimizer or a summary lists parameters without wanting their values.

    Args:
        parameters: The module's own dict.
        on_access: Called with a parameter before it is returned by name.
        on_listing: Called with this dict before its parameters are listed.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter | None],
        on_access: OnAccess,
        on_listing: OnListing,
    ) -> None:
        super().__init__(parameters)
        self._on_access = on_access
        self._on_listing = on_listing

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_access(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Read a parameter by name, as ``[]`` does."""
        return self[name] if name in self else default  # noqa: SIM401  (this is get)

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """List names and parameters."""
        self._on_listing(self)
        return super().items()

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        """List parameters."""
        self._on_listing(self)
        return super().values()

    def plain(self) -> dict[str, nn.Parameter | None]:
        """The parameters in an ordinary dict, without any effect on them."""
        return dict(super().items())

    def _whole(self) -> dict[str, nn.Parameter | None]:
        """An ordinary dict whose parameters are there, for copies that must not know the engine."""
        return {name: self[name] for name in self}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        return copy.deepcopy(self._whole(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (self._whole(),))


def install(module: nn.Module, on_access: OnAccess, on_listing: OnListing) -> None:
    """Watch the reads of a module's own parameters."""
    module._parameters = ZeroParameterDict(module._parameters, on_access, on_listing)


def plain(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, without any effect on them."""
    own: dict[str, nn.Parameter | None] = module._parameters
    return own.plain() if isinstance(own, ZeroParameterDict) else own


def uninstall(module: nn.Module) -> None:
    """Undo :func:`install`; nothing to do if the module is not watched."""
    if isinstance(module._parameters, ZeroParameterDict):
        module._parameters = module._parameters.plain()
