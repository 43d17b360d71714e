"""16-bit precision for Fabric with parts of the models in fp32."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Literal

from lightning.fabric.plugins.precision import HalfPrecision
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_zero.params.kept import LOW_DTYPES, CastsAround, KeptParts, cast_rest
from lightning_zero.params.units import LeafModule


class ZeroHalfPrecision(HalfPrecision):
    """``16-true`` and ``bf16-true`` that keep parts of the models in fp32.

    Args:
        precision: Lightning's name of it.
        keep_fp32: What is kept, see :class:`lightning_zero.params.kept.KeptParts`.
    """

    def __init__(
        self, precision: Literal["bf16-true", "16-true"], keep_fp32: Sequence[LeafModule]
    ) -> None:
        super().__init__(precision)
        self._keep_fp32 = keep_fp32

    @cached_property
    def _casts(self) -> MutableMapping[nn.Module, CastsAround]:
        return weakref.WeakKeyDictionary()  # which cannot go to spawned ranks

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        kept = KeptParts(module, self._keep_fp32)
        if kept.idle:  # no error: it may be meant for another model
            rank_zero_warn(
                f"keep_fp32 names {kept.idle}, which chooses nothing in this"
                f" {type(module).__name__}"
            )
        self.release(module)
        module, casts, warning = cast_rest(
            module, kept, LOW_DTYPES[self.precision], super().convert_module
        )
        self._casts[module] = casts
        if warning:
            rank_zero_warn(warning)
        return module

    def release(self, module: nn.Module) -> None:
        """Take the casts off a model that leaves Fabric; nothing to do if it has none."""
        casts = self._casts.pop(module, None)
        if casts is not None:
            casts.remove()

    # What is kept must not be made in 16 bits; the rest is cast afterwards.

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        return super().tensor_init_context()
