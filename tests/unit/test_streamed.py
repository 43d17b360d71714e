"""Weights that are copied tensor by tensor, into a plain module."""

from __future__ import annotations

import json
import sys
import weakref

import pytest
import torch
from torch import nn

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions, load_state_dict_streamed


class Net(nn.Module):
    """Tied weights, buffers that are saved and one that is not, a shared module."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(7, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.again = self.body[0]
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def source():
    torch.manual_seed(9)
    net = Net()
    net.body(torch.randn(6, 5))
    return net.state_dict()


def equal(net, state):
    return all(torch.equal(net.state_dict()[name], value) for name, value in state.items())


def test_from_a_state_dict_pairs_and_files(tmp_path):
    state = source()
    torch.save(state, tmp_path / "weights.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "lightning.ckpt")
    for given in (
        state,
        iter(state.items()),
        tmp_path / "weights.pt",
        str(tmp_path / "lightning.ckpt"),
    ):
        net = Net()
        load_state_dict_streamed(net, given)
        assert equal(net, state)
        assert net.head.weight is net.token.weight


def test_onto_the_meta_device():
    state = source()
    with torch.device("meta"):
        net = Net()
    weight = net.token.weight
    del state["head.weight"]  # tied: one name is enough
    load_state_dict_streamed(net, state)
    assert equal(net, state)
    assert net.head.weight is net.token.weight is not weight
    assert net.again.weight is net.body[0].weight
    assert net.scratch.is_meta
    state["token.weight"].zero_()
    assert net.token.weight.any()  # a copy


def test_values_are_converted():
    state = {name: value.double() for name, value in source().items()}
    net = Net()
    load_state_dict_streamed(net, state)
    assert net.token.weight.dtype == torch.float32
    assert torch.equal(net.token.weight.double(), state["token.weight"])


def test_names_and_shapes_must_fit():
    state = source()
    net = Net()
    before = net.token.weight.clone()
    wrong = {**state, "more": torch.ones(2), "scratch": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"into Net: unexpected: \['more', 'scratch'\]"):
        load_state_dict_streamed(net, wrong)
    load_state_dict_streamed(net, wrong, strict=False)
    assert not torch.equal(net.token.weight, before)
    for name in ("body.0.bias", "again.bias"):
        del state[name]
    with pytest.raises(RuntimeError, match=r"missing: \['body.0.bias', 'again.bias'\] \(st"):
        load_state_dict_streamed(net, state)
    load_state_dict_streamed(net, state, strict=False)
    state["token.weight"] = torch.ones(7, 6)
    with pytest.raises(RuntimeError, match=r"token.weight: \(7, 6\) instead of \(7, 5\)"):
        load_state_dict_streamed(net, state, strict=False)


def test_only_one_tensor_is_there_at_a_time():
    given = []

    def pairs():
        for name in source():
            value = source()[name]
            assert all(earlier() is None for earlier in given)
            given.append(weakref.ref(value))
            yield name, value
            del value

    net = Net()
    load_state_dict_streamed(net, pairs())
    assert equal(net, source())
    assert len(given) == len(source())


def test_not_while_an_engine_trains(tmp_path):
    net = Net()
    engine = ZeroEngine(net, [], ZeroOptions(stage=3), ShardGroups.create())
    with pytest.raises(RuntimeError, match="'token.weight' is sharded by a Trainer that runs"):
        load_state_dict_streamed(net, source())
    engine.close()
    load_state_dict_streamed(net, source())


def test_a_safetensors_file_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-zero\[safetensors\]'"):
        load_state_dict_streamed(Net(), tmp_path / "model.safetensors")


def test_safetensors_files_and_their_index(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = {name: value for name, value in source().items() if name.split(".")[0] != "again"}
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    net = Net()
    load_state_dict_streamed(net, tmp_path / "model.safetensors")
    assert equal(net, state)
    names = list(state)
    places = {name: f"part{n % 2}.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        save_file({n: state[n] for n in names if places[n] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    net = Net()
    load_state_dict_streamed(net, tmp_path / "model.safetensors.index.json")
    assert equal(net, state)
