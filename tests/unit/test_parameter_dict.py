"""Reads of a watched module's parameters are told, listings are told apart, copies are plain."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_zero.params.parameter_dict import ZeroParameterDict, install, uninstall


@pytest.fixture
def watched():
    """A module, what was read, and how often it was listed."""
    module = nn.Linear(3, 2)
    read, listed = [], []
    install(module, read.append, listed.append)
    return module, read, listed


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.weight,
        lambda m: m._parameters["weight"],
        lambda m: m._parameters.get("weight"),
        lambda m: m.get_parameter("weight"),
    ],
)
def test_read_by_name_is_told(watched, use):
    module, read, listed = watched
    assert use(module) is read[0]
    assert read[0].shape == (2, 3)
    assert not listed


def test_forward_reads_both_parameters(watched):
    module, read, _ = watched
    module(torch.ones(1, 3))
    assert [p.shape for p in read] == [(2, 3), (2,)]


@pytest.mark.parametrize(
    "use", [lambda m: list(m.parameters()), lambda m: m.state_dict(), lambda m: m.zero_grad()]
)
def test_listing_is_told_and_reads_nothing(watched, use):
    module, read, listed = watched
    use(module)
    assert not read
    assert listed == [module._parameters]


def test_values_list(watched):
    module, read, listed = watched
    assert len(module._parameters.values()) == 2
    assert (len(read), len(listed)) == (0, 1)


def test_missing_name_is_no_read(watched):
    module, read, _ = watched
    assert module._parameters.get("other") is None
    assert module._parameters.get("other", 5) == 5
    with pytest.raises(KeyError):
        module._parameters["other"]
    assert not read


def test_parameter_that_is_none_is_no_read():
    module = nn.Linear(3, 2, bias=False)
    read = []
    install(module, read.append, lambda _: None)
    assert module.bias is None
    assert not read


def test_plain_is_an_ordinary_dict_without_effect(watched):
    module, read, listed = watched
    plain = module._parameters.plain()
    assert type(plain) is dict
    assert list(plain) == ["weight", "bias"]
    assert not read
    assert not listed


def test_new_parameter_is_watched_too(watched):
    module, read, _ = watched
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert module.extra is read[0]


def test_deepcopy_reads_all_and_is_plain(watched):
    module, read, _ = watched
    twin = copy.deepcopy(module)
    assert type(twin._parameters) is dict
    assert {p.shape for p in read} == {(2, 3), (2,)}
    assert twin._parameters["weight"] is not module._parameters.plain()["weight"]
    assert torch.equal(twin.weight, module._parameters.plain()["weight"])


def test_deepcopy_keeps_ties(watched):
    module, _, _ = watched
    tied = nn.ModuleList([module, nn.Linear(3, 2)])
    tied[1].weight = module.weight
    twin = copy.deepcopy(tied)
    assert twin[0].weight is twin[1].weight


def test_pickle_reads_all_and_is_plain(watched):
    module, read, _ = watched
    twin = pickle.loads(pickle.dumps(module._parameters))
    assert type(twin) is dict
    assert len(read) == 2
    assert torch.equal(twin["bias"], module._parameters.plain()["bias"])


def test_uninstall_gives_the_plain_dict_back(watched):
    module, read, _ = watched
    weight = module._parameters.plain()["weight"]
    uninstall(module)
    assert type(module._parameters) is dict
    assert module.weight is weight
    assert not read
    uninstall(module)
    assert not isinstance(module._parameters, ZeroParameterDict)
