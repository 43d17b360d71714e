"""Lightning's precision plugins and their counterparts here."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_zero.precision import (
    ZeroDoublePrecision,
    ZeroHalfPrecision,
    ZeroMixedPrecision,
    ZeroPrecision,
    zero_precision,
)

PLUGINS = [
    (Precision, (), ZeroPrecision),
    (HalfPrecision, ("bf16-true",), ZeroHalfPrecision),
    (HalfPrecision, ("16-true",), ZeroHalfPrecision),
    (DoublePrecision, (), ZeroDoublePrecision),
    (MixedPrecision, ("bf16-mixed", "cpu"), ZeroMixedPrecision),
]


@pytest.mark.parametrize(("kind", "arguments", "expected"), PLUGINS)
def test_counterpart_has_the_settings_of_the_original(kind, arguments, expected):
    plugin = kind(*arguments)
    ours = zero_precision(plugin)
    assert type(ours) is expected
    assert isinstance(ours, kind)
    assert ours.precision == plugin.precision
    assert vars(ours) == vars(plugin)


def test_loss_scaler_of_the_user_is_kept():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ours = zero_precision(MixedPrecision("16-mixed", "cpu", scaler))
    assert ours.scaler is scaler


def test_own_plugin_is_taken_as_it_is():
    plugin = ZeroPrecision()
    assert zero_precision(plugin) is plugin


def test_unknown_plugin_is_refused_by_name():
    class Quantized(Precision):
        pass

    with pytest.raises(ValueError, match="does not support the precision plugin Quantized"):
        zero_precision(Quantized())


def test_clipping_outside_of_a_fit_is_refused():
    with pytest.raises(RuntimeError, match="outside of `trainer.fit`"):
        ZeroPrecision().clip_grad_by_norm(None, 1.0)


def test_scaler_state_stands_under_lightnings_name():
    ours = zero_precision(
        MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    )
    checkpoint = {ours.__class__.__qualname__: {"scale": 8.0}}
    ours.on_save_checkpoint(checkpoint)
    assert checkpoint == {"MixedPrecision": {"scale": 8.0}}
