"""The master of a bucket that is stepped ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.grads.bucket import GradientBucket
from lightning_zero.grads.homes import Arrivals, HostHome
from lightning_zero.memory.link import HostLink, Staging
from lightning_zero.optim.adam_options import adam_options
from lightning_zero.optim.bucket_steps import Group, State
from lightning_zero.optim.pieces import MasterPiece
from lightning_zero.optim.shared_master import SharedMaster
from lightning_zero.optim.superoffload.speculation import Assumed, Guess, HostSteps
from lightning_zero.optim.superoffload.states import SharedStates, is_complete
from lightning_zero.params.bucket import ParameterBucket
from lightning_zero.params.dense import stamp
from lightning_zero.plan.layout import Piece
from lightning_zero.worker import Ticket


class SuperMaster(SharedMaster, Arrivals):
    """A master in memory that a worker sees, see [Note: speculation] in ``__init__.py``.

    Args:
        parameters: Bucket of the parameters.
        gradients: The same bucket's gradients, in memory that the worker sees.
        home: Where those gradients are.
        link: The way between the device and the host.
        staging: Host memory for values on their way to the device.
        steps: The worker.
    """

    def __init__(
        self,
        parameters: ParameterBucket,
        gradients: GradientBucket,
        home: HostHome,
        link: HostLink,
        staging: Staging,
        steps: HostSteps,
    ) -> None:
        self._steps = steps
        super().__init__(parameters, gradients, home, link, staging, steps.zeros)
        self._states = SharedStates(self.tensor, self._copy, gradients, steps)
        self._copied_version = -1
        """Of the master, when the copy was last in line with it."""
        self._last: tuple[Optimizer, Sequence[Group]] | None = None
        """What was stepped last: the same is expected to be stepped next."""
        self._trusts = False
        """A step that had been made ahead would have been right the last time."""
        self._arrivals = self._expected_arrivals = 0
        """Backwards whose gradients are added up, and how many they were at the last step."""
        self._guess: Guess | None = None
        self._under_way: list[Ticket] = []
        home.arrivals = self

    # Before the step.

    def on_arrived(self) -> None:
        """See the base class: step ahead, if that seems to be right."""
        self._steps.errors.run(self._step_ahead)

    def before_change(self) -> None:
        """See the base class."""
        self.take_back()

    def _step_ahead(self) -> None:
        self._arrivals = self._arrivals + 1 if self.gradients.kept else 1
        is_last = self._steps.speculates and self._arrivals >= self._expected_arrivals
        if self._last is None or not is_last or not self.gradients.arrived:
            return
        optimizer, groups = self._last
        pieces = [piece for group in groups for piece in group.pieces]
        states = [_state(optimizer, piece) for piece in pieces]
        if not self._is_finite() or not all(is_complete(state) for state in states):
            return
        self._adopt(zip(pieces, states, strict=True))
        # Whatever was done to a copy of the gradient is lost with what has come since.
        assumed = self._assumed(optimizer, groups, is_shared=True)
        guess = Guess(assumed, self._states.versions())
        if self._trusts:
            self.settle()
            guess.tickets += self._states.step(guess.assumed, is_ahead=True)
        self._guess = guess

    def _is_finite(self) -> bool:
        """False if a gradient is known not to be; an accelerator is not waited for."""
        noted = [spread for spread in self.gradients.spreads() if spread is not None]
        return all(spread.device.type != "cpu" or bool(spread.isfinite()) for spread in noted)

    def take_back(self) -> None:
        """Be as if nothing had been stepped ahead; the worker reads the gradient no more.

        An error of the worker is kept until the next step.
        """
        guess, self._guess = self._guess, None
        if guess is None:
            return
        self._trusts = False
        if guess.tickets:
            self._steps.errors.run(lambda: self._undo_step(guess))
            self._steps.errors.run(self._wait)

    def bring_together(self) -> None:
        """See the base class.

        Raises:
            RuntimeError: The worker has failed, and what it has stepped cannot be taken back.
        """
        self.take_back()
        self._steps.errors.raise_kept()

    def refresh(self) -> None:
        """See the base class."""
        self.take_back()
        super().refresh()

    def follow_shard(self) -> None:
        """See the base class."""
        self.take_back()
        super().follow_shard()

    def scale_grad(self, piece: Piece, factor: Tensor) -> None:
        """See the base class. Most factors are 1, which leaves the gradient as it was assumed."""
        if float(factor) != 1.0:
            super().scale_grad(piece, factor)

    def room_for_state(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """See the base class."""
        return self._states.averages.get(key) if dtype == torch.float32 else None

    # The step.

    def begin_step(self, optimizer: Optimizer, groups: Sequence[Group]) -> None:
        """Have the step made, if it was not made ahead; :meth:`finish_step` waits for it.

        Args:
            optimizer: The user's optimizer, which names pieces now.
            groups: What is to be stepped.
        """
        pieces = [piece for group in groups for piece in group.pieces]
        for piece in pieces:
            if not optimizer.state[piece.tensor]:
                self.take_back()
                self._states.make(piece, optimizer.state[piece.tensor])
        self._adopt((piece, optimizer.state[piece.tensor]) for piece in pieces)
        is_shared = self.grad_unscaled is self.gradients.shard_grad
        wanted = self._assumed(optimizer, groups, is_shared)
        guess, self._guess = self._guess, None
        is_right = guess is not None and guess.assumed == wanted
        self._trusts = is_right or (self._last is None and wanted.is_plain)
        self._last = optimizer, groups
        self._expected_arrivals, self._arrivals = self._arrivals, 0
        if guess is not None and guess.tickets:
            if is_right:
                self._check_states(guess)
                self._under_way += guess.tickets
                self._steps.counts.confirmed += 1
                return
            self._undo_step(guess)
        self._steps.counts.made += 1
        if wanted.is_shared:
            self._under_way += self._states.step(wanted, is_ahead=False)
        else:
            self._wait()
            self._states.step_here(wanted, self.grad_unscaled)

    def finish_step(self, optimizer: Optimizer, groups: Sequence[Group]) -> None:
        """Wait for the step.

        Raises:
            RuntimeError: It has failed.
        """
        self._wait()
        has_copied = self._copied_version == self.tensor._version
        self._states.note_step()
        if has_copied:
            self._copied_version = self.tensor._version
        for group in groups:
            for piece in group.pieces:
                optimizer.state[piece.tensor]["step"] += 1

    def show(self) -> None:
        """Bring what was stepped to the parameters' shard; may be under way when this returns."""
        if self._copy is not None and self._copied_version != self.tensor._version:
            self._copy.copy_(self.tensor)  # somebody else has written to it
            self._copied_version = self.tensor._version
        self._send_all()

    # Parts of both.

    def _assumed(self, optimizer: Optimizer, groups: Sequence[Group], is_shared: bool) -> Assumed:
        pieces, steps, options = [], [], []
        for group in groups:
            of_group = optimizer.param_groups[group.number]
            for piece in group.pieces:
                factor = self.factors.get(piece.piece.slot)
                pieces.append(piece)
                steps.append(float(_state(optimizer, piece)["step"]) + 1)
                scale = 1.0 if factor is None else float(factor)
                options.append(adam_options(optimizer, of_group, scale))
        grad = self.gradients.shard_grad
        # Where faces show it, it may be written to past autograd, which counts versions.
        seen = int(stamp(grad)) if self.gradients.is_shown else None
        lists = tuple(pieces), tuple(steps), tuple(options)
        return Assumed(*lists, is_shared, grad._version, seen)

    def _adopt(self, pairs: Iterable[tuple[MasterPiece, State]]) -> None:
        """Take states to where the worker sees them, if somebody has put others in their place."""
        for piece, state in pairs:
            if not self._states.has(piece, state):
                self.take_back()
                self._states.adopt(piece, state)

    def _check_states(self, guess: Guess) -> None:
        if guess.state_versions != self._states.versions():
            names = ", ".join(slot.fqn for slot in self.parameters.layout.slots)
            raise RuntimeError(
                f"states of the optimizer were written to between backward and step (of some of"
                f" {names}), but SuperOffload has stepped them ahead. Write to them after the step,"
                " or in a hook of the optimizer's step (register_step_pre_hook)"
            )

    def _undo_step(self, guess: Guess) -> None:
        self._check_states(guess)
        self._under_way += [*guess.tickets, self._states.undo(guess.assumed)]
        self._steps.counts.undone += 1

    def _wait(self) -> None:
        """Until the worker does nothing for this bucket."""
        while self._under_way:
            self._under_way.pop(0).wait()


def _state(optimizer: Optimizer, piece: MasterPiece) -> State:
    """Within a step an optimizer names pieces, else parameters."""
    known: Mapping[Tensor, State] = optimizer.state
    return known.get(piece.tensor if piece.tensor in known else piece.parameter, {})
