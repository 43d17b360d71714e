"""Options of what leaves the device: optimizer states, and at stage 3 parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from lightning_zero.plan.zenflow import ZenFlowConfig

OffloadDevice = Literal["cpu", "nvme"]

NVME_PATH_VARIABLE = "LIGHTNING_ZERO_NVME_PATH"
"""Environment variable with the folder for ``"nvme"``, for those who choose a strategy by name."""

DEFAULT_WORKER_SHARE = 0.8

MIN_BUFFER_COUNT = 2
"""With fewer buffers nothing could be read while something else is written."""


@dataclass(kw_only=True, frozen=True, slots=True)
class OffloadConfig:
    """Where states live that leave the device, and how much of them leaves.

    Raises:
        ValueError: A value is out of range, or has no effect with another.

    Source:
        ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857); ``ratio`` is Twin-Flow
        of ZeRO-Offload++, ``super_offload`` is SuperOffload (arXiv:2509.21271).
    """

    device: OffloadDevice = "cpu"
    """``"cpu"`` for host memory, ``"nvme"`` for files that are streamed through host memory."""

    ratio: float = 1.0
    """Optimizer only: share of the elements that is stepped on the host, above 0; the rest is
    stepped on the device at the same time. Whole buckets are one or the other."""

    nvme_path: str | Path | None = None
    """With ``"nvme"``: a folder on a fast local disk. Each run makes one of its own in it."""

    pin_memory: bool = True
    """Page-lock host memory that the device copies from and to. No effect on a CPU alone."""

    buffer_count: int = 4
    """With ``"nvme"``: buffers of the size of one bucket's states that are in memory at once."""

    super_offload: bool = False
    """Optimizer only, with ``"cpu"``, Adam or AdamW and stages 2 and 3: a worker process beside
    each rank steps buckets during backward, and takes back what turns out to be wrong."""

    cpuadam_cores_perc: float | None = None
    """With ``super_offload``: share of a rank's cores that its worker gets, above 0; None for 0.8.
    Both have one at least."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "nvme"):
            raise ValueError(
                f"states can be offloaded to 'cpu' or 'nvme', got {self.device!r}; None for not at"
                " all"
            )
        is_number = isinstance(self.ratio, (int, float)) and not isinstance(self.ratio, bool)
        if not is_number or not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio is the share of elements that is stepped on the host, above 0 and at most"
                f" 1, got {self.ratio!r}; to offload nothing, leave the option out"
            )
        if not isinstance(self.pin_memory, bool):
            raise ValueError(f"pin_memory must be True or False, got {self.pin_memory!r}")
        count = self.buffer_count
        if isinstance(count, bool) or not isinstance(count, int) or count < MIN_BUFFER_COUNT:
            raise ValueError(f"buffer_count must be at least {MIN_BUFFER_COUNT}, got {count!r}")
        if self.device == "cpu" and self.nvme_path is not None:
            raise ValueError(
                f"nvme_path={str(self.nvme_path)!r} has no effect where states are offloaded to"
                " 'cpu': remove it, or offload to 'nvme'"
            )
        self._check_super_offload()

    def _check_super_offload(self) -> None:
        if not isinstance(self.super_offload, bool):
            raise ValueError(f"super_offload must be True or False, got {self.super_offload!r}")
        if self.super_offload and self.device != "cpu":
            raise ValueError(
                f"super_offload steps in host memory, but device={self.device!r} keeps states in"
                " files: say device='cpu', or remove super_offload"
            )
        share = self.cpuadam_cores_perc
        if share is None:
            return
        if not self.super_offload:
            raise ValueError(
                f"cpuadam_cores_perc={share!r} has no effect without super_offload, which steps in"
                " a process of its own: remove it, or say super_offload=True"
            )
        is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
        if not is_number or not 0 < share <= 1:
            raise ValueError(
                f"cpuadam_cores_perc is the share of a rank's cores that its worker gets, above 0"
                f" and at most 1, got {share!r}"
            )

    @property
    def worker_share(self) -> float:
        """``cpuadam_cores_perc``, or what is usual."""
        given = self.cpuadam_cores_perc
        return DEFAULT_WORKER_SHARE if given is None else given

    @property
    def folder(self) -> Path:
        """``nvme_path`` as a path."""
        if self.nvme_path is None:
            raise AssertionError("nvme_path is checked when options are made")
        return Path(self.nvme_path)


Offloaded = str | OffloadConfig | Mapping[str, Any] | None
"""As users say it: a device, all options, or None for not at all."""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What leaves the device, as resolved from all options."""

    optimizer: OffloadConfig | None = None
    """Master weights, optimizer states and shard gradients."""

    parameters: OffloadConfig | None = None
    """Shards of the parameters."""

    zenflow: ZenFlowConfig | None = None
    """How the optimizer's steps are spread over the device and the host."""

    @property
    def steps_ahead(self) -> bool:
        """Whether the host steps during backward."""
        return self.optimizer is not None and self.optimizer.super_offload

    @classmethod
    def of(
        cls,
        optimizer: Offloaded,
        parameters: Offloaded,
        nvme_path: str | Path | None,
        usual_path: str | None = None,
        zenflow: ZenFlowConfig | Mapping[str, Any] | None = None,
    ) -> OffloadPlan:
        """Resolve options.

        Args:
            optimizer: ``offload_optimizer``.
            parameters: ``offload_parameters``. What the optimizer steps follows its parameters:
                the optimizer is offloaded, too, if nothing is said about it.
            nvme_path: For those of the two that have no folder of their own.
            usual_path: The same, if that says nothing; may be without effect.
            zenflow: Options of ZenFlow; None for without.

        Raises:
            ValueError: An option is wrong, or has no effect.
        """
        folder = usual_path if nvme_path is None else nvme_path
        of_optimizer = _config("offload_optimizer", optimizer, folder)
        of_parameters = _config("offload_parameters", parameters, folder)
        if of_parameters is not None and of_parameters.ratio != 1.0:
            raise ValueError(
                f"ratio={of_parameters.ratio} has no effect in offload_parameters, where all shards"
                " leave the device: it belongs to offload_optimizer"
            )
        if of_parameters is not None and of_parameters.super_offload:
            raise ValueError(
                "super_offload has no effect in offload_parameters: it is about how the optimizer"
                " steps, and belongs to offload_optimizer"
            )
        if of_parameters is not None and of_optimizer is None:
            of_optimizer = OffloadConfig(pin_memory=of_parameters.pin_memory)
        uses_files = any(
            c is not None and c.device == "nvme" for c in (of_optimizer, of_parameters)
        )
        if nvme_path is not None and not uses_files:
            raise ValueError(
                f"nvme_path={str(nvme_path)!r} has no effect: nothing is offloaded to 'nvme'. Say"
                " offload_optimizer='nvme' or offload_parameters='nvme', or remove it."
            )
        flow = ZenFlowConfig.of(zenflow)
        if flow is not None:
            _check_zenflow(of_optimizer, of_parameters)
        if of_optimizer is not None and of_optimizer.super_offload:
            _check_super_offload(of_parameters, flow)
        return cls(of_optimizer, of_parameters, flow)


