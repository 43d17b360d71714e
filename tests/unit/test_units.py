"""Cutting modules into units."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_zero.params.units import (
    external_parameters,
    module_units,
    register_external_parameter,
)
from tests.helpers.single import running, sgd


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    """A stack of blocks in a list, a parameter of its own, an activation without any."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.act = nn.ReLU()


def names(units):
    return [(unit.name, [name for name, _ in unit.parameters]) for unit in units]


def test_blocks_that_fit_are_one_unit_each():
    assert names(module_units(Model(), bucket_numel=32)) == [
        ("", ["scale"]),
        ("blocks.0", ["blocks.0.up.weight", "blocks.0.down.weight"]),
        ("blocks.1", ["blocks.1.up.weight", "blocks.1.down.weight"]),
    ]


def test_blocks_that_do_not_fit_are_cut_into_their_children():
    assert names(module_units(Model(), bucket_numel=31)) == [
        ("", ["scale"]),
        ("blocks.0.up", ["blocks.0.up.weight"]),
        ("blocks.0.down", ["blocks.0.down.weight"]),
        ("blocks.1.up", ["blocks.1.up.weight"]),
        ("blocks.1.down", ["blocks.1.down.weight"]),
    ]


def test_root_is_never_one_unit():
    root = Block(2)
    units = module_units(root, bucket_numel=10**9)
    assert [unit.module for unit in units] == [root.up, root.down]


def test_module_list_is_cut_even_if_it_fits():
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert [unit.name for unit in module_units(root, 10**9)] == ["layers.0", "layers.1"]


def test_module_larger_than_a_bucket_without_children_stays_whole():
    root = nn.Sequential(nn.Linear(10, 10))
    assert names(module_units(root, bucket_numel=1)) == [("0", ["0.weight", "0.bias"])]


def test_tied_parameter_belongs_to_the_first_unit_and_is_used_by_both():
    root = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    root[1].weight = root[0].weight
    first, second = module_units(root, bucket_numel=100)
    assert names([first, second]) == [("0", ["0.weight"]), ("1", [])]
    assert first.uses == second.uses == (root[0].weight,)


def test_module_used_under_two_names_is_listed_once():
    layer = nn.Linear(3, 3)
    root = nn.Sequential(layer, layer)
    units = module_units(root, bucket_numel=100)
    assert sum(len(unit.parameters) for unit in units) == 2


def test_every_parameter_is_in_exactly_one_unit_for_any_capacity():
    model = Model()
    expected = dict(model.named_parameters())
    for bucket_numel in (1, 16, 31, 32, 33, 10**6):
        listed = [pair for unit in module_units(model, bucket_numel) for pair in unit.parameters]
        assert len(listed) == len(expected)
        assert all(expected[name] is parameter for name, parameter in listed)


# Leaf modules.

WHOLE_BLOCKS = [
    ("", ["scale"]),
    ("blocks.0", ["blocks.0.up.weight", "blocks.0.down.weight"]),
    ("blocks.1", ["blocks.1.up.weight", "blocks.1.down.weight"]),
]


@pytest.mark.parametrize(
    "leaf", [Block, "Block", f"{__name__}.Block"], ids=["class", "name", "full name"]
)
def test_leaf_class_is_one_unit_each_whatever_its_size(leaf):
    assert names(module_units(Model(), 1, [leaf])) == WHOLE_BLOCKS


def test_leaf_class_takes_its_subclasses_but_a_name_does_not():
    class Wide(Block):
        pass

    root = nn.Sequential(Block(2), Wide(2))
    assert [unit.name for unit in module_units(root, 1, [Block])] == ["0", "1"]
    assert [unit.name for unit in module_units(root, 1, ["Block"])] == ["0", "1.up", "1.down"]


def test_leaf_name_is_one_module():
    assert [unit.name for unit in module_units(Model(), 1, ["blocks.1"])] == [
        *["", "blocks.0.up", "blocks.0.down", "blocks.1"]
    ]


