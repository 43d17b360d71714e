"""Stage 3 on models of several kinds: the trace, what is fetched ahead, the bound on memory."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from lightning_zero import PrefetchOptions, ShardGroups, ZeroEngine, ZeroOptions
from lightning_zero.observe.recorder import Recorder
from lightning_zero.params.bucket import ParamStatus
from tests.helpers.models import TinyGPT, Tokens
from tests.helpers.spawn import run_ranks

STEPS = 4


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(*(Residual(8) for _ in range(4)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3))).square().mean()


class EncoderDecoder(nn.Module):
    """Attention, whose projections are read outside of their own modules, and a tied head."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(17, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        embedded = self.token(x)
        out = self.transformer(embedded, embedded.flip(1))
        return F.cross_entropy(F.linear(out, self.token.weight).flatten(0, 1), x.flatten())


class Shared(nn.Module):
    """Layers that run twice, a frozen one, integers among the parameters, a weight used by hand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.code = nn.Parameter(torch.arange(64, dtype=torch.uint8).view(8, 8), False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for layer in [*self.layers, *self.layers[:2]]:
            x = torch.tanh(layer(x)) + self.base(x)
        x = F.linear(x, self.layers[3].weight) * self.scale
        return (x @ self.code.float()).square().mean() * 1e-4


def gpt():
    return TinyGPT()


KINDS = {
    "gpt": (gpt, lambda rank, step: Tokens(rank, STEPS)[step]),
    "resnet": (ResNet, lambda rank, step: torch.randn(2, 3, 6, 6)),
    "encoder-decoder": (EncoderDecoder, lambda rank, step: torch.randint(17, (2, 5))),
    "shared": (Shared, lambda rank, step: torch.randn(3, 8)),
}


class Sampler(Recorder):
    """Looks at what is in memory at each event."""

    is_silent = False

    def __init__(self):
        self.engine, self.most_numel = None, 0

    def begin(self, kind, bucket=-1, numel=0):
        self.sample()

    def end(self, span):
        self.sample()

    def instant(self, kind, bucket=-1, numel=0):
        self.sample()

    def sample(self):
        if self.engine is None:
            return
        live = sum(
            bucket.flat.untyped_storage().nbytes() // bucket.flat.element_size()
            for bucket in self.engine.buckets
        )
        assert live <= self.engine.coordinator.residency.live_numel
        self.most_numel = max(self.most_numel, live)


def made(kind, groups, options, recorder=None):
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    recorder = recorder or Recorder()
    engine = ZeroEngine(model, [optimizer], options, groups, recorder=recorder)
    return model, optimizer, engine


def train(kind, groups, recorder=None, **options):
    """Losses, final weights, and what was seen after each step."""
    options = ZeroOptions(stage=3, **{"bucket_numel": 300, **options})
    model, optimizer, engine = made(kind, groups, options, recorder)
    if isinstance(recorder, Sampler):
        recorder.engine = engine
    passes = engine.coordinator.passes
    losses, seen = [], []
    for step in range(STEPS):
        torch.manual_seed(100 * step + groups.rank)
        loss = model(KINDS[kind][1](groups.rank, step))
        engine.backward(loss)
        engine.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
        seen.append((passes.report.fetched_on_demand, passes.report.fetched_on_access))
        at_rest = {bucket.status for bucket in engine.buckets if not bucket.is_resident}
        assert at_rest <= {ParamStatus.NOT_AVAILABLE}
    if isinstance(recorder, Sampler):
        recorder.engine = None  # to close is to have the whole model again
    counts, digest = dict(passes.tracers["training step"].counts), passes.digest()
    engine.close()
    weights = [p.detach().clone() for p in model.parameters()]
    return losses, weights, counts, digest, seen


def trace_of_each_kind():
    dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=20))
    found = {}
    for kind in KINDS:
        _, _, counts, digest, seen = train(kind, groups)
        found[kind] = counts, digest, seen
    return found


def test_each_kind_of_model_is_complete_from_the_second_step_on():
    first, second = run_ranks(trace_of_each_kind, 2)
    for kind in KINDS:
        counts, digest, seen = first[kind]
        assert counts == {"record": 1, "complete": STEPS - 1}, kind
        assert digest == second[kind][1], kind
        demanded, accessed = zip(*seen, strict=True)
        # The first bucket of a step has nothing that it could come behind; all others come ahead.
        assert [b - a for a, b in zip(demanded, demanded[1:], strict=False)] == [1] * (STEPS - 1)
        assert len(set(accessed)) == 1, kind
        assert demanded[0] > 1, kind


VARIANTS = {
    "far ahead": {"prefetch": {"prefetch_numel": 10**6}},
    "never ahead": {"prefetch": {"prefetch_numel": 0}},
    "not overlapped": {"overlap_comm": False},
    "kept": {"prefetch": {"reuse_distance_numel": 10**6}},
    "strict": {"prefetch": {"reuse_distance_numel": 0}},
    "persistent": {"prefetch": {"persistent_numel": 40}},
    "few persistent": {"prefetch": {"persistent_numel": 40, "persistent_total_numel": 50}},
    "collective": {"gather_by": "collective"},
    "one bucket": {"bucket_numel": 10**6},
}


def variants():
    dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=20))
    found = {}
    for kind in KINDS:
        losses, weights, *_ = train(kind, groups)
        for name, options in VARIANTS.items():
            got_losses, got, counts, _, _ = train(kind, groups, **options)
            same = all(torch.equal(a, b) for a, b in zip(got, weights, strict=True))
            found[kind, name] = got_losses == losses and same and counts.get("invalid", 0) == 0
    return found


def test_options_change_no_number():
    for found in run_ranks(variants, 2):
        assert len(found) == len(KINDS) * len(VARIANTS)
        assert all(found.values()), [name for name, is_same in found.items() if not is_same]


def bounded():
    dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=20))
    found = {}
    for kind in KINDS:
        losses, _, _, _, _ = train(kind, groups, bucket_numel=100)
        options = ZeroOptions(stage=3, bucket_numel=100)
        _, _, engine = made(kind, groups, options)
        sizes = sorted(bucket.layout.padded_numel for bucket in engine.buckets)
        engine.close()
        # Units of these models use up to three buckets at once (a frozen one, one of integers).
        bound = sum(sizes[-3:])
        sampler = Sampler()
        prefetch = PrefetchOptions(
            max_live_numel=bound, prefetch_numel=10**6, reuse_distance_numel=10**6
        )
        got, _, counts, _, _ = train(kind, groups, sampler, bucket_numel=100, prefetch=prefetch)
        found[kind] = got == losses, sampler.most_numel, bound, sum(sizes), counts
    return found


def test_live_elements_never_exceed_the_bound():
    for found in run_ranks(bounded, 2):
        for kind, (is_same, most, bound, total, counts) in found.items():
            assert is_same, kind
            assert bound < total, kind
            assert bound / 2 < most <= bound, kind  # and the bound is used
            assert counts == {"record": 1, "complete": STEPS - 1}, kind


def too_small():
    dist.init_process_group("gloo")
    groups = ShardGroups.create(timedelta(seconds=20))
    texts = []
    for bound in (100, 2000):
        options = ZeroOptions(stage=3, bucket_numel=300, prefetch={"max_live_numel": bound})
        try:
            _, _, engine = made("gpt", groups, options)
        except ValueError as error:
            texts.append(str(error))
            continue
        engine.close()
        texts.append("")
    # A unit that needs two buckets at once, where only one fits.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Both()))
    model[1][1].other = [model[0]]
    options = ZeroOptions(stage=3, bucket_numel=1, prefetch={"max_live_numel": 120})
    optimizer = SGD(model.parameters(), 0.1)
    engine = ZeroEngine(model, [optimizer], options, groups)
    try:
        model(torch.ones(2, 8))
    except RuntimeError as error:
        texts.append(str(error))
    engine.abandon()
    return texts


class Both(nn.Module):
    """Reads a weight of its own and one of another module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return x @ self.weight @ self.other[0].weight


@pytest.mark.parametrize("rank", [0, 1])
def test_bound_that_cannot_hold_is_an_error_that_says_by_how_much(rank, texts):
    small, enough, at_run_time = texts[rank]
    assert "max_live_numel=100 is less than the largest bucket" in small
    assert "elements more are needed" in small
    assert enough == ""
    # Buckets of 64 and of 72 elements, padded to 32 a rank; 120 leave 56 or 40.
    assert "more than max_live_numel=120 leaves" in at_run_time
    assert "in use by modules that are running" in at_run_time


@pytest.fixture(scope="module")
def texts():
    return run_ranks(too_small, 2)
