"""Cutting modules into units."""

from __future__ import annotations

import torch
from torch import nn

from lightning_zero.params.units import module_units


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