def test_leaf_ending_takes_whole_parts_of_names():
    """``.up`` is no ending of ``setup``, nor of a module called ``up`` at the top."""
    root = nn.Module()
    root.up, root.setup, root.block = Block(2), Block(2), nn.Module()
    root.block.up, root.block.setup = Block(2), Block(2)
    assert [unit.name for unit in module_units(root, 1, [".up"])] == [
        *["up.up", "up.down", "setup.up", "setup.down"],
        *["block.up", "block.setup.up", "block.setup.down"],
    ]


def test_leaf_may_be_a_list_of_modules():
    """A ModuleList has no forward, so its parameters come before nobody's; it stays one unit."""
    units = module_units(Model(), 1, ["blocks"])
    assert [(unit.name, len(unit.uses)) for unit in units] == [("", 1), ("blocks", 4)]


@pytest.mark.parametrize("leaf", ["block", "blocks.2", ".bloc", "0", nn.Conv2d, "Conv2d", "Model"])
def test_leaf_that_is_not_there_is_refused(leaf):
    with pytest.raises(ValueError, match="leaf_modules names .* but no module of the model below"):
        module_units(Model(), 1, [Block, leaf])


class Nested(nn.Module):
    """A block in a model."""

    def __init__(self):
        super().__init__()
        self.expert = Block(4)
        self.after = nn.Linear(4, 4)

    def forward(self, x):
        return self.after(self.expert(x)).sum()


@pytest.mark.parametrize("is_leaf", [False, True])
def test_leaf_comes_at_once_and_nothing_below_it_has_hooks(is_leaf):
    module, events = Nested(), []
    leaves = [Block] if is_leaf else []
    below = (module.expert.up, module.expert.down)
    options = {"leaf_modules": leaves, "bucket_numel": 1, "overlap_comm": False}
    with running(module, [sgd(module)], 3, **options) as engine:
        for bucket in engine.buckets:
            _note(events, bucket)
        hooks = [len(layer._forward_hooks) for layer in (*below, module.expert)]
        for layer in (*below, module.after):
            layer.register_forward_pre_hook(lambda *_: events.append("run"))
        module(torch.ones(1, 4))
        found = list(events)
    each, together = ["come", "run", "go"], ["come", "run", "run", "go"]  # a leaf is one bucket
    assert found == ([*together, *each] if is_leaf else [*each, *each, *each])
    assert hooks == ([0, 0, 1] if is_leaf else [1, 1, 0])


def _note(events, bucket):
    begin, end = bucket.begin_unshard, bucket.reshard

    def come(**options):
        events.append("come")
        begin(**options)

    def go():
        events.append("go")
        end()

    bucket.begin_unshard, bucket.reshard = come, go


# External parameters.


def test_external_parameter_is_used_by_the_unit_that_holds_its_reader():
    model = Model()
    register_external_parameter(model.blocks[1].up, model.blocks[0].down.weight)
    register_external_parameter(model.act, model.scale)  # has no parameters of its own
    for bucket_numel, reader in ((32, "blocks.1"), (1, "blocks.1.up")):
        units = {unit.name: unit for unit in module_units(model, bucket_numel)}
        assert any(p is model.blocks[0].down.weight for p in units[reader].uses)
        assert units["act"].uses == (model.scale,)
        assert units["act"].parameters == ()
    assert names(module_units(model, 32))[:3] == WHOLE_BLOCKS


def test_external_parameter_of_the_root_is_no_use_of_a_unit():
    model = Model()
    register_external_parameter(model.act, model.scale)
    register_external_parameter(model.blocks[0], model.scale)
    root = nn.Sequential(model.blocks[0], model.act)
    root.scale = model.scale
    register_external_parameter(root, model.blocks[0].up.weight)
    assert len({unit.name: unit for unit in module_units(root, 32)}[""].uses) == 1
    assert external_parameters(root) == [model.blocks[0].up.weight]


def test_registration_goes_with_its_module():
    model = Model()
    register_external_parameter(model.act, model.scale)
    gone = weakref.ref(model.scale)
    del model
    gc.collect()
    assert gone() is None
