"""Who may import, call and name what. CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.architecture.source import classes, dotted, imports, methods, nodes, trees

FILES = sorted(trees())

# A file may import from its own level and from those below it; a level is one room.
LEVELS = [
    ("__init__.py",),
    ("averaging.py", "summary.py"),
    ("strategy.py", "fabric/"),
    ("checkpointing.py",),
    ("checks.py",),
    ("callbacks.py",),
    ("precision.py",),
    ("cli.py",),
    ("batches.py",),
    ("access.py",),
    ("scaling.py", "direct_loads.py"),
    ("formats.py",),
    ("self_check/",),
    ("shares.py",),
    ("engine.py",),
    ("trained.py",),
    ("held.py", "host_room.py", "measured.py", "trained_set.py", "whole.py"),
    ("partition.py",),
    ("checkpoint/",),
    ("config.py", "deepspeed_config.py"),
    ("prefetch/",),
    ("optim/",),
    ("worker/",),
    ("grads/",),
    ("params/",),
    ("memory/",),
    ("comm/",),
    ("ops/",),
    ("observe/",),
    ("plan/",),
    ("global_hooks.py",),
    ("_compat.py",),
    ("__about__.py",),
]
SAYS_LIGHTNING = {
    "__init__.py",
    "averaging.py",
    "summary.py",
    "strategy.py",
    "checkpointing.py",
    "fabric/strategy.py",
    "fabric/checkpointing.py",
    "fabric/precision.py",
    "fabric/steps.py",
    "checks.py",
    "precision.py",
    "callbacks.py",
    "checkpoint/files.py",  # a plugin for files
    "_compat.py",
}
COMPARES_STAGE = {"config.py", "deepspeed_config.py", "plan/memory.py"}
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}
STORAGE = "torch.distributed.checkpoint."
# Underscored attributes of others that are in wide use and have no public form.
ALLOWED_PRIVATE = {
    "_base",  # of a tensor
    "_version",
    "_parameters",  # of a module
    "_buffers",
}
FOREIGN_ROOTS = {"torch", "nn", "F", "dist", "pl", "lightning", "Variable", "Optimizer"}


def level(file: str) -> int:
    for number, members in enumerate(LEVELS):
        if any(file == m or (m.endswith("/") and file.startswith(m)) for m in members):
            return number
    raise AssertionError(f"{file} is in no room: add it to LEVELS where it belongs")


def file_of(name: str) -> str:
    """File of the package that an imported name comes from."""
    parts = name.split(".")[1:]
    while parts:
        for candidate in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if candidate in trees():
                return candidate
        parts = parts[:-1]
    return "__init__.py"


@pytest.mark.parametrize("file", FILES)
def test_imports_run_downwards(file):
    for name in imports(trees()[file]):
        assert not name.startswith("."), f"{file}: relative import {name}"
        if name.split(".")[0] == "lightning_zero":
            assert level(file_of(name)) >= level(file), f"{file} imports upwards: {name}"


def test_rooms_do_not_import_each_other_in_a_circle():
    """Within one level files may import each other, but not in a circle."""
    graph = {
        file: {
            file_of(name)
            for name in imports(trees()[file])
            if name.split(".")[0] == "lightning_zero" and file_of(name) != file
        }
        for file in FILES
    }
    done: set[str] = set()

    def visit(file, path):
        assert file not in path, f"circle: {' -> '.join([*path, file])}"
        if file not in done:
            for target in sorted(graph[file]):
                visit(target, [*path, file])
            done.add(file)

    for file in FILES:
        visit(file, [])


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("plan/")])
def test_plan_is_pure(file):
    for name in imports(trees()[file]):
        assert name.split(".")[0] != "torch", f"{file} imports {name}: plans are made of integers"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("comm/")])
def test_only_comm_calls_collectives(file):
    for name in imports(trees()[file]):
        is_storage = file.startswith("checkpoint/") and name.startswith(STORAGE)
        assert not name.startswith("torch.distributed") or is_storage, f"{file} imports {name}"
    for node in nodes(file):
        name = dotted(node)
        assert not name.startswith("torch.distributed."), f"{file}:{node.lineno} names {name}"


def test_only_one_file_names_the_collectives_of_torch():
    found = {
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and dotted(node.value) == "dist"
        and node.attr in COLLECTIVES - {"new_group"}
    }
    assert found == {"comm/collectives.py"}


@pytest.mark.parametrize("file", [file for file in FILES if file not in SAYS_LIGHTNING])
def test_only_the_lightning_files_import_lightning(file):
    for name in imports(trees()[file]):
        root = name.split(".")[0]
        assert root not in {"lightning", "pytorch_lightning", "lightning_utilities"}, name


@pytest.mark.parametrize("file", [file for file in FILES if file not in COMPARES_STAGE])
def test_stage_number_is_compared_in_few_places(file):
    for node in nodes(file):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                is_stage = dotted(side).split(".")[-1] == "stage"
                assert not is_stage, f"{file}:{node.lineno} compares the stage"


@pytest.mark.parametrize("file", [file for file in FILES if file != "_compat.py"])
def test_private_names_of_others_stand_in_compat(file):
    tree = trees()[file]
    own = _own_private_names()
    for name in imports(tree):
        parts = name.split(".")
        is_foreign = parts[0] not in {"lightning_zero", "__future__"}
        private = [part for part in parts if part.startswith("_")]
        assert not (is_foreign and private), f"{file} imports {name}"
    for node in nodes(file):
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr):
            continue
        owner = dotted(node.value)
        place = f"{file}:{node.lineno} uses {owner or '...'}.{node.attr}"
        assert owner.split(".")[0] not in FOREIGN_ROOTS, place
        is_own = node.attr in own or owner in {"self", "cls"} and node.attr in _inherited(file)
        assert is_own or node.attr in ALLOWED_PRIVATE, place


@pytest.mark.parametrize("file", [file for file in FILES if file != "_compat.py"])
def test_private_names_are_not_reached_by_strings(file):
    for node in nodes(file):
        if isinstance(node, ast.Call) and dotted(node.func) in {"getattr", "setattr", "hasattr"}:
            name = node.args[1]
            is_hidden = isinstance(name, ast.Constant) and _is_private(name.value)
            assert not is_hidden, f"{file}:{node.lineno} reaches {name.value!r} by a string"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def _own_private_names() -> set[str]:
    """Private names that the package itself defines or assigns on its own objects."""
    found = set()
    for tree in trees().values():
        for kind in classes(tree):
            found.update(method.name for method in methods(kind))
            found.update(
                node.attr
                for node in ast.walk(kind)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and dotted(node.value) in {"self", "cls"}
            )
            found.update(
                node.target.id
                for node in kind.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            )
        found.update(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return found


# What a class of ours inherits from Lightning and has to use; each is one more private name.
_INHERITED = {
    "strategy.py": {"_layer_sync"},
    "checkpointing.py": {"_timeout"},
    "fabric/strategy.py": {"_timeout"},
    "fabric/checkpointing.py": {"_timeout"},
    "precision.py": {"_wrap_closure", "_after_closure"},
}


def _inherited(file: str) -> set[str]:
    return _INHERITED.get(file, set())


@pytest.mark.parametrize("file", FILES)
def test_nothing_prints(file):
    for node in nodes(file):
        is_print = isinstance(node, ast.Call) and dotted(node.func) == "print"
        assert not is_print, f"{file}:{node.lineno} prints"
