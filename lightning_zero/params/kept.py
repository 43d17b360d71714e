"""Parts of a model that stay in fp32 while the rest is cast to 16 bits.

[Note: kept parts]
A chosen module keeps all its parameters and buffers, and runs in fp32: what comes in is cast up,
what goes out is cast down. So its callers need not know. Only the outermost of chosen modules
within each other is called from outside, so only that one casts. A parameter or a buffer that is
chosen by its own name stays in fp32, too, and whoever reads it has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero import _compat
from lightning_zero._compat import RemovableHandle
from lightning_zero.params import parameter_dict
from lightning_zero.params.units import LeafModule, has_forward, is_named

KEPT_DTYPE = torch.float32
LOW_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
"""Dtype of all that is not kept, by Lightning's name of the precision."""
MAX_NAMED = 5
"""Names that a message lists."""


def check_has_effect(patterns: Sequence[LeafModule], precision: str) -> None:
    """Whether there can be anything to keep.

    Args:
        patterns: See :class:`KeptParts`.
        precision: Lightning's name of it.

    Raises:
        ValueError: Nothing would be cast to 16 bits anyway.
    """
    if patterns and precision not in LOW_DTYPES:
        raise ValueError(
            f"keep_fp32={list(patterns)} has no effect with precision={precision!r}, which casts no"
            " parameters or buffers to 16 bits: remove it, or use 'bf16-true' or '16-true'"
        )


class KeptParts:
    """The parts of a model that some patterns choose.

    Args:
        root: The whole model.
        patterns: Modules as ``leaf_modules`` names them: classes, names of classes, full names, or
            endings of full names that begin with a dot; and full names of parameters and buffers,
            or endings of them.

    Raises:
        ValueError: A pattern chooses the whole model, or a tensor under one of its names only.
    """

    def __init__(self, root: nn.Module, patterns: Sequence[LeafModule]) -> None:
        chosen: set[nn.Module] = set()
        self.idle: list[LeafModule] = []
        """Patterns that choose nothing."""
        for pattern in patterns:
            found = _modules(root, pattern)
            chosen |= found
            if not found and not any(_is_tensor(name, pattern) for name, _, _ in _tensors(root)):
                self.idle.append(pattern)
        inside = {inner for module in chosen for inner in module.modules()}
        self._kept: dict[int, Tensor] = {}
        others: dict[int, str] = {}
        for name, owner, tensor in _tensors(root):
            if owner in inside or any(_is_tensor(name, pattern) for pattern in patterns):
                self._kept[id(tensor)] = tensor
            else:
                others[id(tensor)] = name
        torn = [others[key] for key in self._kept if key in others]
        if torn:
            raise ValueError(
                f"keep_fp32 chooses a part of the model whose tensors also stand elsewhere, as"
                f" {torn[:MAX_NAMED]}, where it does not choose them: choose them under all of"
                " their names"
            )
        self.entries = [m for top in _outermost(root, chosen) for m in _callable_within(top)]
        """Modules through which the others call kept ones."""

    def check_all_used(self) -> None:
        """Whether every pattern chooses something.

        Raises:
            ValueError: One does not.
        """
        if self.idle:
            raise ValueError(
                f"keep_fp32 names {self.idle[0]!r}, but no module, floating-point parameter or"
                " buffer of the model is called so or ends so, and no module is of that class"
            )

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether this very tensor stays in fp32."""
        return id(tensor) in self._kept

    def converting(self) -> TorchFunctionMode:
        """While inside, ``module.to(dtype)`` leaves kept tensors in fp32, or brings them to it."""
        grads = [tensor.grad for tensor in self._kept.values() if tensor.is_leaf]
        return _LeftAlone({*self._kept, *(id(grad) for grad in grads if grad is not None)})


def cast_rest(
    root: nn.Module, kept: KeptParts, dtype: torch.dtype, cast: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, CastsAround, str]:
    """Cast a model but for what is kept, and let the two work together.

    Args:
        root: The model.
        kept: What is kept of it.
        dtype: Dtype of the rest.
        cast: Casts a model, by ``module.to(dtype)``.

    Returns:
        The model, the casts around its kept modules, and a warning if buffers have other values
        now, else an empty text.
    """
    changed = _inexact_buffers(root, dtype, kept)
    with kept.converting():
        root = cast(root)
    names = ", ".join(changed[:MAX_NAMED]) + (", ..." if len(changed) > MAX_NAMED else "")
    warning = (
        f"the cast to {dtype} has changed the values of {len(changed)} buffer(s), which it cannot"
        f" hold: {names}. If they matter, as positions do, keep them with"
        " ZeroStrategy(keep_fp32=[...]), by their modules or their own names."
    )
    return root, CastsAround(kept.entries, dtype), warning if changed else ""


class CastsAround:
    """Lets modules run in fp32 among others that do not, see [Note: kept parts].

    Args:
        modules: Modules whose tensors are fp32.
        dtype: Dtype of what they return.
    """

    def __init__(self, modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._handles: list[RemovableHandle] = []
        for module in modules:
            after = partial(_cast_output, dtype)
            self._handles += [
                module.register_forward_pre_hook(_cast_inputs, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def remove(self) -> None:
        """Take the casts off the modules again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _inexact_buffers(root: nn.Module, dtype: torch.dtype, kept: KeptParts) -> list[str]:
    """Names of buffers whose values change when they are cast to a dtype."""
    return [
        name
        for name, owner, tensor in _tensors(root)
        if not isinstance(tensor, nn.Parameter)
        and not tensor.is_meta
        and not kept.is_kept(tensor)
        and _changes(tensor, dtype)
    ]


