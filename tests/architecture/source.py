"""The package's sources, parsed once, for the tests of this folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_zero"


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax tree of every file of the package, by path within it."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def nodes(file: str) -> list[ast.AST]:
    """All nodes of one file of the package."""
    return list(ast.walk(trees()[file]))


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names that are imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or "")
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute access; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def methods(kind: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in kind.body if isinstance(node, ast.FunctionDef)]


def decorators(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Last names of what decorates a class or a function."""
    called = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {dotted(decorator).split(".")[-1] for decorator in called}


def is_dataclass(kind: ast.ClassDef) -> bool:
    return "dataclass" in decorators(kind)
