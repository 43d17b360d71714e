"""Options of ZenFlow, and at which step it does what.

[Note: two worlds]
The important columns of each weight are stepped on the device, at every step. All other elements
collect their gradients on the host, and are stepped there once in a *window* of several steps, by
the mean. Which columns are important is chosen anew from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

SelectStrategy = Literal["auto", "step", "epoch"]

DEFAULT_AUTO_RATIO = 0.99
DEFAULT_RESERVED = 0.5


@dataclass(kw_only=True, frozen=True, slots=True)
class ZenFlowConfig:
    """Which elements are stepped on the device at every step, and when the others are.

    Raises:
        ValueError: A value is out of range, or has no effect with another.

    Source:
        ZenFlow (arXiv:2505.12242).
    """

    topk_ratio: float = 0.1
    """Share of the columns of each weight that are important, 0 to 1; a column is an input channel
    of a matrix. Parameters with one axis or none are always important."""

    select_strategy: SelectStrategy = "auto"
    """Unit of ``select_interval``: ``"step"`` or ``"epoch"``; ``"auto"`` counts epochs."""

    select_interval: int | Literal["auto"] = "auto"
    """How often important columns are chosen anew. ``"auto"`` is every epoch, or with
    ``select_strategy="step"`` every 16 updates of the rest."""

    update_interval: int | Literal["auto"] = 4
    """Optimizer steps in a window, after which the rest is stepped by the mean of its gradients.
    ``"auto"`` ends a window when the gradients that wait are as large as the important ones."""

    overlap_step: bool = False
    """Step the rest in a process of its own while training goes on. Its new values come at the end
    of the next window, so what the model computes with is one update old at most."""

    offload: bool = False
    """Keep the averages of important columns in host memory, too, between steps."""

    auto_ratio: float = DEFAULT_AUTO_RATIO
    """With ``update_interval="auto"``: share of the weights that must be due."""

    full_warm_up_rounds: int = 0
    """First optimizer steps in which everything is stepped, and nothing is chosen yet."""

    pt_reserved_cores_perc: float = DEFAULT_RESERVED
    """With ``overlap_step``: share of a rank's cores that the trainer keeps."""

    steps_per_epoch: int | None = None
    """Optimizer steps in an epoch, where no Trainer tells when one begins."""

    def __post_init__(self) -> None:
        _check_share("topk_ratio", self.topk_ratio)
        _check_share("auto_ratio", self.auto_ratio)
        _check_share("pt_reserved_cores_perc", self.pt_reserved_cores_perc)
        if self.select_strategy not in ("auto", "step", "epoch"):
            raise ValueError(
                f"select_strategy must be 'auto', 'step' or 'epoch', got {self.select_strategy!r}"
            )
        for name in ("select_interval", "update_interval"):
            if getattr(self, name) != "auto":
                _check_count(name, getattr(self, name), 1, " or 'auto'")
        _check_count("full_warm_up_rounds", self.full_warm_up_rounds, 0)
        if self.steps_per_epoch is not None:
            _check_count("steps_per_epoch", self.steps_per_epoch, 1, " or None")
        for name in ("overlap_step", "offload"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_effects()

    def _check_effects(self) -> None:
        if self.update_interval != "auto" and self.auto_ratio != DEFAULT_AUTO_RATIO:
            raise ValueError(
                f"auto_ratio={self.auto_ratio} has no effect with update_interval="
                f"{self.update_interval}: remove it, or say update_interval='auto'"
            )
        if not self.overlap_step and self.pt_reserved_cores_perc != DEFAULT_RESERVED:
            raise ValueError(
                f"pt_reserved_cores_perc={self.pt_reserved_cores_perc} has no effect without"
                " overlap_step, which steps in a process of its own: remove one, or add the other"
            )
        if self.overlap_step and self.topk_ratio == 1:
            raise ValueError(
                "overlap_step has no effect with topk_ratio=1, which leaves no matrix to the host"
            )
        if self.select_strategy == "step" and self.steps_per_epoch is not None:
            raise ValueError(
                f"steps_per_epoch={self.steps_per_epoch} has no effect with select_strategy='step'"
            )
        interval, window = self.select_interval, self.update_interval
        if (
            self.select_strategy == "step"
            and isinstance(interval, int)
            and isinstance(window, int)
            and interval < window
        ):
            raise ValueError(
                f"select_interval={interval} is shorter than update_interval={window}: the rest is"
                " stepped before columns are chosen anew, so no window could ever be filled. Choose"
                " columns less often, or update more often."
            )

    @property
    def is_behind(self) -> bool:
        """Whether something is stepped later than without ZenFlow."""
        return self.overlap_step or self.update_interval != 1

    @property
    def counts_epochs(self) -> bool:
        """Whether columns are chosen anew after epochs, not after steps."""
        return self.select_strategy != "step"

    @property
    def selects_every(self) -> int:
        """Steps or epochs after which columns are chosen anew."""
        if self.select_interval != "auto":
            return self.select_interval
        if self.counts_epochs:
            return 1
        return 16 * (self.update_interval if self.update_interval != "auto" else 4)

    def chosen(self, columns: int) -> int:
        """How many columns of a weight are important; at least one unless the ratio is 0."""
        return min(columns, max(1, int(self.topk_ratio * columns))) if self.topk_ratio else 0

    @classmethod
    def of(cls, value: ZenFlowConfig | Mapping[str, Any] | None) -> ZenFlowConfig | None:
        """As users say it.

        Raises:
            ValueError: It is something else, or has other fields.
        """
        if value is None or isinstance(value, ZenFlowConfig):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"zenflow must be a ZenFlowConfig, a dict of its fields or None, got {value!r}"
            )
        known = [field.name for field in fields(cls)]
        unknown = [key for key in value if key not in known]
        if unknown:
            raise ValueError(f"zenflow has no option {unknown[0]!r}; it has {known}")
        try:
            return cls(**value)
        except ValueError as error:
            raise ValueError(f"zenflow: {error}") from error


