"""A small model for what users ask of partitioned parameters."""

from __future__ import annotations

import torch
from torch import nn


class Pair(nn.Module):
    """A frozen and two trained matrices, one bucket each."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False, dtype=dtype)
        self.frozen = nn.Linear(4, 4, bias=False, dtype=dtype).requires_grad_(False)
        self.last = nn.Linear(4, 2, bias=False, dtype=dtype)

    def forward(self, x):
        return self.last(self.frozen(self.first(x))).float().square().mean()


def make_pair(**options):
    torch.manual_seed(3)
    return Pair(**options)


def inputs(dtype=torch.float32):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(4)).to(dtype)


def listed(module, name):
    """A parameter, without reading it by its name in a module."""
    return dict(module.named_parameters())[name]


def in_place(parameter, value):
    with torch.no_grad():
        parameter.fill_(value)


def past_autograd(parameter, value):
    parameter.data.fill_(value)


def assigned(parameter, value):
    parameter.data = torch.full_like(parameter, value)
