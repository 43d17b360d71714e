"""Ways in which users build and initialize models; each puts its modules into a root.

The values that a builder gives depend on nothing but the state of the generators of random numbers.
"""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class Residual(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Custom initialization by ``apply`` and by names, tied head, buffer, bare parameter."""

    def __init__(self, width: int = 16, vocab: int = 40, depth: int = 3) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        self.position.data.normal_(std=0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(root: nn.Module) -> None:
    root.net = nn.Sequential(
        nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 33), nn.ReLU(), nn.Linear(33, 5, bias=False)
    )


def gpt(root: nn.Module) -> None:
    root.net = GPT()


def bare_linears(root: nn.Module) -> None:
    root.net = nn.Sequential(*[nn.Linear(23, 23) for _ in range(6)])


def module_list(root: nn.Module) -> None:
    root.blocks = nn.ModuleList(Residual(12) for _ in range(4))
    root.scale = nn.Parameter(torch.full((12,), 0.5))


def batch_norm(root: nn.Module) -> None:
    root.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 9, 3))
    root.net(torch.randn(4, 3, 9, 9))  # changes the running statistics
    root.net.to(memory_format=torch.channels_last)


def parametrized(root: nn.Module) -> None:
    root.first = parametrizations.weight_norm(nn.Linear(11, 13))
    root.second = parametrizations.spectral_norm(nn.Linear(13, 11))
    root.third = parametrizations.orthogonal(nn.Linear(9, 9))
    with torch.no_grad():
        root.first.weight = torch.randn(13, 11)


def frozen(root: nn.Module) -> None:
    root.body = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)).requires_grad_(False)
    root.head = nn.Linear(20, 3)
    root.body[1].bias.requires_grad = True


def xavier_loop(root: nn.Module) -> None:
    root.net = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)  # deep copies, bare parameters
    for parameter in root.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def recurrent(root: nn.Module) -> None:
    root.net = nn.LSTM(7, 11, num_layers=2, bidirectional=True)
    root.cell = nn.GRUCell(7, 5)
    nn.init.orthogonal_(root.net.weight_hh_l0)


def odd_parameters(root: nn.Module) -> None:
    root.many = nn.ParameterList([nn.Parameter(torch.randn(n, 3)) for n in range(6)])
    root.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(31)), "b": nn.Parameter(_odd(1))})
    root.scalar = nn.Parameter(torch.randn(()))
    root.empty_one = nn.Parameter(torch.randn(0, 4))
    root.one_one = nn.Parameter(torch.randn(1, 1))
    root.whole_numbers = nn.Parameter(torch.randint(9, (6, 7)), requires_grad=False)
    root.bits_one = nn.Parameter(torch.rand(50) > 0.5, requires_grad=False)
    root.tiny_one = nn.Parameter(torch.randn(8, 9).to(torch.float8_e4m3fn), requires_grad=False)
    root.short_one = nn.Parameter(torch.randn(5, 9).bfloat16())
    root.double_one = nn.Parameter(torch.randn(5, 9).double())
    root.transposed = nn.Parameter(torch.randn(6, 8).t())
    root.strided = nn.Parameter(torch.randn(6, 8)[:, ::2])


def _odd(numel: int) -> Tensor:
    return torch.randn(2 * numel + 1)[1:]


def converted(root: nn.Module) -> None:
    root.net = nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 15)).to(torch.bfloat16)
    root.other = nn.Linear(15, 15).double()
    root.net[1].float()


def cross_reads(root: nn.Module) -> None:
    root.layers = nn.ModuleList(nn.Linear(14, 14) for _ in range(5))
    a, b, c, d, e = root.layers
    with torch.no_grad():
        a.weight.copy_(b.weight)
        c.weight.mul_(d.weight.std() + e.bias.mean())
        root.joined = nn.Parameter(torch.cat([a.weight, b.weight, c.weight, d.weight, e.weight]))
        assert torch.equal(a.weight, b.weight)
        held = a.weight  # used after others have been
        view = b.bias.data
        root.later = nn.Linear(30, 30)
        e.weight.add_(1)
        held.add_(2)
        view.add_(3)


def replaced(root: nn.Module) -> None:
    root.net = nn.Sequential(nn.Linear(18, 18), nn.Linear(18, 10))
    root.net[1] = nn.Linear(18, 4)
    del root.net[0].bias
    root.net[0].bias = nn.Parameter(torch.randn(18))
    root.twin = copy.deepcopy(root.net)
    nn.init.normal_(root.twin[0].weight)


def loaded(root: nn.Module) -> None:
    source = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Linear(20, 16))
    source(torch.randn(5, 16))
    state = {name: value.clone() for name, value in source.state_dict().items()}
    root.copied = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Linear(20, 16))
    root.copied.load_state_dict(state)
    root.assigned = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Linear(20, 16))
    root.assigned.load_state_dict(state, assign=True)


def other_generators(root: nn.Module) -> None:
    root.net = nn.Linear(19, 19)
    with torch.no_grad():
        root.net.weight.mul_(random.random())
        root.net.bias.copy_(torch.from_numpy(np.random.rand(19)))


def lazy(root: nn.Module) -> None:
    root.net = nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.LazyLinear(6))
    root.net(torch.randn(2, 21))
    root.after = nn.Linear(12, 12)


def unregistered(root: nn.Module) -> None:
    """A module that the root only knows from a list stays whole."""
    root.net = nn.Linear(13, 13)
    root.hidden = [nn.Linear(13, 13)]
    nn.init.constant_(nn.Linear(40, 40).weight, 1.0)  # nobody keeps this one


BUILDERS = (
    mlp,
    gpt,
    bare_linears,
    module_list,
    batch_norm,
    parametrized,
    frozen,
    xavier_loop,
    recurrent,
    odd_parameters,
    converted,
    cross_reads,
    replaced,
    loaded,
    other_generators,
    lazy,
    unregistered,
)
