"""One piece in two worlds: its important columns on the device, all of it on the host.

[Note: who has the last word]
Important columns are kept on the device alone. Their places on the host are not read, until
:meth:`Part.bring_down` has written the values there: before anyone looks at states, and before
other columns are chosen. What somebody else has written on the host after that is brought up again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.memory.link import HostLink
from lightning_zero.optim.adam_options import AVERAGES
from lightning_zero.optim.bucket_steps import State
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.optim.zenflow.columns import (
    AdamStates,
    ChosenColumns,
    PieceColumns,
    columns_of,
)
from lightning_zero.optim.zenflow.home import PickingHome
from lightning_zero.optim.zenflow.rest import RestStep, RestSteps
from lightning_zero.params.dense import flatten
from lightning_zero.worker.jobs import AdamOptions, accumulate

ENTRY = "zenflow"
"""Name of a parameter's entry in the optimizer's state that tells what torch's Adam does not."""
WAITING = "zenflow_waiting"
"""Name of the sum of gradients that wait for the end of the window."""
LATE = "zenflow_late"
"""Name of master weights that are newer than the parameters."""


class Noted(NamedTuple):
    """What the host's tensors were when they were last in line with the device's."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Noted:
        """As they are now."""
        return cls(tensors, tuple(tensor._version for tensor in tensors))

    def holds(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether they are the same, and nobody has written to them since."""
        are_same = all(a is b for a, b in zip(self.tensors, tensors, strict=True))
        return are_same and self.versions == tuple(tensor._version for tensor in tensors)


