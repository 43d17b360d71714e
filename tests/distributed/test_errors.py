"""Wrong use: one clear error on every rank, before training, and nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_zero import ZeroStrategy
from tests.helpers.limits import HANG_S
from tests.helpers.models import Language, difference, trainer, weights
from tests.helpers.programs import started
from tests.helpers.spawn import run_ranks

STAGES = (0, 1, 2, 3)
SECONDS = 10.0
"""Within which a wrong use is answered."""


# Wrong options, known to the constructor alone.


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", "two", None, True])
def test_stage_is_0_to_3(stage):
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3") as error:
        ZeroStrategy(stage=stage)
    assert repr(stage) in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0, "shard_by": "tensor"}, "no effect at stage 0"),
        ({"shard_by": "row"}, "'element' or 'tensor', got 'row'"),
        ({"bucket_numel": 0}, "positive number of elements, got 0"),
        ({"bucket_numel": 2.5}, "positive number of elements, got 2.5"),
        ({"overlap_comm": "yes"}, "overlap_comm must be True or False, got 'yes'"),
        ({"master_weights": 1}, "master_weights must be True or False, got 1"),
        ({"reduce_dtype": "int8"}, "reduce_dtype .* got 'int8'"),
        ({"reduce_dtype": torch.int64}, "reduce_dtype .* got torch.int64"),
        ({"timeout": -1}, "timeout .* got -1"),
        ({"start_method": "thread"}, "start_method .* got 'thread'"),
    ],
)
def test_options_are_checked_by_the_constructor(options, words):
    with pytest.raises(ValueError, match=words):
        ZeroStrategy(**options)


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="prefetch_bucket_size"):
        ZeroStrategy(prefetch_bucket_size=5)


# Wrong models and optimizers, known when training is set up.


class Lazy(Language):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(3)


class Complex(Language):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Scaling(torch.optim.SGD):
    """A user's own optimizer that looks at the norm of a whole tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + parameter.grad.norm()))


def foreign(module: nn.Module) -> torch.optim.Optimizer:
    stranger = nn.Parameter(torch.zeros(4, 5))
    return torch.optim.SGD([*module.parameters(), stranger], lr=0.1)


def muon(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2])


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "lbfgs": (lambda: Language(lambda m: torch.optim.LBFGS(m.parameters())), ("LBFGS", "ddp")),
    "adafactor": (
        lambda: Language(lambda m: torch.optim.Adafactor(m.parameters())),
        ("Adafactor", "shard_by='tensor'"),
    ),
    "muon": (lambda: Language(muon), ("Muon", "shard_by='tensor'")),
    "own_norm": (
        lambda: Language(lambda m: Scaling(m.parameters(), lr=0.1)),
        ("Scaling", "shard_by='tensor'"),
    ),
    "foreign": (lambda: Language(foreign), ("not in the model", "(4, 5)")),
    "lazy": (Lazy, ("late.weight", "lazy module")),
    "complex": (Complex, ("phase", "complex64")),
}


def wrong_setups() -> dict[str, dict[int, tuple[str, str, float, int]]]:
    """What every wrong set-up is answered with, and how many steps it took before."""
    found: dict[str, dict[int, tuple[str, str, float, int]]] = {}
    for name, (make, _) in WRONG.items():
        found[name] = {}
        for stage in STAGES:
            module, begin = make(), time.monotonic()
            try:
                trainer(ZeroStrategy(stage), 2).fit(module)
                answer = ("none", "")
            except Exception as error:
                answer = (type(error).__name__, str(error))
            found[name][stage] = (*answer, time.monotonic() - begin, len(module.losses))
    module = Language(steps=2)  # and after all that, the ranks can still train together
    trainer(ZeroStrategy(3), 2).fit(module)
    found["sound"] = {3: ("none", "", 0.0, len(module.losses))}
    return found


@functools.cache
def wrong_setups_once() -> list[dict[str, dict[int, tuple[str, str, float, int]]]]:
    return run_ranks(wrong_setups, 2)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_set_up_is_refused_on_every_rank(name):
    ranks = wrong_setups_once()
    assert ranks[0]["sound"] == ranks[1]["sound"] == {3: ("none", "", 0.0, 2)}
    for stage in STAGES:
        answers = [found[name][stage] for found in ranks]
        assert answers[0][:2] == answers[1][:2]
        kind, message, elapsed_s, steps = answers[0]
        if stage == 0 and name in ("adafactor", "muon", "own_norm"):
            assert kind == "none", message  # every rank steps whole tensors
            continue
        assert kind == "ValueError", (stage, kind, message)
        assert all(word in message for word in WRONG[name][1]), message
        assert message.count("\n") <= 1
        assert elapsed_s < SECONDS
        assert steps == 0