def _check_zenflow(optimizer: OffloadConfig | None, parameters: OffloadConfig | None) -> None:
    if optimizer is None:
        raise ValueError(
            "zenflow takes the steps of the host off the critical path, but nothing is stepped"
            " there: say offload_optimizer='cpu', too, or remove zenflow"
        )
    for name, config in (("offload_optimizer", optimizer), ("offload_parameters", parameters)):
        if config is not None and config.device != "cpu":
            raise ValueError(
                f"zenflow needs states in host memory, but {name}={config.device!r} keeps them in"
                f" files: say {name}='cpu', or remove zenflow"
            )


def _check_super_offload(parameters: OffloadConfig | None, flow: ZenFlowConfig | None) -> None:
    if flow is not None:
        raise ValueError(
            "super_offload and zenflow are two ways to take the steps of the host off the critical"
            " path: choose one of them"
        )
    if parameters is not None and parameters.device != "cpu":
        raise ValueError(
            f"super_offload needs all states in host memory, but offload_parameters="
            f"{parameters.device!r} keeps parameters in files: say 'cpu', or remove super_offload"
        )


def _config(name: str, value: Offloaded, nvme_path: str | Path | None) -> OffloadConfig | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        known = [field.name for field in fields(OffloadConfig)]
        unknown = [key for key in value if key not in known]
        if unknown:
            raise ValueError(f"{name} has no option {unknown[0]!r}; it has {known}")
    elif not isinstance(value, (str, OffloadConfig)):
        raise ValueError(
            f"{name} must be 'cpu', 'nvme', None, an OffloadConfig or a dict of its fields, got"
            f" {value!r}"
        )
    try:
        if isinstance(value, str):
            config = OffloadConfig(device=value)  # type: ignore[arg-type]  # checked by the class
        else:
            config = value if isinstance(value, OffloadConfig) else OffloadConfig(**value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if config.device == "nvme" and config.nvme_path is None:
        if nvme_path is None:
            raise ValueError(
                f"{name}='nvme' needs to know where: say nvme_path='...', a folder on a fast local"
                f" disk that exists, or name it in the environment as {NVME_PATH_VARIABLE}"
            )
        config = replace(config, nvme_path=nvme_path)
    return config


def hosted(numels: Sequence[int], ratio: float) -> list[bool]:
    """Which buckets are stepped on the host, so that their share of elements is near a ratio.

    The last ones in model order: their gradients come first in backward, so their way to the host
    is hidden behind the rest of it.

    Args:
        numels: Elements of each bucket, in model order; the same on all ranks.
        ratio: Share of elements that is to be stepped on the host, above 0.

    Returns:
        For each bucket, whether the host steps it; at least one is.
    """
    wanted = ratio * sum(numels)
    chosen = [False] * len(numels)
    here = 0.0
    for place in reversed(range(len(numels))):
        with_it = here + numels[place]
        if abs(with_it - wanted) < abs(here - wanted):
            chosen[place], here = True, with_it
    if numels and not any(chosen):
        chosen[numels.index(min(numels))] = True
    return chosen
