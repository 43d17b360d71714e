"""Weights that are loaded module by module into a model that an engine has."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.params.bucket import ParamStatus
from tests.helpers.single import make_model, running, sgd


def whole(engine):
    return [b for b in engine.buckets if b.status is not ParamStatus.NOT_AVAILABLE]


def values(engine, layer):
    with engine.full_params(layer):
        return layer.weight.detach().clone()


@pytest.fixture
def loading():
    module = make_model()
    with running(module, [sgd(module)], 3, bucket_numel=1) as engine:
        layers = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
        assert len(layers) > 2
        assert len(engine.buckets) >= len(layers)
        yield engine, layers


def write(layer, value):
    """As a module may that loads in its own way."""
    for _, parameter in layer._parameters.items():
        if parameter is not None:
            parameter.data.fill_(value)


def test_writes_past_autograd_are_kept_and_one_module_is_whole_at_a_time(loading):
    engine, layers = loading
    with engine.loading():
        for number, layer in enumerate(layers):
            write(layer, number)
            assert {p for b in whole(engine) for p in b.parameters} == set(layer.parameters())
    assert not whole(engine)
    for number, layer in enumerate(layers):
        assert values(engine, layer).eq(number).all()


def test_after_an_error_the_module_under_way_has_its_old_values(loading):
    engine, layers = loading
    before = values(engine, layers[1])

    def fail():
        with engine.loading():
            write(layers[0], 7.0)
            write(layers[1], 7.0)
            raise KeyError("weight")

    with pytest.raises(KeyError):
        fail()
    assert not whole(engine)
    assert values(engine, layers[0]).eq(7).all()
    assert torch.equal(values(engine, layers[1]), before)
    for layer in layers:  # a list is only a list again
        list(layer._parameters.items())
    assert not whole(engine)
