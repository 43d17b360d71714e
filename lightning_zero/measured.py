"""Bytes of model states that are alive on a rank, on the device and in host memory apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.memory.measure import ModelStateBytes, storage_nbytes
from lightning_zero.optim.pieces import PieceTable
from lightning_zero.params.bucket import ParameterBucket


def measure_states(
    parameters: Iterable[nn.Parameter],
    buckets: Sequence[ParameterBucket],
    table: PieceTable,
    optimizers: Sequence[Optimizer],
) -> ModelStateBytes:
    """Bytes of model states alive on this rank now, each storage counted once.

    What lies where is told by what it is for, so a CPU that is its own host is told apart, too.
    What lies in a file is in no memory and is not counted.

    Args:
        parameters: All of the model.
        buckets: Buckets of parameters.
        table: This rank's pieces.
        optimizers: The user's optimizers, whose states are of these pieces.

    Returns:
        Bytes on the device; ``host`` has those in host memory, if any states are kept there.
    """
    sides = _Side(), _Side()
    for bucket in buckets:
        if bucket.home is None or bucket.home.is_memory:
            sides[bucket.home is not None].parameters.append(bucket.shard)
    for master in table.masters:
        side = sides[master.is_on_host]
        grad = master.gradients.held_shard_grad()
        side.gradients += [] if grad is None else [grad]
        sides[False].optimizer += master.on_device()
        side.optimizer += [master.tensor] if master.is_apart and master.is_in_memory else []
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            owner = table.master_of(parameter) if isinstance(parameter, nn.Parameter) else None
            if owner is None or owner.is_in_memory:
                found = [value for value in state.values() if isinstance(value, Tensor)]
                sides[owner is not None and owner.is_on_host].optimizer += found
    device, host = sides
    device.parameters += [parameter.data for parameter in parameters]
    device.gradients += [p.grad for p in table.place if p.grad is not None]
    is_split = any(m.is_on_host for m in table.masters) or bool(host.parameters)
    of_host = host.measured(()) if is_split else None
    return device.measured(host.every(), of_host)


class _Side:
    """What lies on the device, or in host memory."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.optimizer: list[Tensor] = []

    def every(self) -> list[Tensor]:
        return [*self.parameters, *self.gradients, *self.optimizer]

    def measured(
        self, others: Sequence[Tensor], host: ModelStateBytes | None = None
    ) -> ModelStateBytes:
        """Bytes of this side, without what views of ``others`` show."""
        return ModelStateBytes(
            parameters_nbytes=storage_nbytes(self.parameters, others),
            gradients_nbytes=storage_nbytes(self.gradients, others),
            optimizer_nbytes=storage_nbytes(self.optimizer, others),
            host=host,
        )
