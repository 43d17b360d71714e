"""The wheel: complete, and of use in an environment that has never seen the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("lightning_zero", "conf", "cuda", "pyproject.toml", "README.md", "LICENSE")
SHIPPED = {".py", ".yaml", ".md", ".cpp", ".cu", ".cuh", ".h", ".typed"}


def run(*command, **options):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy, so that no build folder is left in the repository."""
    copy, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--no-index", "--wheel-dir", target, copy)
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory):
    """Python of a new environment: the wheel installed, dependencies read from this one."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel)
    return python


def run_clean(python, *arguments, cwd):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    return run(python, *arguments, cwd=cwd, env=env)


def test_wheel_holds_the_whole_source_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for top, prefix in (
        ("lightning_zero", ""),
        ("conf", "lightning_zero/"),
        ("cuda", "lightning_zero/"),
    ):
        files = (path for path in (ROOT / top).rglob("*") if path.suffix in SHIPPED)
        expected |= {prefix + path.relative_to(ROOT).as_posix() for path in files}
    assert shipped == expected
    assert "lightning_zero/py.typed" in shipped
    assert "lightning_zero/conf/stage/3.yaml" in shipped
    sources = ("README.md", "adam_math.h", "bindings.cpp", "adam_device.cu", "launch.cuh")
    assert {f"lightning_zero/cuda/{name}" for name in sources} <= shipped


def test_wheel_states_its_license_and_requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Dist: torch<2.15,>=2.11" in text


def test_installed_package_imports_from_the_wheel_and_composes_its_configuration(
    clean_python, tmp_path
):
    code = (
        "import hydra\n"
        "from hydra import compose, initialize_config_module\n"
        "import lightning_zero, lightning_zero.__about__ as about\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "from lightning_zero.ops.sources import source_folder\n"
        "print(lightning_zero.__file__, source_folder(), about.__version__)\n"
        "assert 'zero_stage_3' in StrategyRegistry\n"
        "with initialize_config_module('lightning_zero.conf', version_base='1.3'):\n"
        "    cfg = compose('config', overrides=['overlap=off', 'model=tiny'])\n"
        "strategy = hydra.utils.instantiate(cfg.strategy)\n"
        "print(type(strategy).__name__, strategy.options.stage)"
    )
    *_, package, sources, _, kind, stage = run_clean(clean_python, "-c", code, cwd=tmp_path).split()
    assert Path(package).is_relative_to(clean_python.parents[1])
    assert Path(sources) == Path(package).parent / "cuda"
    assert (kind, stage) == ("ZeroStrategy", "3")


def test_shipped_configuration_extends_a_project_of_the_user(clean_python, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "hydra:\n  searchpath: [pkg://lightning_zero.conf]\n"
        "defaults:\n  - stage: '2'\n  - _self_\n"
        "strategy:\n  _target_: lightning_zero.ZeroStrategy\n"
    )
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='.', config_name='config')\n"
        "def main(cfg):\n    print(hydra.utils.instantiate(cfg.strategy).options.stage)\n"
        "main()\n"
    )
    assert run_clean(clean_python, "app.py", cwd=tmp_path).split()[-1] == "2"


def test_console_script_shows_its_help(clean_python, tmp_path):
    script = clean_python.parent / "lightning-zero"
    assert "usage: lightning-zero" in run_clean(script, "--help", cwd=tmp_path)
