"""Adam for a matrix whose columns have taken different numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.ops.dense import FLOATS, bump_versions, check_dtype, check_pieces
from lightning_zero.ops.libraries import is_native


@torch.no_grad()
def adam_columns_step_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    steps: Tensor,
    *,
    first_column: int = 0,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    grad_scale: float = 1.0,
    copy: Tensor | None = None,
) -> None:
    """Step a run of a matrix by Adam, each column with the bias corrections of its own steps.

    With equal steps it computes what :func:`.adam.adam_step_` computes, to the last bit.

    Args:
        master: 1-D fp32, a run of a matrix in order of its rows; changed.
        exp_avg: Averages of gradients, fp32; changed.
        exp_avg_sq: Averages of squared gradients, fp32; changed.
        grad: Gradient, fp32, bf16 or fp16.
        steps: [columns], how many steps each column has taken, this one included; on any device.
        first_column: Column of the first element.
        lr: Learning rate.
        betas: How much of the averages is kept in a step, of gradients and of squares.
        eps: Added to the root of the squares.
        weight_decay: Decoupled, or as a penalty in the gradient.
        decoupled: True for AdamW, False for Adam.
        maximize: Step along the gradient.
        grad_scale: What gradients are multiplied with before anything else.
        copy: Takes the new weights in its own dtype.

    Raises:
        ValueError: Tensors do not fit each other, or a count is below 1.

    Source:
        Adam (arXiv:1412.6980); AdamW (arXiv:1711.05101) algorithm 2.
    """
    states: dict[str, Sequence[Tensor]] = {
        "master": [master],
        "exp_avg": [exp_avg],
        "exp_avg_sq": [exp_avg_sq],
    }
    for name, tensors in states.items():
        check_dtype(name, tensors, (torch.float32,))
    check_dtype("grad", [grad], FLOATS)
    copies = [] if copy is None else [copy]
    check_pieces(states | {"grad": [grad]} | ({"copy": copies} if copies else {}))
    columns = steps.numel()
    if not columns or not 0 <= first_column < columns:
        raise ValueError(f"there is no column {first_column} in a matrix of {columns}")
    counts = steps.to("cpu", torch.float64)
    if bool(counts.min() < 1):
        raise ValueError(f"a step count is {counts.min()}: counts include this step")
    # In double and rounded once, as for a whole piece.
    sizes = (lr / (1.0 - torch.pow(betas[0], counts))).float().to(master.device)
    roots = (1.0 - torch.pow(betas[1], counts)).sqrt().float().to(master.device)
    if is_native(master.device):
        torch.ops.lightning_zero.adam_columns_step_(
            *(master, exp_avg, exp_avg_sq, grad, sizes, roots, first_column),
            *(lr, *betas, eps, weight_decay, decoupled, maximize, grad_scale, copies),
        )
        bump_versions([master], [exp_avg], [exp_avg_sq], copies)
        return
    at = (torch.arange(master.numel(), device=master.device) + first_column) % columns
    gradient = grad.float() * (-grad_scale if maximize else grad_scale)
    if weight_decay and decoupled:
        master.mul_(1.0 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient.add(master, alpha=weight_decay)
    exp_avg.lerp_(gradient, 1.0 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    denominator = (exp_avg_sq.sqrt() / roots[at]).add_(eps)
    master.sub_(sizes[at] * exp_avg / denominator)
    if copy is not None:
        copy.copy_(master)
