"""Adam steps in plain PyTorch: what the native ops are held against, and what runs without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from lightning_zero.ops.dense import flat_memory


@torch.no_grad()
def adam_step_reference_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    grad_scale: float = 1.0,
    copies: Sequence[Tensor] = (),
    undo: Sequence[Tensor] = (),
) -> None:
    """Step by torch's fused optimizer, with a pass for each cast; arguments are of `adam_step_`."""
    for i, grad in enumerate(grads):
        states = [flat_memory(states[i]) for states in (masters, exp_avgs, exp_avg_sqs)]
        if undo:
            torch.stack(states, out=undo[i].detach())
        gradient = flat_memory(grad).float()
        if grad_scale != 1.0:
            gradient = gradient * grad_scale
        before = torch.tensor(steps[i] - 1, dtype=torch.float32, device=grad.device)
        master, exp_avg, exp_avg_sq = ([state] for state in states)
        (adamw if decoupled else adam)(
            *(master, [gradient], exp_avg, exp_avg_sq, [], [before]),
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )
        if copies:
            flat_memory(copies[i]).copy_(master[0])


@torch.no_grad()
def adam_step_undo_reference_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    undo: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
) -> None:
    """Put back what a step has recorded; see `adam_step_undo_`."""
    for i, record in enumerate(undo):
        for states, old in zip((masters, exp_avgs, exp_avg_sqs), record, strict=True):
            flat_memory(states[i]).copy_(old)
        if copies:
            flat_memory(copies[i]).copy_(record[0])
