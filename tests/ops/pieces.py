"""Pieces of an Adam step for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

BASE = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


@dataclass
class Pieces:
    """States of pieces with what a step reads and writes beside them."""

    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    grads: list[Tensor]
    copies: list[Tensor] = field(default_factory=list)
    undo: list[Tensor] = field(default_factory=list)

    def clone(self) -> Pieces:
        lists = {name: [t.clone() for t in tensors] for name, tensors in vars(self).items()}
        return replace(self, **lists)

    def step(self, function, count=1, **settings):
        steps = [float(count)] * len(self.masters)
        function(
            *(self.masters, self.exp_avgs, self.exp_avg_sqs, self.grads, steps),
            copies=self.copies,
            undo=self.undo,
            **(BASE | settings),
        )


def tail_of_memory(tensor: Tensor) -> Tensor:
    """A copy that begins one element behind an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].copy_(tensor)


def random_pieces(numels, grad_dtype, copy_dtype=None, has_undo=False, is_aligned=True) -> Pieces:
    """Pieces in the middle of training."""
    generator = torch.Generator().manual_seed(sum(numels))

    def made(dtype=torch.float32):
        values = [torch.randn(n, generator=generator).to(dtype) for n in numels]
        return values if is_aligned else [tail_of_memory(value) for value in values]

    masters, exp_avgs, exp_avg_sqs, grads = made(), made(), made(), made(grad_dtype)
    return Pieces(
        masters,
        [tensor.mul_(0.1) for tensor in exp_avgs],
        [tensor.square_().mul_(0.01) for tensor in exp_avg_sqs],
        grads,
        [torch.zeros_like(g, dtype=copy_dtype) for g in grads] if copy_dtype else [],
        [torch.zeros(3, n) for n in numels] if has_undo else [],
    )
