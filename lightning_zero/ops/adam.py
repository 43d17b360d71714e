"""Adam and AdamW for many pieces in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.ops.adam_reference import adam_step_reference_, adam_step_undo_reference_
from lightning_zero.ops.dense import FLOATS, bump_versions, check_dtype, check_pieces
from lightning_zero.ops.libraries import is_native


@torch.no_grad()
def adam_step_(
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
    """Step many pieces by Adam: unscale, step, and write low-precision copies in one pass.

    The tensors of one piece are the same run of memory in each list: any shape, without gaps, with
    equally ordered axes (a list may also show them flat). What is computed is what torch's
    ``AdamW(fused=True)`` or ``Adam(fused=True)`` computes in fp32 on the host, in the same order.

    Args:
        masters: Weights, fp32; changed.
        exp_avgs: Averages of gradients, fp32; changed.
        exp_avg_sqs: Averages of squared gradients, fp32; changed.
        grads: Gradients, all fp32, bf16 or fp16; not changed.
        steps: Of each piece, the number of its steps, this one included: 1.0 at the first.
        lr: Learning rate.
        betas: How much of the averages is kept in a step, of gradients and of squares.
        eps: Added to the root of the squares.
        weight_decay: Decoupled, or as a penalty in the gradient.
        decoupled: True for AdamW, False for Adam.
        maximize: Step along the gradient instead of against it.
        grad_scale: What gradients are multiplied with in fp32 before anything else: the inverse of
            a loss scale, the coefficient of clipping, or both.
        copies: Take the new weights in their own dtype, fp32, bf16 or fp16, rounded to nearest
            even; empty for none.
        undo: Of each piece [3, numel], fp32; take the old weights, averages and averages of squares
            for `adam_step_undo_`; empty for none.

    Raises:
        ValueError: Lists do not fit each other; names the list, the piece and the remedy.

    Source:
        Adam (arXiv:1412.6980); AdamW (arXiv:1711.05101) algorithm 2.
    """
    _check(masters, exp_avgs, exp_avg_sqs, copies, undo)
    check_pieces({"masters": masters, "grads": grads})
    check_dtype("grads", grads, FLOATS)
    if len(steps) != len(masters):
        raise ValueError(f"there are {len(steps)} steps for {len(masters)} masters: one for each")
    if min(steps, default=1.0) < 1.0:
        raise ValueError(f"a step count is {min(steps)}: counts include this step, so begin at 1")
    if not masters:
        return
    if is_native(masters[0].device):
        torch.ops.lightning_zero.adam_step_(
            *(masters, exp_avgs, exp_avg_sqs, grads, steps),
            *(lr, *betas, eps, weight_decay, decoupled, maximize, grad_scale),
            *(copies, undo),
        )
        bump_versions(masters, exp_avgs, exp_avg_sqs, copies, undo)
        return
    adam_step_reference_(
        *(masters, exp_avgs, exp_avg_sqs, grads, steps),
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        grad_scale=grad_scale,
        copies=copies,
        undo=undo,
    )


@torch.no_grad()
def adam_step_undo_(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    undo: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
) -> None:
    """Put the states of pieces back to what they were before a step.

    Args:
        masters: As in `adam_step_`; changed.
        exp_avgs: Likewise.
        exp_avg_sqs: Likewise.
        undo: What `adam_step_` has written, [3, numel] a piece, fp32.
        copies: Take the old weights in their own dtype; empty for none.

    Raises:
        ValueError: Lists do not fit each other.
    """
    if len(undo) != len(masters):
        raise ValueError(f"there are {len(undo)} undo records for {len(masters)} masters")
    _check(masters, exp_avgs, exp_avg_sqs, copies, undo)
    if not masters:
        return
    if is_native(masters[0].device):
        torch.ops.lightning_zero.adam_step_undo_(masters, exp_avgs, exp_avg_sqs, undo, copies)
        bump_versions(masters, exp_avgs, exp_avg_sqs, copies)
        return
    adam_step_undo_reference_(masters, exp_avgs, exp_avg_sqs, undo, copies)


def _check(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    undo: Sequence[Tensor],
) -> None:
    """Refuse lists of states, copies and records that do not fit each other."""
    lists = {"masters": masters, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    for name, tensors in lists.items():
        check_dtype(name, tensors, (torch.float32,))
    check_dtype("copies", copies, FLOATS)
    check_dtype("undo", undo, (torch.float32,))
    check_pieces(lists | ({"copies": copies} if copies else {}))
    if not undo:
        return
    if len(undo) != len(masters):
        raise ValueError(f"there are {len(undo)} undo records for {len(masters)} masters")
    for i, (record, master) in enumerate(zip(undo, masters, strict=True)):
        wanted = (3, master.numel())
        if (
            tuple(record.shape) != wanted
            or not record.is_contiguous()
            or record.device != master.device
        ):
            raise ValueError(
                f"undo[{i}] has shape {tuple(record.shape)} on {record.device}: must be {wanted}, "
                f"contiguous, on {master.device}"
            )
