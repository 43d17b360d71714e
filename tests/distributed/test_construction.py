"""Models that are sharded while they are built: values, memory, and what goes wrong."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_zero import (
    ShardGroups,
    ZeroEngine,
    ZeroOptions,
    full_params,
    load_state_dict_streamed,
)
from lightning_zero.comm.collectives import NativeCollectives
from lightning_zero.params.bucket import is_placeholder
from lightning_zero.params.sliced import owner_of
from lightning_zero.partition import construction
from tests.helpers.builders import BUILDERS, GPT, batch_norm, gpt, unregistered
from tests.helpers.models import weights
from tests.helpers.peak import counted_peak
from tests.helpers.spawn import run_ranks

CPU = torch.device("cpu")


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draws():
    """What the generators give next."""
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def built(build, groups, bucket_numel=64):
    root = nn.Module()
    with construction(root, ZeroOptions(stage=3, bucket_numel=bucket_numel), groups, CPU):
        build(root)
    return root


def whole_weights(root):
    with full_params(root):
        return weights(root)


def difference(found, expected):
    """Names of what is not equal to the last bit, in dtype and in memory order."""
    return [
        name
        for name in {**found, **expected}
        if name not in found
        or name not in expected
        or not torch.equal(found[name], expected[name])
        or found[name].dtype != expected[name].dtype
        or found[name].stride() != expected[name].stride()
    ]


# Values.


def build_all(bucket_numel):
    """All builders on ranks of different seeds, against one rank alone with the seed of rank 0."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    found = {}
    for build in BUILDERS:
        seed(7)
        plain = nn.Module()
        build(plain)
        expected, expected_draws = weights(plain), draws()
        seed(7 + groups.rank)
        own_draws = draws()
        seed(7 + groups.rank)
        root = built(build, groups, bucket_numel)
        objects = dict(root.named_parameters())
        sizes = {name: p.shape for name, p in objects.items()} == {
            name: p.shape for name, p in plain.named_parameters()
        }
        whole = [
            name
            for name, p in objects.items()
            if p.is_floating_point() and p.numel() > 1 and not is_placeholder(p)
        ]
        values = whole_weights(root)
        found[build.__name__] = {
            "different": difference(values, expected),
            "true shapes": sizes,
            "whole": whole,
            "same objects": all(p is objects[name] for name, p in root.named_parameters()),
            "generators": draws() == (expected_draws if groups.rank == 0 else own_draws),
        }
        if build is unregistered:
            hidden, theirs = root.hidden[0].weight, plain.hidden[0].weight
            found["of no root"] = torch.equal(hidden, theirs) and type(hidden) is nn.Parameter
    return found


@pytest.mark.parametrize(("world_size", "bucket_numel"), [(2, 64), (4, 200)])
def test_values_are_those_of_one_rank_alone(world_size, bucket_numel):
    for found in run_ranks(build_all, world_size, bucket_numel):
        assert found.pop("of no root")
        for name, facts in found.items():
            stays = {"lazy": ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]}
            assert facts["whole"] == stays.get(name, []), name
            assert not facts["different"], (name, facts)
            assert facts["true shapes"], name
            assert facts["same objects"], name
            assert facts["generators"], name


def native_backend():
    """Collectives of the backend, as with NCCL; here gloo's own."""
    dist.init_process_group("gloo")
    native = NativeCollectives(dist.new_group())
    groups = ShardGroups(native, native, native)
    seed(7)
    root = built(gpt, groups)
    seed(7)
    plain = nn.Module()
    gpt(plain)
    return difference(whole_weights(root), weights(plain))


def test_collectives_of_the_backend():
    assert run_ranks(native_backend, 2) == [[], []]


