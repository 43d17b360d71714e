"""Every way to start ranks, and every way to name the strategy, ends with the weights of DDP."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, difference, equal, trainer, weights
from tests.helpers.programs import run
from tests.helpers.spawn import free_port, run_ranks

STEPS = 4

SCRIPT = """
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_zero import ZeroStrategy
from tests.helpers.models import Language, trainer, weights

torch.set_num_threads(1)


def main(folder, start_method, devices, *kinds):
    for kind in kinds:
        if kind == "ddp":
            strategy = DDPStrategy(start_method=start_method)
        else:
            strategy = ZeroStrategy(int(kind), start_method=start_method, timeout=60)
        module = Language(steps=4)
        user = trainer(strategy, int(devices))
        user.fit(module)
        if user.global_rank == 0 or start_method != "popen":
            kept = {"weights": weights(module), "step": user.global_step}
            torch.save(kept, Path(folder, f"{devices}-{kind}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def run_script(folder: Path, start_method: str, devices: int, *kinds: str, launch: Any = ()) -> Any:
    """Run a user's script in a fresh interpreter; the weights it ends with, by strategy."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launch, str(script), str(folder), start_method, str(devices)]
    run([*command, *kinds], folder / "log")
    return {kind: torch.load(folder / f"{devices}-{kind}.pt") for kind in kinds}


def assert_trained_alike(found: dict[str, Any], bound: float = 0.0) -> None:
    expected = found.pop("ddp")
    initial = weights(Language(steps=STEPS))
    assert difference(expected["weights"], initial) > 1e-3
    assert found
    for kind, got in found.items():
        assert got["step"] == expected["step"], kind
        assert difference(got["weights"], expected["weights"]) <= bound, kind
        if not bound:
            assert equal(got["weights"], expected["weights"]), kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launchers")


def test_popen(tmp_path):
    """A script that Lightning starts once more for every further rank."""
    found = run_script(tmp_path, "popen", 2, "ddp", "1", "3")
    assert found["ddp"]["step"] == STEPS
    assert_trained_alike(found)


def test_torchrun(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    found = run_script(tmp_path, "popen", 2, "ddp", "3", launch=launch)
    assert found["ddp"]["step"] == STEPS
    assert_trained_alike(found)


@functools.cache
def forked(folder: Path) -> dict[str, Any]:
    return run_script(folder, "fork", 2, "ddp", "3")


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_the_callers_model_is_trained(tmp_path, folder, start_method):
    """Ranks are children of the caller, whose own module receives the trained weights."""
    found = dict(forked(folder))
    if start_method != "fork":  # DDP's weights do not depend on how ranks start
        found.update(run_script(tmp_path, start_method, 2, "3"))
    assert_trained_alike(found)


@pytest.mark.parametrize("devices", [1, 3, 4])
def test_other_numbers_of_ranks_start(tmp_path, devices):
    """The order of the sum over ranks differs from DDP's; one rank has no sum."""
    found = run_script(tmp_path, "fork", devices, "ddp", "1", "3")
    assert_trained_alike(found, bound=0.0 if devices == 1 else 1e-6)


# Names and configurations.

STRATEGIES: dict[str, dict[str, Any]] = {
    "class_path": {
        "class_path": "lightning_zero.ZeroStrategy",
        "init_args": {
            "stage": 3,
            "overlap_comm": False,
            "bucket_numel": 3000,
            "reduce_dtype": "float32",
            "timeout": 45.5,
        },
    },
    "defaults": {"class_path": "lightning_zero.ZeroStrategy"},
    "tensor": {
        "class_path": "lightning_zero.ZeroStrategy",
        "init_args": {"stage": 1, "shard_by": "tensor", "master_weights": False},
    },
}
NAMES = ("zero_stage_1", "zero_stage_2", "zero_stage_3")
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "limit_val_batches": 0,
}


class Configured(Language):
    """What a configuration file can build."""

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__(steps=steps)


def command_line(*arguments: str) -> LightningCLI:
    return LightningCLI(
        Configured,
        args=["fit", *arguments],
        save_config_kwargs={"overwrite": True},
        seed_everything_default=False,
    )


def describe(user: pl.Trainer, module: Language, expected: Any) -> dict[str, Any]:
    strategy = user.strategy
    assert isinstance(strategy, ZeroStrategy)
    return {
        "options": strategy.options,
        "timeout_s": strategy._timeout.total_seconds(),
        "equal": equal(weights(module), expected),
    }


def all_configurations(folder: Path) -> dict[str, dict[str, Any]]:
    trainer(DDPStrategy(), 2).fit(module := Configured())
    expected = weights(module)
    found = {}
    common = {**QUIET, "devices": 2, "default_root_dir": str(folder)}
    files = {}
    for name, strategy in STRATEGIES.items():
        path = folder / f"{name}-{torch.distributed.get_rank()}.yaml"
        path.write_text(yaml.safe_dump({"trainer": {**common, "strategy": strategy}}))
        files[name] = path
    for name, path in files.items():
        cli = command_line("--config", str(path))
        found[name] = describe(cli.trainer, cli.model, expected)
        written = folder / "config.yaml"  # what LightningCLI keeps of a run can be run again
        again = folder / f"again-{torch.distributed.get_rank()}.yaml"
        again.write_text(written.read_text())
        torch.distributed.barrier()
        cli = command_line("--config", str(again))
        found[f"{name} again"] = describe(cli.trainer, cli.model, expected)
    flags = [f"--trainer.{key}={_flag(value)}" for key, value in common.items()]
    for name in NAMES:
        cli = command_line(*flags, "--trainer.strategy", name)
        found[f"cli {name}"] = describe(cli.trainer, cli.model, expected)
        user = trainer(name, 2)
        user.fit(module := Configured())
        found[name] = describe(user, module, expected)
    arguments = ["--trainer.strategy=ZeroStrategy", "--trainer.strategy.stage=2"]
    cli = command_line(*flags, *arguments, "--trainer.strategy.bucket_numel=3000")
    found["cli arguments"] = describe(cli.trainer, cli.model, expected)
    return found


def _flag(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def configured(folder: Path) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(all_configurations, 2, folder)


def test_lightning_cli_reads_class_path_and_init_args(folder):
    for found in configured(folder):
        for name in ("class_path", "class_path again"):
            got = found[name]
            assert got["equal"]
            assert got["options"].stage == 3
            assert got["options"].overlap_comm is False
            assert got["options"].bucket_numel == 3000
            assert got["options"].reduce_dtype == torch.float32
            assert got["timeout_s"] == 45.5
        for name in ("tensor", "tensor again"):
            got = found[name]
            assert got["equal"]
            assert got["options"].shard_by == "tensor"
            assert got["options"].master_weights is False
        for name in ("defaults", "defaults again"):
            assert found[name]["equal"]
            assert found[name]["options"] == ZeroStrategy().options
            assert found[name]["timeout_s"] == 1800


def test_registered_names(folder):
    for found in configured(folder):
        for stage, name in enumerate(NAMES, start=1):
            for how in (name, f"cli {name}"):
                assert found[how]["equal"]
                assert found[how]["options"].stage == stage


def test_lightning_cli_reads_arguments(folder):
    for found in configured(folder):
        got = found["cli arguments"]
        assert got["equal"]
        assert got["options"].stage == 2
        assert got["options"].bucket_numel == 3000


@pytest.mark.filterwarnings("ignore")  # LightningCLI's own, about our args and jsonargparse
def test_a_wrong_option_in_a_file_is_named(folder):
    path = folder / "wrong.yaml"
    wrong = {"class_path": "lightning_zero.ZeroStrategy", "init_args": {"stage": 7}}
    path.write_text(yaml.safe_dump({"trainer": {**QUIET, "devices": 1, "strategy": wrong}}))
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3, got 7"):
        command_line("--config", str(path))


def hydra_configurations() -> list[dict[str, Any]]:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    trainer(DDPStrategy(), 2).fit(module := Configured())
    expected = weights(module)
    found = []
    plain = {"stage": 3, "overlap_comm": False, "bucket_numel": 3000, "timeout": 45.5}
    target = {"_target_": "lightning_zero.ZeroStrategy", **plain}
    for strategy in (
        ZeroStrategy(**plain),
        instantiate(target),
        instantiate(OmegaConf.create(target)),
    ):
        user = trainer(strategy, 2)
        user.fit(module := Configured())
        found.append(describe(user, module, expected))
    return found


def test_plain_dicts_and_hydra():
    for found in run_ranks(hydra_configurations, 2):
        assert len(found) == 3
        for got in found:
            assert got["equal"]
            assert got["options"] == ZeroStrategy(3, overlap_comm=False, bucket_numel=3000).options
            assert got["timeout_s"] == 45.5
