"""The engine and its collectives without Lightning."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.comm.collectives import NativeCollectives, PairwiseCollectives
from tests.helpers.models import TinyGPT, Tokens, difference, equal, fused_adamw, weights
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)


def make_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyGPT()


def plain_loop(steps):
    """DistributedDataParallel, the reference."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = fused_adamw(model)
    data = Tokens(dist.get_rank(), steps)
    losses = []
    for step in range(steps):
        loss = wrapped(data[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights(model)


def engine_loop(stage, groups, steps, is_direct):
    """The loop of the engine's docstring; ``is_direct`` calls ``loss.backward()`` itself."""
    model = make_model()
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=stage, bucket_numel=3000), groups)
    data = Tokens(dist.get_rank(), steps)
    losses = []
    for step in range(steps):
        loss = model(data[step])
        if is_direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    engine.close()
    return losses, weights(model)


def bare_loops():
    dist.init_process_group("gloo")
    losses, trained = plain_loop(10)
    groups = ShardGroups.create()
    found = {}
    for stage in STAGES:
        for is_direct in (False, True):
            got_losses, got = engine_loop(stage, groups, 10, is_direct)
            found[stage, is_direct] = got_losses == losses and equal(got, trained)
    return found


def test_bare_loop_equals_ddp_bit_for_bit():
    for found in run_ranks(bare_loops, 2):
        assert all(found.values()), found


def accumulated(stage, groups, data, window):
    model = make_model()
    optimizer = fused_adamw(model)
    engine = ZeroEngine(model, [optimizer], ZeroOptions(stage=stage), groups)
    for step in range(0, len(data), window):
        for micro in range(window):
            with engine.no_sync():
                engine.backward(model(data[step + micro]) / window)
        engine.step(optimizer)  # what was not reduced yet is reduced here
        optimizer.zero_grad()
    engine.close()
    return weights(model)


def accumulation_oracle(world_size, steps, window):
    """One process: average every micro-batch over the ranks, then add, as stages 2 and 3 do."""
    model = make_model()
    optimizer = fused_adamw(model)
    data = [Tokens(rank, steps) for rank in range(world_size)]
    for step in range(0, steps, window):
        total: list[torch.Tensor] | None = None
        for micro in range(window):
            per_rank = []
            for rank in range(world_size):
                loss = model(data[rank][step + micro]) / window
                grads = torch.autograd.grad(loss, list(model.parameters()))
                per_rank.append([grad / world_size for grad in grads])
            mean = [sum(parts[1:], parts[0]) for parts in zip(*per_rank, strict=True)]
            total = mean if total is None else [a + b for a, b in zip(total, mean, strict=True)]
        for parameter, grad in zip(model.parameters(), total or [], strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def accumulations():
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    data = Tokens(dist.get_rank(), 8)
    return {stage: accumulated(stage, groups, data, 2) for stage in STAGES}


def test_accumulation_without_a_synchronised_backward():
    """Stages 2 and 3 equal their definition bit for bit; 0 and 1 add up before they average."""
    oracle = accumulation_oracle(2, 8, 2)
    for found in run_ranks(accumulations, 2):
        assert equal(found[2], oracle)
        assert equal(found[3], oracle)
        assert equal(found[0], found[1])
        assert difference(found[0], oracle) <= 1e-6


class Recomputed(nn.Module):
    """Reentrant checkpoints nest backwards; one layer is used in two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.shared, x, use_reentrant=True)
        x = checkpoint(lambda y: self.shared(self.last(y)).tanh(), x, use_reentrant=True)
        return x.square().mean()


def nested_backwards():
    """Late gradients: the shared layer gets a second gradient after its bucket has left."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    torch.manual_seed(0)
    start = Recomputed()
    batches = torch.randn(2, 4, 3, 6)  # rank, step
    plain = copy.deepcopy(start)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for rank in range(2):
            (plain(batches[rank][step]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for stage in STAGES:
        for is_direct in (False, True):
            model = copy.deepcopy(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            options = ZeroOptions(stage=stage, bucket_numel=1)
            engine = ZeroEngine(model, [optimizer], options, groups)
            for step in range(4):
                loss = model(batches[dist.get_rank()][step])
                loss.backward() if is_direct else engine.backward(loss)
                engine.step(optimizer)
                optimizer.zero_grad()
            engine.close()
            found[stage, is_direct] = difference(weights(model), weights(plain))
    return found


def test_nested_backwards_lose_no_gradient():
    for found in run_ranks(nested_backwards, 2):
        assert all(value <= 1e-6 for value in found.values()), found


def every_collective():
    """Each implementation of the interface on the same inputs; rank r holds r + 1 and its place."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard_numel = 8
    found = {}
    for kind in (PairwiseCollectives, NativeCollectives):
        comm = kind(dist.new_group())
        shard = torch.full((shard_numel,), rank + 1.0)
        flat = torch.zeros(world_size * shard_numel)
        flat[rank * shard_numel : (rank + 1) * shard_numel] = shard
        comm.all_gather(flat, shard, key=0).wait()
        summand = torch.arange(float(world_size * shard_numel)) * (rank + 1)
        out = torch.ones(shard_numel)
        scratch = torch.empty(comm.scratch_numel(summand.numel()))
        comm.reduce_scatter(summand, out, False, 1, scratch).wait()
        comm.reduce_scatter(summand, out, True, 1, scratch).wait()
        narrow = torch.zeros(shard_numel)
        comm.reduce_scatter(summand.bfloat16(), narrow, False, 2, scratch.bfloat16()).wait()
        total = summand.clone()
        comm.all_reduce(total).wait()
        values = torch.tensor([float(rank)], dtype=torch.float64)
        comm.agree(values)
        mixed = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.tensor(rank)]
        comm.broadcast(mixed)
        comm.advance()
        gathered = comm.gather(shard, key=3)
        found[kind.__name__] = {
            "all_gather": flat,
            "reduce_scatter": out,
            "narrow": narrow,
            "all_reduce": total,
            "agree": values.item(),
            "broadcast": [tensor.tolist() for tensor in mixed],
            "gather": gathered,
            "objects": comm.gather_objects(rank),
            "exchanged": comm.exchange_objects(rank),
            "sent_nbytes": comm.sent_nbytes,
        }
    return found


def test_collectives_of_every_backend_agree():
    for world_size in (2, 3):
        factor = world_size * (world_size + 1) / 2
        places = torch.arange(float(world_size * 8))
        for rank, found in enumerate(run_ranks(every_collective, world_size)):
            mine = places[rank * 8 : (rank + 1) * 8]
            for got in found.values():
                expected = torch.repeat_interleave(torch.arange(1.0, world_size + 1), 8)
                assert torch.equal(got["all_gather"], expected)
                assert torch.equal(got["reduce_scatter"], 2 * factor * mine)
                assert torch.allclose(got["narrow"], factor * mine, rtol=2e-2)
                assert torch.equal(got["all_reduce"], factor * places)
                assert got["agree"] == sum(range(world_size))
                assert got["broadcast"] == [[0.0] * 3, [[0, 0], [0, 0]], 0]
                assert got["exchanged"] == list(range(world_size))
                if rank == 0:
                    assert torch.equal(got["gather"], expected)
                    assert got["objects"] == list(range(world_size))
                else:
                    assert got["gather"] is None
                    assert got["objects"] is None