def _changes(tensor: Tensor, dtype: torch.dtype) -> bool:
    back = tensor.to(dtype).to(tensor.dtype)
    return bool((back != tensor).logical_and(tensor.isnan().logical_not()).any())


class _LeftAlone(TorchFunctionMode):
    """``Tensor.to`` does not lower the precision of some tensors."""

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.to or id(args[0]) not in self._kept:
            return func(*args, **(kwargs or {}))
        tensor: Tensor = args[0]
        if tensor.element_size() < KEPT_DTYPE.itemsize:
            return tensor.to(KEPT_DTYPE)
        return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cast(tensor: Tensor) -> Tensor:
        is_low = tensor.is_floating_point() and tensor.element_size() < KEPT_DTYPE.itemsize
        return tensor.to(KEPT_DTYPE) if is_low else tensor

    found: tuple[tuple[Any, ...], dict[str, Any]] = _compat.map_tensors(cast, (args, kwargs))
    return found


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _compat.map_tensors(cast, output)


def _modules(root: nn.Module, pattern: LeafModule) -> set[nn.Module]:
    found = {module for name, module in root.named_modules() if is_named(name, module, pattern)}
    if root in found:
        raise ValueError(
            f"keep_fp32 names {pattern!r}, which is the whole model: use precision='32-true'"
        )
    return found


def _is_tensor(name: str, pattern: LeafModule) -> bool:
    if not isinstance(pattern, str):
        return False
    return name == pattern or (pattern.startswith(".") and name.endswith(pattern))


def _tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, module and tensor of all floating-point parameters and buffers, tied ones each time."""
    for prefix, module in root.named_modules():
        own = {**parameter_dict.plain(module), **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and tensor.is_floating_point():
                yield f"{prefix}.{name}" if prefix else name, module, tensor


def _outermost(root: nn.Module, chosen: set[nn.Module]) -> Iterator[nn.Module]:
    """Chosen modules that are in no other chosen one, from the root down."""
    if root in chosen:
        yield root
        return
    for child in root.children():
        yield from _outermost(child, chosen)


def _callable_within(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or where it has no forward (``ModuleList``), the outermost ones that have."""
    if has_forward(module):
        yield module
        return
    for child in module.children():
        yield from _callable_within(child)
