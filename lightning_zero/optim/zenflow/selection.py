"""Which columns are important: agreed over the ranks that share the states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_zero.comm import Collectives
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.optim.zenflow.columns import PieceColumns, columns_of, is_finite, top_columns
from lightning_zero.optim.zenflow.master import ZenFlowMaster
from lightning_zero.plan.zenflow import ZenFlowConfig


def agree_on_columns(
    parameters: Sequence[nn.Parameter],
    table: PieceTable,
    collectives: Collectives,
    config: ZenFlowConfig,
) -> dict[nn.Parameter, Tensor]:
    """Choose the important columns of weights; for all ranks to call.

    What travels is one fp64 for each column, not the gradients: a sum over the ranks.

    Args:
        parameters: Those that have a gradient in this step, the same on all ranks.
        table: This rank's pieces of them.
        collectives: Group of the ranks.
        config: Says how many.

    Returns:
        Indices of the columns of each weight that is a matrix on the host, int64, ascending.
    """
    weights = [p for p in parameters if columns(table, p) > 1]
    if not weights:
        return {}
    own = [_importance(table, parameter) for parameter in weights]
    sizes = [len(importance) for importance in own]
    total = torch.cat(own)
    collectives.agree(total)
    found = dict(zip(weights, torch.split(total, sizes), strict=True))
    return {
        parameter: top_columns(importance, config.chosen(len(importance)))
        for parameter, importance in found.items()
        if is_finite(importance)
    }


def columns(table: PieceTable, parameter: nn.Parameter) -> int:
    """How many columns of a parameter there are to choose from; 1 for none."""
    if not isinstance(table.master_of(parameter), ZenFlowMaster):
        return 1
    bucket, slot = table.place[parameter]
    return columns_of(bucket.layout.slots[slot])


def _importance(table: PieceTable, parameter: nn.Parameter) -> Tensor:
    piece = table.piece(parameter)
    if piece is None or not isinstance(piece.master, ZenFlowMaster):
        return torch.zeros(columns(table, parameter), dtype=torch.float64)
    place = PieceColumns(columns(table, parameter), piece.piece.param_offset, piece.piece.numel)
    begin = piece.piece.shard_offset
    grad = piece.master.grad_unscaled
    return place.importance(grad[begin : begin + piece.piece.numel])
