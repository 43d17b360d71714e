"""Lightning's precision plugins with gradients that are partitioned.

What differs from Lightning's own: the closure runs before the step (gradients are averaged when it
ends), clipping uses the norm over all ranks, and all ranks agree on an overflow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import _compat
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.overflow import (
    NonfiniteGradients,
    NonfiniteSteps,
    OnNonfinite,
    check_action,
    check_scale,
)
from lightning_zero.params.kept import (
    LOW_DTYPES,
    CastsAround,
    KeptParts,
    cast_rest,
    check_has_effect,
)
from lightning_zero.params.units import LeafModule
from lightning_zero.scaling import unscale_together


class ZeroPrecision(Precision):
    """Precision plugin that lets an engine do backward, clipping and step."""

    engine: ZeroEngine | None = None
    """Set by the strategy while a fit is set up."""

    on_nonfinite: OnNonfinite = "step"
    """What happens to a step whose gradients are not finite, where no loss scaler decides."""

    keep_fp32: Sequence[LeafModule] = ()
    """What stays in fp32 where everything else is cast to 16 bits."""

    def take_options(self, on_nonfinite: OnNonfinite, keep_fp32: Sequence[LeafModule]) -> None:
        """Take those of the strategy.

        Args:
            on_nonfinite: See the attribute.
            keep_fp32: See the attribute.

        Raises:
            ValueError: An option has no effect with this precision.
        """
        check_has_effect(keep_fp32, self.precision)
        self.on_nonfinite, self.keep_fp32 = on_nonfinite, keep_fp32

    @override
    def backward(  # type: ignore[override]  # as Lightning's Trainer calls it
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self.engine is None:  # a backward in evaluation trains nothing
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        with self.engine.backward_scope():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's Trainer calls it
        self,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        engine = self._ready_engine()
        result = self._wrap_closure(model, optimizer, closure)
        is_taken = self._is_taken(engine, model.trainer, optimizer)
        engine.step(optimizer, lambda: optimizer.step(**kwargs) if is_taken else None)
        return result

    @cached_property
    def nonfinite_steps(self) -> NonfiniteSteps:
        """Steps whose gradients were not finite."""
        return NonfiniteSteps()

    def _is_taken(self, engine: ZeroEngine, trainer: pl.Trainer, optimizer: Optimizer) -> bool:
        """Whether an optimizer may step with the gradients it has; the same on all ranks."""
        where = engine.agreement.nonfinite(optimizer)
        step, steps = trainer.global_step, self.nonfinite_steps
        is_taken = steps.is_taken(optimizer, step, where, self.on_nonfinite)
        if where:
            self._log(trainer, "zero/nonfinite_steps")
        return is_taken

    def _log(self, trainer: pl.Trainer, metric: str) -> None:
        for logger in trainer.loggers:
            count = float(self.nonfinite_steps.count)
            logger.log_metrics({metric: count}, step=trainer.global_step)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = "norm",
    ) -> None:
        # Not MixedPrecision's: a fused optimizer can be clipped, since unscaling happens before.
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        engine = self._ready_engine()
        engine.clip_grad_norm_(_compat.plain_optimizer(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        engine = self._ready_engine()
        engine.clip_grad_value_(_compat.plain_optimizer(optimizer), float(clip_val))

    def _ready_engine(self) -> ZeroEngine:
        if self.engine is None:
            raise RuntimeError(
                "an optimizer step or clipping was asked for outside of `trainer.fit`:"
                " ZeroStrategy has no optimizer there"
            )
        return self.engine


class ZeroHalfPrecision(ZeroPrecision, HalfPrecision):
    """``16-true`` and ``bf16-true``; master weights are kept by the engine."""

    _casts: CastsAround | None = None

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        if self.keep_fp32:  # what is kept must not be made in 16 bits; the rest is cast afterwards
            return nullcontext()
        return super().tensor_init_context()

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        kept = KeptParts(module, self.keep_fp32)
        kept.check_all_used()
        self._remove_casts()
        module, self._casts, warning = cast_rest(
            module, kept, LOW_DTYPES[self.precision], super().convert_module
        )
        if warning:
            rank_zero_warn(warning)
        return module

    @override
    def teardown(self) -> None:
        self._remove_casts()
        super().teardown()

    def _remove_casts(self) -> None:
        if self._casts is not None:
            self._casts.remove()
            self._casts = None


class ZeroDoublePrecision(ZeroPrecision, DoublePrecision):
    """``64-true``."""


class ZeroMixedPrecision(ZeroPrecision, MixedPrecision):
    """``16-mixed`` and ``bf16-mixed``; with a loss scaler, all ranks skip the same steps."""

    @override
    def take_options(self, on_nonfinite: OnNonfinite, keep_fp32: Sequence[LeafModule]) -> None:
        check_action(on_nonfinite, self.scaler is not None)
        super().take_options(on_nonfinite, keep_fp32)

    @override
    def optimizer_step(  # type: ignore[override]  # as Lightning's Trainer calls it
        self,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        engine = self._ready_engine()
        result = closure()
        if result is None and model.automatic_optimization:  # training_step skipped the batch
            self._after_closure(model, optimizer)
            return result
        where = unscale_together(engine, scaler, optimizer)
        if where is not None:
            self._tell_skipped(model.trainer, optimizer, scaler.get_scale(), where)
        else:
            self.nonfinite_steps.end_row(optimizer)
        self._after_closure(model, optimizer)
        engine.step(optimizer, lambda: scaler.step(optimizer, **kwargs))
        scaler.update()
        if where is not None:
            check_scale(scaler.get_scale(), model.trainer.global_step, where)
        return result

    def _tell_skipped(
        self, trainer: pl.Trainer, optimizer: Optimizer, scale: float, where: NonfiniteGradients
    ) -> None:
        text, is_warning = self.nonfinite_steps.scaled(optimizer, trainer.global_step, scale, where)
        if is_warning:  # on every rank: it is in each rank's log why that rank trains nothing
            warnings.warn(text, stacklevel=2)
        elif text:
            rank_zero_info(text)
        self._log(trainer, "zero/skipped_steps")

    # Checkpoints name a plugin's state by its class; ours is Lightning's state.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get(MixedPrecision.__qualname__)
        if state is not None and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(state)


def zero_precision(plugin: Precision) -> ZeroPrecision:
    """Our counterpart of one of Lightning's precision plugins, with the same settings.

    Raises:
        ValueError: There is none for this class.
    """
    if isinstance(plugin, ZeroPrecision):
        return plugin
    counterparts: dict[type[Precision], type[ZeroPrecision]] = {
        Precision: ZeroPrecision,
        MixedPrecision: ZeroMixedPrecision,
        HalfPrecision: ZeroHalfPrecision,
        DoublePrecision: ZeroDoublePrecision,
    }
    ours = counterparts.get(type(plugin))
    if ours is None:
        raise ValueError(
            f"ZeroStrategy does not support the precision plugin {type(plugin).__name__}."
            " Supported: precision='32-true', '64-true', '16-true', 'bf16-true', '16-mixed',"
            " 'bf16-mixed', and subclasses of lightning_zero.precision.ZeroPrecision."
        )
    twin = ours.__new__(ours)
    twin.__dict__.update(plugin.__dict__)
    return twin