class Nesting(Language):
    """Trains another model with the Trainer, and so the strategy, that trains it."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            self.trainer.fit(Language(steps=2))


def one_strategy_twice() -> list[tuple[str, str, int]]:
    """What a second Trainer is answered, then what the first still does, then a nested fit."""
    answers = []
    for stage in (1, 3):
        strategy = ZeroStrategy(stage)
        first = trainer(strategy, 2)
        for use in (
            lambda module, strategy=strategy: trainer(strategy, 2).fit(module),
            first.fit,
            lambda module, stage=stage: trainer(ZeroStrategy(stage), 2).fit(module),
        ):
            module = Nesting(steps=4) if len(answers) % 3 == 2 else Language(steps=2)
            try:
                use(module)
                answers.append(("none", "", len(module.losses)))
            except Exception as error:
                answers.append((type(error).__name__, str(error), len(module.losses)))
    return answers


def test_a_strategy_has_one_trainer():
    for answers in run_ranks(one_strategy_twice, 2):
        for second, first, nested in (answers[:3], answers[3:]):
            assert second[0] == "MisconfigurationException"  # Lightning's own answer
            assert "strategy" in second[1]
            assert first == ("none", "", 2)
            assert nested[0] == "RuntimeError"
            assert "Give each Trainer a ZeroStrategy object of its own" in nested[1]


def more_devices_than_ranks(stage: int, devices: int) -> tuple[str, str, float]:
    begin_s = time.monotonic()
    with pytest.raises(Exception) as found:  # noqa: PT011  (the test looks at it)
        trainer(ZeroStrategy(stage), devices).fit(Language(steps=2))
    return type(found.value).__name__, str(found.value), time.monotonic() - begin_s


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("devices", [1, 3])
def test_devices_must_be_the_ranks_that_were_started(devices, stage):
    for kind, message, elapsed_s in run_ranks(more_devices_than_ranks, 2, stage, devices):
        assert kind == "ValueError"
        assert f"expects {devices} rank(s)" in message
        assert "WORLD_SIZE=2" in message
        assert elapsed_s < SECONDS


# Errors in the middle of training.


class Broken(Language):
    """Raises on one rank, in forward or in backward."""

    def __init__(self, where: str, rank: int | None) -> None:
        super().__init__(steps=4)
        self.where, self.rank = where, rank
        self.begin_s = time.monotonic()

    def is_broken(self, where: str) -> bool:
        is_here = self.rank is None or self.trainer.global_rank == self.rank
        return self.where == where and is_here and len(self.losses) == 2

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.begin_s = time.monotonic()
        if self.is_broken("forward"):
            raise ArithmeticError("this rank is broken in forward")
        is_broken_later = self.is_broken("backward")
        loss = super().training_step(batch, index)
        if is_broken_later:
            loss.register_hook(fail_in_backward)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "step" and self.trainer.global_rank == self.rank:
            raise ArithmeticError("this rank is broken in step")


def fail_in_backward(grad: torch.Tensor) -> None:
    raise ArithmeticError("this rank is broken in backward")


def one_rank_breaks(stage: int, where: str) -> tuple[str, str, float]:
    """How its fit ends, and how long after the begin of the last step."""
    module = Broken(where, 1)
    try:
        trainer(ZeroStrategy(stage, timeout=3), 2).fit(module)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - module.begin_s
    return "none", "", 0.0


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (0, "backward"),
        (1, "step"),
        (2, "backward"),
        (3, "forward"),
        (3, "backward"),
        (3, "step"),
    ],
)
def test_an_error_on_one_rank_ends_all(stage, where):
    """The timeout of 3 s bounds every wait; leaving a step may wait for what is under way."""
    healthy, broken = run_ranks(one_rank_breaks, 2, stage, where)
    assert broken[:2] == ("ArithmeticError", f"this rank is broken in {where}")
    assert healthy[0] != "none"
    assert broken[2] < 20, broken
    assert healthy[2] < 20, healthy


def breaks_and_fits_again(strategies: list[Any], where: str) -> list[dict[str, torch.Tensor]]:
    """Weights after an error: of a fresh fit, of one by the same Trainer, of the same module."""
    broken = Broken(where, None)
    user = trainer(strategies[0], 1)
    with pytest.raises(ArithmeticError):
        user.fit(broken)
    after_error = weights(broken)
    trainer(strategies[1], 1).fit(fresh := Language(steps=4))
    user.fit(same_trainer := Language(steps=4))
    broken.where = "nowhere"
    trainer(strategies[2], 1).fit(broken)
    return [after_error, *(weights(module) for module in (fresh, same_trainer, broken))]


def all_stages_break_and_fit_again() -> dict[tuple[int, str], list[float]]:
    found = {}
    for where in ("forward", "backward"):
        expected = breaks_and_fits_again([DDPStrategy() for _ in range(3)], where)
        for stage in STAGES:
            got = breaks_and_fits_again([ZeroStrategy(stage) for _ in range(3)], where)
            found[stage, where] = [difference(a, b) for a, b in zip(got, expected, strict=True)]
    return found


def test_one_process_trains_again_after_an_error():
    """With one rank, nobody is missing: the module is whole again, and all goes on as with DDP."""
    (found,) = run_ranks(all_stages_break_and_fit_again, 1)
    assert len(found) == 8
    for case, differences in found.items():
        assert differences == [0.0] * 4, (case, differences)


def all_ranks_break_then_fit_the_same_module() -> list[tuple[str, str]]:
    answers = []
    for stage in (2, 3):
        module = Broken("forward", None)
        with pytest.raises(ArithmeticError):
            trainer(ZeroStrategy(stage), 2).fit(module)
        module.where = "nowhere"
        try:
            trainer(ZeroStrategy(stage), 2).fit(module)
            finite = all(value.isfinite().all() for value in module.state_dict().values())
            answers.append(("none", f"finite: {finite}"))
        except Exception as error:
            answers.append((type(error).__name__, str(error)))
    return answers


def test_a_module_whose_weights_are_lost_is_refused():
    """Sharded weights cannot be gathered after an error: other ranks may be gone."""
    for stage_2, stage_3 in run_ranks(all_ranks_break_then_fit_the_same_module, 2):
        assert stage_2 == ("none", "finite: True")
        assert stage_3[0] == "RuntimeError"
        assert "has no values: training of this model ended with an error" in stage_3[1]


# Ctrl-C.

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, trainer

torch.set_num_threads(1)

class Endless(Language):
    def on_train_batch_end(self, *_):
        Path(sys.argv[2], f"{self.global_rank}.pid").write_text(str(os.getpid()))
        if sys.argv[3:] == [str(self.global_rank)] and Path(sys.argv[2], "go").exists():
            raise ArithmeticError("this rank is broken")

if __name__ == "__main__":
    strategy = ZeroStrategy(int(sys.argv[1]), timeout=10)
    trainer(strategy, 2).fit(Endless(steps=100_000))
"""


