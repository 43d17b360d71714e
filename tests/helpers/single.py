"""One rank in a bare loop, ours and plain torch's, for tests that compare the two."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from lightning_zero import ShardGroups, ZeroEngine, ZeroOptions

STAGES = (0, 1, 2, 3)
WIDTH, VOCAB = 8, 11

every_stage = pytest.mark.parametrize("stage", STAGES)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, a scalar, blocks, a head."""

    def __init__(self, tied=False, recompute=None, unused=False):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.token.weight
        if unused:
            self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.token(tokens) * self.scale
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def make_model(**options):
    torch.manual_seed(0)
    return Model(**options)


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (2, 5), generator=generator) for _ in range(count)]


def adamw(module):
    return AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(module):
    return SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def make_engine(module, optimizers, stage, **options):
    options = {"bucket_numel": 150, **options}
    return ZeroEngine(module, optimizers, ZeroOptions(stage=stage, **options), ShardGroups.create())


@contextmanager
def running(module, optimizers, stage, **options):
    """An engine that is closed at the end."""
    engine = make_engine(module, optimizers, stage, **options)
    yield engine
    engine.close()


def weights(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train_plain(module, optimizer, steps, clip=None):
    losses = []
    for batch in batches(steps):
        loss = module(batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_zero(engine, optimizer, steps, clip=None):
    losses = []
    for batch in batches(steps):
        loss = engine.module(batch)
        engine.backward(loss)
        if clip is not None:
            engine.clip_grad_norm_(optimizer, clip)
        engine.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
