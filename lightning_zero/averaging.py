"""Weight averaging on shards: ``Trainer(callbacks=[ZeroEMA()])``.

[Note: what a checkpoint has]
The layout is that of Lightning's ``WeightAveraging``, so that each reads the other's files: the
average stands under ``state_dict``, where every reader finds it, the weights that are trained under
``current_model_state``, and the number of values that are averaged under ``averaging_state``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_avg_fn, get_swa_avg_fn
from typing_extensions import override

from lightning_zero import _compat
from lightning_zero.checkpoint.names import plain_name
from lightning_zero.checkpoint.restored import RestoreWarning, cut_state
from lightning_zero.engine import ZeroEngine
from lightning_zero.optim.averages import AverageFunction, RunningAverage, averaged_dtype
from lightning_zero.strategy import ZeroStrategy

DEFAULT_DECAY = 0.999
STATE, CURRENT, COUNT = "state_dict", "current_model_state", "averaging_state"
"""Keys of a checkpoint, see [Note: what a checkpoint has]."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """An average from a checkpoint that is still to be cut for this rank."""

    state: Mapping[str, Any]
    n_averaged: int


@dataclass(frozen=True, slots=True)
class _Training:
    """What is trained, while the model shows the average."""

    pieces: dict[nn.Parameter, Tensor]
    buffers: dict[str, Tensor]


class ZeroEMA(Callback):
    """Averages the weights after optimizer steps, each rank those that it owns.

    That takes no communication, and a share of the model's memory: 1/N of it on N ranks at stages 1
    to 3, in fp32. Validation within ``fit`` and the end of training see the average; between them
    training goes on with its own weights, to the last bit. Frozen parameters stay as they are, and
    so do buffers that are not floating-point numbers.

    Checkpoints have the average as ``state_dict``, and what training goes on with besides: they are
    read at any stage, on any number of ranks, and by Lightning's ``WeightAveraging``, whose own are
    read here. Files of weights only have those that are trained. After an error in the midst of
    validation, the module has the average.

    Args:
        decay: Share of the average that each update keeps: ``decay * average + (1 - decay) *
            weights``. None for 0.999.
        average: ``"ema"``, ``"mean"`` for equal weights of all updates (as in SWA), or a function
            of the average, the weights and the number of earlier updates. It has to be
            element-wise, as those of ``torch.optim.swa_utils`` are.
        use_buffers: Average floating-point buffers, too; else the model's own stay.
        update_every_n_steps: Optimizer steps from one update to the next.
        update_starting_at_step: Index of the first step after which there may be an update.
        from_initial_weights: Start the average from the weights before the first step; else the
            first update copies them.

    Raises:
        ValueError: A value is out of range, or has no effect.

    Source:
        Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992);
        Izmailov et al. (arXiv:1803.05407).
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        average: Literal["ema", "mean"] | AverageFunction = "ema",
        use_buffers: bool = True,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        from_initial_weights: bool = False,
    ) -> None:
        self._function = _average_function(decay, average)
        if update_every_n_steps < 1:
            raise ValueError(
                f"update_every_n_steps must be at least 1, got {update_every_n_steps!r}"
            )
        if update_starting_at_step < 0:
            raise ValueError(
                f"update_starting_at_step must not be negative, got {update_starting_at_step!r}"
            )
        self._use_buffers = use_buffers
        self._every, self._first = update_every_n_steps, update_starting_at_step
        self._from_initial_weights = from_initial_weights
        self._pieces: RunningAverage[nn.Parameter] | None = None
        self._buffers: RunningAverage[str] = RunningAverage(self._function)
        self._saved: _Saved | None = None
        self._training: _Training | None = None
        self._is_final = False
        self._latest_step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update the average now; to be overridden for another rhythm.

        Called for each optimizer step and at the end of each training epoch, with one of the two.
        All ranks have to give the same answer.

        Args:
            step_idx: Index of the optimizer step that has been taken, from 0 on.
            epoch_idx: Index of the epoch that ends.
        """
        if step_idx is None:
            return False
        return step_idx >= self._first and step_idx % self._every == 0

    @property
    def n_averaged(self) -> int:
        """Updates that the average is made of."""
        return 0 if self._pieces is None else self._pieces.n_averaged

    # Training.

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        _strategy_of(trainer)
        averaging = (ZeroEMA, WeightAveraging, StochasticWeightAveraging)
        others = [
            type(callback).__name__
            for callback in _compat.callbacks_of(trainer)
            if isinstance(callback, averaging) and callback is not self
        ]
        if others:
            raise ValueError(
                f"ZeroEMA and {', '.join(others)} would both exchange the weights for validation"
                " and checkpoints: use one callback that averages."
            )
        self._pieces = RunningAverage(self._function)
        self._buffers = RunningAverage(self._function)
        self._saved = self._training = None
        self._is_final = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = self._ready(trainer)
        self._latest_step = trainer.global_step
        if self._from_initial_weights and average.n_averaged == 0:
            self._update(trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        average = self._ready(trainer)  # what was frozen so far has been what it is
        average.join({p: piece.tensor for p, piece in _engine_of(trainer).trained.pieces().items()})

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        steps = range(self._latest_step, trainer.global_step)  # several with several optimizers
        self._latest_step = trainer.global_step
        if any([self.should_update(step_idx=step) for step in steps]):
            self._update(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = self._ready(trainer)
        if average.n_averaged == 0:
            rank_zero_warn(
                f"ZeroEMA has averaged nothing in {trainer.global_step} optimizer step(s), so the"
                " model keeps the weights that were trained: see update_starting_at_step and"
                " update_every_n_steps."
            )
            return
        _engine_of(trainer).trained.keep(average.values, "ending training with the average")
        _overwrite(pl_module, self._buffers.values)
        self._is_final = True

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._pieces is not None:
            self._pieces.values.clear()
            self._buffers.values.clear()

    # Validation.

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        average = self._ready(trainer)
        if average.n_averaged == 0 or self._training is not None:
            return
        trained = _engine_of(trainer).trained
        self._training = _Training(
            {parameter: shown.clone() for parameter, shown in trained.shown().items()},
            {name: b.clone() for name, b in _float_buffers(pl_module).items()},
        )
        trained.show(average.values, "validating the average")
        _overwrite(pl_module, self._buffers.values)

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        training, self._training = self._training, None
        if training is not None:
            _engine_of(trainer).trained.show(training.pieces, "training on after validation")
            _overwrite(pl_module, training.buffers)

    # Checkpoints.

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._pieces is None:
            return
        strategy, shown = _strategy_of(trainer), checkpoint[STATE]
        checkpoint[CURRENT] = shown
        if strategy.engine is not None:
            average = self._ready(trainer)
            if average.n_averaged:
                state = strategy.state_dict_with(shown, "average", average.values)
                checkpoint[STATE] = _with_buffers(state, self._buffers.values)
            if self._training is not None:
                state = strategy.state_dict_with(shown, "trained", self._training.pieces)
                checkpoint[CURRENT] = _with_buffers(state, self._training.buffers)
        elif not self._is_final and self.n_averaged:
            raise RuntimeError(
                "the average is gone with the training that ended before its end, so no checkpoint"
                " can be written of it: save while `fit` runs, as ModelCheckpoint does"
            )
        checkpoint[COUNT] = {"n_averaged": torch.tensor(self.n_averaged)}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._pieces is None:
            return
        if CURRENT not in checkpoint or COUNT not in checkpoint:
            rank_zero_warn(
                "ZeroEMA: the checkpoint has no average, which starts anew from its weights."
            )
            self._saved = _Saved({}, 0)
            return
        _strategy_of(trainer).load_model_state_dict(
            {**checkpoint, STATE: checkpoint[CURRENT]}, strict=pl_module.strict_loading
        )
        self._saved = _Saved(checkpoint[STATE], int(checkpoint[COUNT]["n_averaged"]))

    # Parts of these.

    def _ready(self, trainer: pl.Trainer) -> RunningAverage[nn.Parameter]:
        """The average, with what was loaded."""
        if self._pieces is None:
            raise AssertionError("ZeroEMA has not been set up")
        saved, self._saved = self._saved, None
        if saved is not None:
            with torch.inference_mode(False):  # an evaluation may be the first to ask
                self._take(saved, self._pieces, _engine_of(trainer))
        return self._pieces

    def _take(
        self, saved: _Saved, pieces: RunningAverage[nn.Parameter], engine: ZeroEngine
    ) -> None:
        pieces.n_averaged = self._buffers.n_averaged = saved.n_averaged
        pieces.values = _cut_for(engine, saved) if saved.n_averaged else {}
        self._buffers.values = {
            name: saved.state[plain_name(name)].to(
                buffer.device, averaged_dtype(buffer.dtype), copy=True
            )
            for name, buffer in _float_buffers(engine.module).items()
            if self._use_buffers and saved.n_averaged and plain_name(name) in saved.state
        }

    def _update(self, trainer: pl.Trainer) -> None:
        engine = _engine_of(trainer)
        self._ready(trainer).update(engine.trained.values())
        self._buffers.update(_float_buffers(engine.module) if self._use_buffers else {})


def _average_function(
    decay: float | None, average: Literal["ema", "mean"] | AverageFunction
) -> AverageFunction:
    if average == "ema":
        decay = DEFAULT_DECAY if decay is None else decay
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be from 0 to 1, got {decay!r}")
        return get_ema_avg_fn(decay)  # type: ignore[no-any-return, no-untyped-call]
    if decay is not None:
        raise ValueError(f"decay={decay!r} has no effect with average={average!r}: remove it")
    if average == "mean":
        return get_swa_avg_fn()  # type: ignore[no-any-return, no-untyped-call]
    if not callable(average):
        raise ValueError(f"average must be 'ema', 'mean' or a function, got {average!r}")
    return average


def _strategy_of(trainer: pl.Trainer) -> ZeroStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, ZeroStrategy):
        raise ValueError(
            f"ZeroEMA averages the shards of ZeroStrategy, and the Trainer has"
            f" {type(strategy).__name__}: use Lightning's WeightAveraging, which reads its"
            " checkpoints."
        )
    return strategy


def _engine_of(trainer: pl.Trainer) -> ZeroEngine:
    engine = _strategy_of(trainer).engine
    if engine is None:
        raise AssertionError("ZeroEMA needs the engine of a fit that is running")
    return engine


def _cut_for(engine: ZeroEngine, saved: _Saved) -> dict[nn.Parameter, Tensor]:
    """This rank's pieces of a saved average.

    Raises:
        ValueError: A shape is another one; on all ranks.
    """
    names = {parameter: plain_name(engine.names[parameter]) for parameter in engine.table.place}
    wrong = [
        f"{name!r} has shape {tuple(saved.state[name].shape)}, not {tuple(parameter.shape)}"
        for parameter, name in names.items()
        if name in saved.state and saved.state[name].shape != parameter.shape
    ]
    if wrong:
        raise ValueError(f"the average in the checkpoint does not fit: {'; '.join(wrong)}")
    missing = [name for name in names.values() if name not in saved.state]
    if missing:
        rank_zero_warn(
            f"the checkpoint has no average of {missing[:5]}: theirs starts anew.",
            category=RestoreWarning,
        )
    found = {}
    for parameter, piece in engine.trained.pieces().items():
        if names[parameter] in saved.state:
            average = torch.empty_like(piece.tensor, dtype=averaged_dtype(piece.tensor.dtype))
            with torch.no_grad():
                found[parameter] = average.detach().copy_(
                    cut_state(piece, saved.state[names[parameter]])
                )
    return found


def _float_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer.detach()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
    }


def _overwrite(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in _float_buffers(module).items():
        if name in values:
            buffer.copy_(values[name])


def _with_buffers(state: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """A state dict with other values of buffers."""
    named = {plain_name(name): value.detach().cpu().clone() for name, value in buffers.items()}
    return {
        name: named[name].to(value.dtype) if name in named and isinstance(value, Tensor) else value
        for name, value in state.items()
    }


__all__ = ["ZeroEMA"]