def reads_after_it():
    """Between construction and engine, reads by name are whole, and what is written stays."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    seed(3)
    root = built(lambda root: setattr(root, "net", GPT()), groups)
    seed(3)
    plain = GPT()
    facts = {"read": torch.equal(root.net.blocks[1].up.weight, plain.blocks[1].up.weight)}
    with torch.no_grad():
        root.net.norm.weight.fill_(3.0)
        plain.norm.weight.fill_(3.0)
        root.net.blocks[0].up.bias.data.normal_(generator=torch.Generator().manual_seed(1))
        plain.blocks[0].up.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    root.to(torch.float64)  # as convert_module does
    plain.to(torch.float64)
    root.to(CPU)
    facts["dtype"] = {p.dtype for p in root.parameters()} == {torch.float64}
    before = groups.control.sent_nbytes
    names = list(root.state_dict())
    facts["names"] = names == [f"net.{name}" for name in plain.state_dict()]
    facts["nothing sent for names"] = groups.control.sent_nbytes == before
    with construction(root, ZeroOptions(stage=3), groups, CPU):  # as at the next fit
        pass
    found = {name.removeprefix("net."): value for name, value in whole_weights(root).items()}
    facts["equal"] = not difference(found, weights(plain))
    return facts


def replaced_after_it():
    """Batch norms are exchanged after construction, as ``sync_batchnorm=True`` does."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    seed(3)
    root = built(batch_norm, groups)
    seed(3)
    plain = nn.Module()
    batch_norm(plain)
    root = nn.SyncBatchNorm.convert_sync_batchnorm(root)
    engine = ZeroEngine(root, [], ZeroOptions(stage=3), groups)
    with engine.full_params():
        held = weights(root)
    engine.close()
    kind = type(root.net[1])
    return kind, difference(held, weights(plain)), difference(weights(root), weights(plain))


def test_modules_may_be_replaced_after_construction():
    for kind, held, after in run_ranks(replaced_after_it, 2):
        assert (kind, held, after) == (nn.SyncBatchNorm, [], [])


def test_reads_writes_and_conversions_after_construction():
    for facts in run_ranks(reads_after_it, 2):
        assert all(facts.values()), facts


# Memory.


def linears(root):
    root.net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])


def on_meta(root):
    with torch.device("meta"):
        linears(root)


def initialized(root):
    """A block's worth of constructors, and one more pass by ``apply``."""
    linears(root)
    root.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)


def headed(root):
    """An embedding and a head that are most of the model; each is a bucket."""
    root.net = nn.Sequential(nn.Embedding(2500, 64), nn.Linear(64, 64), nn.Linear(64, 2500))


def tied(root):
    """A head is made as large as the largest bucket, and thrown away."""
    headed(root)
    root.net[2].weight = root.net[0].weight


def peaks(bucket_numel):
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    built(linears, groups)  # what is only made once
    found = {}
    for build in (linears, on_meta, initialized, headed, tied):
        with counted_peak() as peak:
            root = built(build, groups, bucket_numel)
        numels = [p.numel() for p in root.parameters()]
        part = sum(numels) / groups.world_size
        thrown_away = max(numels) / groups.world_size if build is tied else 0
        with counted_peak() as later:
            options = ZeroOptions(stage=3, bucket_numel=bucket_numel)
            engine = ZeroEngine(root, [], options, groups)
        bucket = max(bucket.layout.padded_numel for bucket in engine.buckets)
        found[build.__name__] = (
            (peak.nbytes / 4 - part - thrown_away) / bucket,
            ((peak.end_nbytes + later.nbytes) / 4 - part) / bucket,
            (peak.end_nbytes / 4 - part) / bucket,
        )
        engine.close()
    return found


@pytest.mark.parametrize(("world_size", "bucket_numel"), [(2, None), (4, None), (4, 10_000)])
def test_peak_is_a_part_of_the_model_and_the_largest_bucket(world_size, bucket_numel):
    """Checksums and messages take up to 8192 elements, here an eighth of the smallest bucket."""
    for found in run_ranks(peaks, world_size, bucket_numel):
        for name, (building, laying, left) in found.items():
            assert building <= 1.125, (name, found)
            assert laying <= 1.125, (name, found)
            assert left <= 0.125, (name, found)


# Files.


def stream(folder):
    """Values and memory of a model that is loaded while it is built; one rank without the file."""
    dist.init_process_group("gloo")
    groups = ShardGroups.create()
    file = f"{folder}/weights.pt"
    facts = {}

    def loaded(root):
        linears(root)
        load_state_dict_streamed(root, file)

    def loaded_on_meta(root):
        on_meta(root)
        load_state_dict_streamed(root, file)

    built(linears, groups)
    for build in (loaded, loaded_on_meta):
        with counted_peak() as peak:
            root = built(build, groups, 100_000)
        part = sum(p.numel() for p in root.parameters()) / groups.world_size
        facts[build.__name__] = (peak.nbytes / 4 - part) / 65_792
        state = torch.load(file, weights_only=True)
        facts[f"{build.__name__} equal"] = not difference(whole_weights(root), state)
    before = groups.control.sent_nbytes
    load_state_dict_streamed(root, {name: 2 * value for name, value in state.items()})
    facts["without transfers"] = groups.control.sent_nbytes == before
    facts["at rest"] = torch.equal(whole_weights(root)["net.3.bias"], 2 * state["net.3.bias"])
    try:
        load_state_dict_streamed(root, file if groups.rank else f"{folder}/none.pt")
        facts["error"] = ""
    except (RuntimeError, OSError) as error:
        facts["error"] = str(error)
    return facts