def check_epochs(config: ZenFlowConfig | None) -> None:
    """Refuse to count epochs where nobody tells when one begins.

    Raises:
        ValueError: Columns would be chosen once and never again.
    """
    if config is not None and config.counts_epochs and config.steps_per_epoch is None:
        raise ValueError(
            f"zenflow with select_strategy={config.select_strategy!r} chooses columns after epochs,"
            " and without a Trainer nobody tells when one begins: say steps_per_epoch=..., or"
            " select_strategy='step'"
        )


class Turn(NamedTuple):
    """What one optimizer step does beside stepping the important columns."""

    selects: bool
    """Columns are chosen anew; what has waited is stepped before."""

    updates: bool
    """The window ends: the rest is stepped."""

    is_warm_up: bool = False
    """All is stepped, and at once."""


class ZenFlowClock:
    """Counts the steps of one optimizer.

    Args:
        config: The options.
    """

    def __init__(self, config: ZenFlowConfig) -> None:
        self._config = config
        self.steps = 0
        """Steps taken."""
        self.window = 0
        """Steps that the rest has waited for."""
        self.since_selection = 0
        """Steps or epochs since columns were chosen; 0 before the first time, too."""
        self.has_selected = False

    def begin_epoch(self) -> None:
        """An epoch begins."""
        if self._config.counts_epochs and self._config.steps_per_epoch is None:
            self.since_selection += 1

    def turn(self) -> Turn:
        """What the next step does. A window that is ``"auto"`` ends when the caller finds so."""
        config = self._config
        if self.steps < config.full_warm_up_rounds:
            return Turn(selects=False, updates=True, is_warm_up=True)
        every = config.selects_every * (config.steps_per_epoch or 1)
        selects = not self.has_selected or self.since_selection >= every
        window = 0 if selects else self.window
        updates = config.update_interval != "auto" and window + 1 >= config.update_interval
        return Turn(selects, updates)

    def take(self, turn: Turn, updates: bool) -> None:
        """A step has been taken.

        Args:
            turn: What it did.
            updates: Whether the rest was stepped.
        """
        self.steps += 1
        if turn.selects:
            self.has_selected, self.since_selection, self.window = True, 0, 0
        if not self._config.counts_epochs or self._config.steps_per_epoch is not None:
            self.since_selection += 1
        self.window = 0 if updates else self.window + 1

    def state(self) -> list[int]:
        """All that it knows."""
        return [self.steps, self.window, self.since_selection, int(self.has_selected)]

    def restore(self, state: list[int]) -> None:
        """Go on from a state."""
        self.steps, self.window, self.since_selection = state[:3]
        self.has_selected = bool(state[3])


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:  # type: ignore[operator]  # it is a number
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")


def _check_count(name: str, value: object, least: int, else_: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}{else_}, got {value!r}")
