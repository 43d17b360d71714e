"""Bytes of model states per rank, as the ZeRO papers count them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["cpu", "params"]
"""What leaves the device: the optimizer's states and gradients, or parameters, too."""


@dataclass(frozen=True, slots=True)
class ModelStateBytes:
    """Bytes of the three model states on one rank, on its device."""

    parameters_nbytes: int
    """Parameters used in forward and backward."""

    gradients_nbytes: int
    """Gradients."""

    optimizer_nbytes: int
    """fp32 master weights, where there are any, and optimizer moments."""

    host: ModelStateBytes | None = None
    """The same in host memory; None where nothing is offloaded."""

    @property
    def total_nbytes(self) -> int:
        """Sum of the three."""
        return self.parameters_nbytes + self.gradients_nbytes + self.optimizer_nbytes


def model_state_nbytes(
    numel: int,
    stage: int,
    world_size: int,
    mixed_precision: bool,
    offload: Offload | None = None,
) -> ModelStateBytes:
    """Bytes per rank of a model trained with Adam.

    With P = ``numel`` and N = ``world_size``: mixed precision 16P, 4P+12P/N, 2P+14P/N, 16P/N for
    stages 0 to 3; fp32 16P, 8P+8P/N, 4P+12P/N, 16P/N. What is offloaded is the share of one rank:
    14P/N in mixed precision, 16P/N in fp32, for the latter includes the host's own copy of the
    parameters; with parameters 16P/N in both, since no copy is needed where they are themselves.

    Args:
        numel: Trainable elements of the model.
        stage: 0, 1, 2 or 3.
        world_size: Ranks that share the states.
        mixed_precision: 16-bit parameters and gradients with fp32 master weights, instead of fp32.
        offload: What is in host memory: ``"cpu"`` for gradients and the optimizer's states,
            ``"params"`` for parameters, too; None for nothing.

    Returns:
        Bytes per rank, rounded up.

    Raises:
        ValueError: The stage is not 0 to 3, or cannot offload that.

    Source:
        ZeRO (arXiv:1910.02054), section 3.1 and figure 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    if offload is not None and stage < (3 if offload == "params" else 1):
        raise ValueError(f"stage {stage} cannot offload {offload!r}: what it would keep is whole")
    element_nbytes, optimizer_per_element_nbytes = (2, 12) if mixed_precision else (4, 8)

    def share(nbytes: int, is_sharded: bool) -> int:
        return -(-nbytes // world_size) if is_sharded else nbytes

    if offload is not None:
        is_home = offload == "params"
        copied_nbytes = 0 if mixed_precision or is_home else element_nbytes
        host = ModelStateBytes(
            parameters_nbytes=share(element_nbytes * numel, True) if is_home else 0,
            gradients_nbytes=share(element_nbytes * numel, True),
            optimizer_nbytes=share((optimizer_per_element_nbytes + copied_nbytes) * numel, True),
        )
        here = 0 if is_home else share(element_nbytes * numel, stage >= 3)
        return ModelStateBytes(here, 0, 0, host)
    return ModelStateBytes(
        parameters_nbytes=share(element_nbytes * numel, stage >= 3),
        gradients_nbytes=share(element_nbytes * numel, stage >= 2),
        optimizer_nbytes=share(optimizer_per_element_nbytes * numel, stage >= 1),
    )