def test_weights_stream_from_a_file(tmp_path):
    torch.manual_seed(4)
    root = nn.Module()
    linears(root)
    torch.save(root.state_dict(), tmp_path / "weights.pt")
    for rank, found in enumerate(run_ranks(stream, 2, str(tmp_path))):
        error = found.pop("error")
        assert re.search("on other ranks: {0: .*none.pt" if rank else "No such file.*none", error)
        # What torch.load maps is counted as well: the file, which is twice the part of two ranks.
        assert 12 <= found.pop("loaded") <= 13.125
        assert 12 <= found.pop("loaded_on_meta") <= 13.125
        assert all(found.values()), found


# What goes wrong.


def by_rank(root):
    root.first = nn.Linear(8, 8)
    root.second = nn.Linear(8, 8)
    nn.init.constant_(root.second.weight, float(dist.get_rank()))
    for _ in root.parameters():  # all ranks get the same mixture, which must not hide it
        pass


def own_generator(root):
    root.net = nn.Linear(30, 30)
    generator = torch.Generator().manual_seed(dist.get_rank())
    root.net.weight.data.normal_(generator=generator)


def one_rank_reads(root):
    root.net = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)])
    if dist.get_rank() == 0:
        root.net[0].weight.sum()


def other_modules(root):
    root.net = nn.Linear(9, 9 + dist.get_rank())


def fewer_modules(root):
    root.net = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4 - dist.get_rank())])


def kept_in_a_list(root):
    root.net = nn.Sequential(*[nn.Linear(20, 20) for _ in range(12)])
    for parameter in list(root.parameters()):
        nn.init.normal_(parameter)


def silently_lost(root):
    root.net = nn.Sequential(*[nn.Linear(20, 20) for _ in range(12)])
    kept = list(root.parameters())
    kept[0].data.zero_()  # torch lets zeros be written to a value that stands for many
    root.net[0].weight.sum()


def helpless_on_meta(root):
    with torch.device("meta"):
        root.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        root.body[1].extra = nn.Parameter(torch.zeros(3))
        root.scale = nn.Parameter(torch.zeros(3))


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.register_buffer("table", torch.zeros(5))

    def reset_parameters(self):
        nn.init.ones_(self.weight)


def forgetful_on_meta(root):
    with torch.device("meta"):
        root.part = Forgetful()


def users_mistake(root):
    root.net = nn.Linear(50, 50)
    raise KeyError("no such layer")


def refused(build):
    dist.init_process_group("gloo")
    root = nn.Module()
    groups = ShardGroups.create()
    try:
        with construction(root, ZeroOptions(stage=3, bucket_numel=64), groups, CPU):
            build(root)
    except Exception as error:
        watched = [type(m._parameters) for m in root.modules() if type(m._parameters) is not dict]
        assert not watched, watched
        assert owner_of(root) is None
        nn.Linear(3, 3).weight.sum()  # hooks are gone
        first = f"{type(error).__name__}: {error}"
        if build in (other_modules, fewer_modules):
            return first, ""
        try:
            ZeroEngine(root, [], ZeroOptions(stage=3), groups)
        except RuntimeError as later:
            return first, str(later)
        return first, ""
    return "", ""


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (by_rank, r"1 parameter\(s\) were not built from the same values.*second.weight"),
        (own_generator, r"1 parameter\(s\) were not built from the same values.*net.weight"),
        (one_rank_reads, r"rank 0: read parameter Linear.weight .*; rank 1: end of construction"),
        (other_modules, "1 parameter.s. were not built|could not gather|do different things"),
        (fewer_modules, "do different things|were not built from the same values"),
        (kept_in_a_list, "single memory location.*Read it from its module right before"),
        (silently_lost, r"parameter Linear.weight \(20, 20\) was written to while"),
        (
            helpless_on_meta,
            r"no reset_parameters.*root \(Module: scale\).*body.1 \(ReLU: extra",
        ),
        (
            forgetful_on_meta,
            r"reset_parameters\(\) of 'part' \(Forgetful\) gave no.*table",
        ),
        (users_mistake, "KeyError: 'no such layer'"),
    ],
)
def test_mistakes_are_errors_on_all_ranks(build, text):
    for first, later in run_ranks(refused, 2, build):
        assert re.search(text, first, re.DOTALL), first
        if build in (by_rank, own_generator, kept_in_a_list):
            assert "has no values" in later