def script_ranks(process: Any, folder: Path) -> tuple[list[int], float]:
    """Process ids of a script and its ranks, once all of them train, and how long that took."""
    log, begin_s = folder / "log", time.monotonic()
    while len([path for path in folder.glob("*.pid") if path.read_text()]) < 2:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() - begin_s < HANG_S, log.read_text()[-3000:]
        time.sleep(0.05)
    start_s = time.monotonic() - begin_s
    children = psutil.Process(process.pid).children(recursive=True)
    pids = [process.pid, *(child.pid for child in children)]
    assert {int(path.read_text()) for path in folder.glob("*.pid")} <= set(pids)
    return pids, start_s


def wait_until_gone(process: Any, pids: list[int], folder: Path, limit_s: float) -> None:
    """The limit holds the waits for other ranks, and the ends of interpreters that started."""
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if _is_running(pid)]:
        process.poll()
        assert time.monotonic() < deadline, (left, (folder / "log").read_text()[-3000:])
        time.sleep(0.1)
    assert process.wait(5) != 0


@pytest.mark.parametrize("stage", [1, 3])
def test_ctrl_c_ends_all_ranks(stage, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(stage), str(tmp_path)]
    with started(command, tmp_path / "log") as process:
        pids, start_s = script_ranks(process, tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        wait_until_gone(process, pids, tmp_path, limit_s=15 + start_s)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_a_script(rank, tmp_path):
    """Rank 0 is the script that the user started, rank 1 its child."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "3", str(tmp_path), str(rank)]
    with started(command, tmp_path / "log") as process:
        pids, start_s = script_ranks(process, tmp_path)
        (tmp_path / "go").touch()
        wait_until_gone(process, pids, tmp_path, limit_s=20 + start_s)
    assert "this rank is broken" in (tmp_path / "log").read_text()


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
