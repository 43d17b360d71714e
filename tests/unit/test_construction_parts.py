"""What construction consists of: sizes of tensors to come, meta modules, random numbers, memory."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_zero import _compat
from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.memory import room
from lightning_zero.params.construction import incoming_numel
from lightning_zero.params.dense import checksum, dense_stride, flatten
from lightning_zero.params.meta import materialize
from lightning_zero.params.random_state import same_random_numbers
from lightning_zero.params.slice import Slice, is_sliceable

CPU = torch.device("cpu")
ALONE = choose_collectives(None)

# Tensors to come.

FOUR = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "numel"),
    [
        (torch.empty, (3, 5), {}, 15),
        (torch.empty, ((3, 5),), {"dtype": torch.half}, 15),
        (torch.zeros, (torch.Size([7]),), {}, 7),
        (torch.ones, ([2, 0],), {}, 0),
        (torch.randn, (), {"size": (6, 2)}, 12),
        (torch.rand, (9,), {"device": "cpu"}, 9),
        (torch.rand, (9,), {"device": torch.device("meta")}, 0),
        (torch.empty, (9,), {"device": "meta"}, 0),
        (torch.full, ((4, 4), 1.0), {}, 16),
        (torch.full, (), {"size": (4, 5), "fill_value": 1.0}, 20),
        (torch.empty_like, (FOUR,), {}, 12),
        (torch.zeros_like, (), {"input": FOUR}, 12),
        (torch.Tensor.clone, (FOUR,), {}, 12),
        (torch.empty_like, (FOUR.to("meta"),), {}, 0),
        (torch.empty_like, (FOUR.to("meta"),), {"device": CPU}, 12),
        (torch.add, (FOUR, FOUR), {}, 0),
        (torch.empty, (), {}, 1),
    ],
)
def test_incoming_numel(func, args, kwargs, numel):
    assert incoming_numel(func, args, kwargs) == numel


# Memory order.


def test_flatten_keeps_the_memory_order():
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    stride = dense_stride(last)
    assert stride == last.stride()
    flat = flatten(last, stride)
    assert flat.data_ptr() == last.data_ptr()
    assert torch.equal(flat.as_strided(last.shape, stride), last)
    view = torch.randn(4, 6)[:, 1:4]
    flat = flatten(view, dense_stride(view))
    assert flat.data_ptr() != view.data_ptr()
    assert torch.equal(flat.view(4, 3), view)
    begin = torch.randn(9)[4:]
    assert torch.equal(flatten(begin, (1,)), begin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_checksum_tells_values_apart(dtype):
    values = (torch.randn(5000) * 3).to(dtype)
    other = values.clone()
    other[4999] = 1 - other[4999].int() if dtype is torch.bool else other[4999] + 1
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(other)


# One slice.


def test_slice_keeps_its_part_and_makes_it_whole_again():
    values = torch.randn(3, 7)
    parameter = nn.Parameter(values.clone())
    known = Slice(parameter, "Linear.weight", 1)
    known.cut(1, 4)
    assert torch.equal(known.values, values.flatten()[6:12])
    assert parameter.shape == values.shape
    assert parameter.isnan().all()
    assert str(known) == "parameter Linear.weight (3, 7)"
    known.join(torch.cat([values.flatten(), torch.zeros(3)]), was_equal=True)
    assert torch.equal(parameter, values)


def test_last_slices_may_be_short_or_empty():
    parameter = nn.Parameter(torch.arange(5.0))
    known = Slice(parameter, "x", 1)
    known.cut(3, 4)
    assert known.values.tolist() == [0.0, 0.0]


def test_slice_follows_a_conversion_and_takes_new_values():
    parameter = nn.Parameter(torch.arange(6.0))
    known = Slice(parameter, "x", 1)
    known.cut(1, 2)
    parameter.data = parameter.data.to(torch.float64)
    known.follow(1, 2)
    assert (known.values.dtype, known.values.tolist()) == (torch.float64, [3.0, 4.0, 5.0])
    parameter.data = torch.arange(10.0, 16.0, dtype=torch.float64)
    known.follow(1, 2)
    assert known.values.tolist() == [13.0, 14.0, 15.0]
    known.overwrite(torch.arange(20.0, 26.0), 1, 2)
    assert known.values.tolist() == [23.0, 24.0, 25.0]
    assert parameter.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int64])
def test_slices_of_any_dtype(dtype):
    values = torch.tensor([1.0, 0, 2, 0, 1, 1, 0]).to(dtype)
    parameter = nn.Parameter(values.clone(), requires_grad=False)
    known = Slice(parameter, "x", 1)
    known.cut(0, 2)
    known.check_untouched()
    assert torch.equal(known.values.float(), values[:4].float())
    known.seal()
    known.follow(0, 2)
    known.join(torch.cat([values, values[:1]]), was_equal=False)
    assert torch.equal(parameter.float(), values.float())


def test_a_write_to_an_absent_parameter_is_found():
    parameter = nn.Parameter(torch.ones(6))
    known = Slice(parameter, "Linear.weight", 1)
    known.cut(0, 2)
    parameter.data.zero_()  # torch lets zeros through
    with pytest.raises(RuntimeError, match=r"Linear.weight \(6,\) was written to while"):
        known.own_values(0, 2)


def test_holders_are_seen():
    own = {"weight": nn.Parameter(torch.ones(6))}
    known = Slice(own["weight"], "x", 1)

    class Home(dict):
        pass

    home = Home(own)
    own.clear()
    known.add_home(home)
    assert not known.is_held()
    held = home["weight"]
    assert known.is_held()
    del held
    assert not known.is_held()
    assert not known.is_aliased()
    view = home["weight"].data[2:]
    assert known.is_aliased()
    del view
    assert not known.is_aliased()
    home.clear()
    assert known.parameter is None


def test_only_plain_dense_parameters_are_cut():
    assert is_sliceable(nn.Parameter(torch.ones(2)))
    assert is_sliceable(nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    for other in (
        torch.ones(2),
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.ones(1)),
        nn.Parameter(torch.ones(0, 3)),
        nn.Parameter(torch.ones(2, device="meta")),
        nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        nn.Parameter(torch.eye(2).to_sparse()),
        nn.UninitializedParameter(),
    ):
        assert not is_sliceable(other)


def test_a_name_that_is_looked_up_to_register_it_is_no_read():
    class Watching(nn.Module):
        def __getattr__(self, name):
            seen.append(_compat.is_registering(depth=1))
            return super().__getattr__(name)

    seen = []
    module = Watching()
    module.weight = nn.Parameter(torch.ones(2))
    assert seen == [True]
    assert module.weight.shape == (2,)
    assert seen == [True, False]
    assert not _compat.is_registering(depth=10**6)


# Meta modules.


def on_meta():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Embedding(7, 5), nn.Linear(5, 7))
    net[3].weight = net[2].weight
    net[0].weight.mark = "kept"
    return net


def test_meta_modules_reset_themselves_in_order():
    torch.manual_seed(3)
    expected = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Embedding(7, 5)]
    torch.manual_seed(3)
    net = on_meta()
    materialize(net, CPU)
    for found, module in zip(net, expected, strict=False):
        assert found.state_dict().keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], value), name
    assert net[0].weight.mark == "kept"
    assert net[3].bias.isfinite().all()


def test_ties_outlive_the_meta_device():
    net = on_meta()
    with torch.device("meta"):
        net.append(nn.Linear(5, 7, bias=False))
    net[4].weight = net[2].weight
    torch.manual_seed(3)
    materialize(net, CPU)
    assert net[2].weight is net[3].weight is net[4].weight
    torch.manual_seed(3)
    nn.Linear(4, 5)
    assert torch.equal(net[2].weight, nn.Embedding(7, 5).weight)  # of the module that comes first


def test_real_tensors_of_a_meta_module_stay():
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    norm.table = nn.Buffer(torch.arange(3.0))
    norm.extra = nn.Parameter(torch.arange(4.0))
    extra = norm.extra
    materialize(nn.Sequential(norm), CPU)
    assert norm.table.tolist() == [0, 1, 2]
    assert norm.extra.tolist() == [0, 1, 2, 3]
    assert norm.extra is extra
    assert norm.weight.tolist() == [1, 1, 1]
    assert norm.running_var.tolist() == [1, 1, 1]


def test_a_model_without_meta_modules_is_left_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    before = net[0].weight.clone()
    materialize(net, CPU)
    assert torch.equal(net[0].weight, before)
    with torch.device("meta"):
        lazy = nn.LazyLinear(3)
    materialize(lazy, CPU)


def test_meta_parametrizations_have_no_way_to_reset():
    with torch.device("meta"):
        net = parametrizations.weight_norm(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match=r"parametrizations.weight .*original0, original1"):
        materialize(nn.ModuleDict({"net": net}), CPU)


# Random numbers.


def test_alone_the_generators_go_on():
    torch.manual_seed(1)
    with same_random_numbers(ALONE, CPU):
        inside = torch.rand(3)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(inside, torch.rand(3))
    assert torch.equal(after, torch.rand(3))


class SecondRank(type(ALONE)):
    """Rank 1, which is told what rank 0 has."""

    def __init__(self, message):
        super().__init__()
        self.rank, self.message = 1, message

    def agree(self, values):
        values.fill_(len(self.message))

    def broadcast(self, tensors):
        tensors[0].copy_(torch.frombuffer(bytearray(self.message), dtype=torch.uint8))


class FirstRank(type(ALONE)):
    def broadcast(self, tensors):
        self.message = bytes(tensors[0].tolist())


def test_another_rank_draws_what_rank_zero_draws_and_goes_on_with_its_own():
    def draw():
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    def seed(number):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    first = FirstRank()
    seed(1)
    with same_random_numbers(first, CPU):
        theirs = draw()
    seed(2)
    mine = draw()
    seed(2)
    random.seed(1)

    def fail():
        with same_random_numbers(SecondRank(first.message), CPU):
            assert draw() == theirs
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    later = draw()
    assert (later[0], later[2]) == (mine[0], mine[2])
    random.seed(1)
    random.random()
    assert later[1] == random.random()  # stood where rank 0 stood, so it goes on


# Free memory.


def test_memory_of_host_and_group_and_limits(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  90 kB\nMemAvailable:  50 kB\nHugePages: 0\n")
    nowhere = tmp_path / "none"
    assert room._free_on_host(tmp_path, nowhere) == 50 * 1024
    (tmp_path / "memory.max").write_text("9000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert room._free_on_host(tmp_path, tmp_path) == 7000
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 500\nfile_dirty 3\n")
    assert room._free_on_host(tmp_path, tmp_path) == 7500  # what was read once goes first
    (tmp_path / "memory.max").write_text("max\n")
    assert room._free_on_host(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory").mkdir()  # version 1
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("8000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("5000\n")
    assert room._free_on_host(tmp_path, tmp_path) == 3000
    assert room._free_on_host(nowhere, nowhere) == sys.maxsize
    monkeypatch.setattr("resource.getrlimit", lambda limit: (2**60, 2**60))
    assert 2**59 < room._free_in_limits() < 2**60
    monkeypatch.setattr("resource.getrlimit", lambda limit: (-1, -1))
    assert room._free_in_limits() == sys.maxsize


class Ranks(type(ALONE)):
    def __init__(self, *told):
        super().__init__()
        self.told = list(told)

    def exchange_objects(self, value):
        return self.told


@pytest.mark.parametrize(
    ("told", "fits"),
    [
        ([("a", 100, 100)], True),
        ([("a", 99, 100)], False),
        ([("a", 100, 99)], False),
        ([("a", 199, 100), ("a", 199, 100)], False),  # two ranks share a host
        ([("a", 200, 100), ("a", 200, 100)], True),
        ([("a", 100, 100), ("b", 100, 100)], True),
        ([("a", 100, 100), ("b", 50, 100)], False),
    ],
)
def test_every_rank_must_have_the_room(told, fits):
    assert room.fits_everywhere(100, CPU, Ranks(*told)) is fits