class Part:
    """A piece, see [Note: who has the last word].

    Args:
        piece: The piece; its master is in host memory.
        home: Where the bucket's gradients are.
        link: The way between the device and the host.
        steps: Who steps the rest.
        keeps_averages_on_host: Between steps the averages of important columns are in host memory.
    """

    def __init__(
        self,
        piece: MasterPiece,
        home: PickingHome,
        link: HostLink,
        steps: RestSteps,
        keeps_averages_on_host: bool,
    ) -> None:
        self.piece = piece
        self._home = home
        self._link = link
        self._steps = steps
        self._keeps_averages_on_host = keeps_averages_on_host
        columns = columns_of(piece.slot)
        self.place = PieceColumns(columns, piece.piece.param_offset, piece.piece.numel)
        self.is_matrix = columns > 1
        """Whether columns are chosen; else all of it is important."""
        self.counts = torch.zeros(columns, dtype=torch.int64)
        """Steps that each column has taken."""
        self.chosen: ChosenColumns | None = None
        self.waited = 0
        """Steps of which gradients wait."""
        self._waiting: Tensor | None = None
        self._spare: Tensor | None = None
        """Gradients of a window that is being stepped."""
        self._late: Tensor | None = None
        self._state: State | None = None
        self._packed: list[Tensor] = []
        self._noted: Noted | None = None

    # What the host has.

    @property
    def has_state(self) -> bool:
        """Whether it was stepped once."""
        return self._state is not None

    @property
    def has_rest(self) -> bool:
        """Whether some of it is stepped on the host."""
        return self.chosen is None or not self.chosen.is_all

    def _on_host(self) -> AdamStates:
        """Master, average and average of squares, 1-D each, views."""
        if self._state is None:
            raise AssertionError("a part without states has nothing on the host")
        stride = self.piece.slot.stride if self.piece.is_whole else (1,)
        values = self.piece.tensor, *self._averages()
        return AdamStates(*(flatten(value, stride) for value in values))

    def _averages(self) -> tuple[Tensor, ...]:
        if self._state is None:
            raise AssertionError("a part without states has no averages")
        return tuple(self._state[key] for key in AVERAGES)

    def make_state(self, state: State) -> None:
        """Make states for the first step, in host memory."""
        state["step"] = torch.tensor(0.0)
        for key in AVERAGES:
            flat = self._steps.zeros(self.piece.piece.numel, torch.float32)
            state[key] = flat.as_strided(self.piece.tensor.shape, self.piece.tensor.stride())
        self.adopt(state)

    def adopt(self, state: State, is_master_new: bool = False) -> None:
        """Take states from where the optimizer has them; nothing if they are known.

        Args:
            state: The optimizer's of this piece, not empty.
            is_master_new: Somebody has written to the master.
        """
        if self._state is not state:
            self._state = state
            self._packed, self._noted = [], None
            self._read_entry(state)
        for key in AVERAGES:
            state[key] = self._steps.owned(state[key])
        if not self.is_matrix and self.chosen is None:
            only = torch.zeros(1, dtype=torch.int64)
            self.chosen = ChosenColumns(self.place, only, self._link.device)
            self._home.choose(self.piece.piece, self.chosen)
        if is_master_new or not self._is_in_line():
            self._bring_up()

    def _is_in_line(self) -> bool:
        """Whether nobody has written to the averages on the host."""
        return self._noted is not None and self._noted.holds(self._averages())

    def _read_entry(self, state: State) -> None:
        step = int(state["step"])
        entry = state.pop(ENTRY, None)
        waiting, late = state.pop(WAITING, None), state.pop(LATE, None)
        self.chosen, self.waited, self._waiting = None, 0, None
        self.counts.fill_(step)
        if entry is None or entry["at"] != step or len(entry["counts"]) != len(self.counts):
            return  # of another strategy, or of an earlier step that another strategy has kept
        self.counts = torch.tensor(entry["counts"], dtype=torch.int64)
        if entry["chosen"] is not None:
            indices = torch.tensor(entry["chosen"], dtype=torch.int64)
            self.chosen = ChosenColumns(self.place, indices, self._link.device)
            self._home.choose(self.piece.piece, self.chosen)
        self.waited = entry["waited"]
        if waiting is not None and self.waited:
            stride = self.piece.slot.stride if self.piece.is_whole else (1,)
            self._waiting = self._steps.zeros(waiting.numel(), torch.float32)
            self._waiting.copy_(flatten(waiting, stride))
        if entry["is_late"] and late is not None:
            self._late = late
            with torch.no_grad():
                self.piece.tensor.copy_(late)

    def takes_late_values(self) -> bool:
        """Whether states that were adopted have brought late values; tells it once."""
        late, self._late = self._late, None
        return late is not None

    # Between the two.

    def choose(self, indices: Tensor) -> None:
        """Other columns are important from now on; int64, ascending."""
        self.bring_down()
        self.chosen = ChosenColumns(self.place, indices, self._link.device)
        self._home.choose(self.piece.piece, self.chosen)
        self._bring_up()

    def _bring_up(self) -> None:
        """Take the important columns from the host."""
        if self._state is None or self.chosen is None:
            return
        packed = [self.chosen.gather(flat) for flat in self._on_host()]
        self._packed = [
            value if self._keeps_averages_on_host and at else self._upwards(value)
            for at, value in enumerate(packed)
        ]
        self._noted = Noted.of(self._averages())

    def _upwards(self, value: Tensor) -> Tensor:
        device = self._link.device
        if value.device == device:
            return value
        there = torch.empty_like(value, device=device)
        self._link.to_device(value, there).wait()
        return there

    def _downwards(self, value: Tensor) -> Tensor:
        if value.device.type == "cpu":
            return value
        here = self._link.zeros(value.numel(), value.dtype)
        self._link.to_host(value, here).wait_on_host()
        return here

    def bring_down(self) -> None:
        """Write the important columns to their places on the host, and what is known of them."""
        if self._state is None:
            return
        if self._packed and self.chosen is not None and self._is_in_line():
            for flat, packed in zip(self._on_host(), self._packed, strict=True):
                self.chosen.scatter_(flat, self._downwards(packed))
            _bump(self._averages())
            self._noted = Noted.of(self._averages())
        self._state["step"] = torch.tensor(float(self.counts.max()))

    def tell(self, clock: list[int], is_late: bool) -> None:
        """Put what is known into the optimizer's state, to be saved.

        Args:
            clock: State of the optimizer's clock.
            is_late: The master is newer than the parameters.
        """
        self.bring_down()
        if self._state is None:
            return
        self._state[ENTRY] = {
            "at": int(self._state["step"]),
            "counts": self.counts.tolist(),
            "chosen": None if self.chosen is None else self.chosen.indices.tolist(),
            "waited": self.waited,
            "is_late": is_late,
            "clock": list(clock),
        }
        if self.waited and self._waiting is not None:
            tensor = self.piece.tensor
            self._state[WAITING] = self._waiting.as_strided(tensor.shape, tensor.stride())
        if is_late:
            self._state[LATE] = self.piece.tensor.detach()

    def untell(self) -> None:
        """Take it out again: the optimizer steps with what is its own."""
        if self._state is not None:
            for key in (ENTRY, WAITING, LATE):
                self._state.pop(key, None)

    def on_device(self) -> list[Tensor]:
        """Tensors that it holds beside those of the host."""
        return list(self._packed)

    # Steps.

    def flat_grad(self) -> Tensor:
        """Gradient of the piece 1-D on the host, not multiplied yet."""
        begin = self.piece.piece.shard_offset
        grad: Tensor = self.piece.master.grad_unscaled  # type: ignore[attr-defined]  # on the host
        return grad[begin : begin + self.piece.piece.numel]

    def step_important(self, options: AdamOptions) -> None:
        """Step the important columns on the device."""
        if self.chosen is None:
            return
        self.counts[self.chosen.indices] += 1
        grad = self._picked()
        if grad is None:
            grad = self._upwards(self.chosen.gather(self.flat_grad()))
        master, *averages = self._packed
        there = [self._upwards(average) for average in averages]
        self.chosen.step_(AdamStates(master, *there), grad, self.counts, options)
        for average, stepped in zip(averages, there, strict=True):
            if average is not stepped:
                average.copy_(stepped)

    def _picked(self) -> Tensor | None:
        """The important columns of the gradient, where they are on the device already."""
        master = self.piece.master
        if master.has_made_grad:  # type: ignore[attr-defined]  # it is on the host
            return None
        return self._home.picked(master.gradients, self.piece.piece.slot)

    def wait(self, factor: float) -> None:
        """Add the gradient to those that wait for the end of the window."""
        grad = self.flat_grad()
        if self._waiting is None:
            self._waiting = self._steps.zeros(grad.numel(), torch.float32)
        accumulate(self._waiting, grad, factor, is_first=not self.waited)
        self.waited += 1

    def step_rest(self, options: AdamOptions, copy: Tensor | None, has_waited: bool) -> None:
        """Step all on the host but the important columns, whose places there are not read.

        Args:
            options: Of the step.
            copy: 1-D, takes the new values in the dtype of the parameters.
            has_waited: By what waits, else by the gradient as it is.
        """
        grad = self._waiting if has_waited else self.flat_grad()
        if grad is None:
            raise AssertionError("nothing waits to be stepped")
        is_rest = torch.ones(len(self.counts), dtype=torch.bool)
        if self.chosen is not None:
            is_rest[self.chosen.indices] = False
        self.counts[is_rest] += 1
        first = self.place.first
        whole = self._on_host(), grad, self.counts, is_rest, first, options, copy
        self._steps.step(RestStep(*whole))
        if self._steps.is_late and has_waited:  # it is read while the next window begins
            self._waiting, self._spare = self._spare, self._waiting
        self.waited = 0
        if self._noted is not None:
            self._noted = Noted.of(self._averages())

    def sizes(self, factor: float) -> Tensor:
        """How large gradients are that wait, and those of important columns in this step.

        Args:
            factor: What the gradient of this step is still to be multiplied with.

        Returns:
            fp64 [4] on the CPU: squares of what waits, elements of it, squares of the important
            gradients, elements of them. Zeros where there is nothing of both kinds.
        """
        if self.chosen is None or self._waiting is None or self.chosen.is_all:
            return torch.zeros(4, dtype=torch.float64)
        waiting = self._waiting.double().square()
        important = self.chosen.gather(self.flat_grad()).double().square().sum() * factor**2
        rest = waiting.sum() - self.chosen.gather(waiting.float()).double().sum()
        numel = float(self.chosen.numel)
        counts = len(waiting) - numel, numel
        return torch.tensor(
            [float(rest), counts[0], float(important), counts[1]], dtype=torch.float64
        )

    def show(self, shard: Tensor) -> None:
        """Write the important columns into a shard of the parameters 1-D [S]."""
        if self.chosen is None or not self._packed:
            return
        begin = self.piece.piece.shard_offset
        flat = shard[begin : begin + self.piece.piece.numel]
        packed = self._packed[0].to(shard.dtype)
        packed = packed if shard.device == packed.device else self._downwards(packed)
        self.chosen.scatter_(flat, packed)


def _bump(tensors: tuple[Tensor, ...]) -> None:
    """They were written to by way of views of their memory."""
    torch.autograd.graph.increment_version(list(tensors))
