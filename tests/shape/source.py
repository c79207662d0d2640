# SPDX-License-Identifier: Apache-2.0
"""Figures that are read from the source: functions that only forward, modules per folder, import circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = {"kcoord": ROOT / "kcoord", "kcoord_protocol": ROOT / "protocol" / "kcoord_protocol"}
FOLDERS: Final = ("kcoord/server", "kcoord/coordinator")
HANDLERS: Final = "kcoord/server/api/handlers"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(folder: Path) -> Iterator[tuple[str, Function]]:
    """Yields the functions and methods of the modules below `folder`, with file and line."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def single_call(function: Function) -> ast.Call | None:
    """Returns the call if the body of the function is a single call, also if it is returned or awaited, otherwise None.

    The docstring does not count.
    """
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return None
    call = body[0].value
    if isinstance(call, ast.Await):
        call = call.value
    return call if isinstance(call, ast.Call) else None


def only_forwards(function: Function) -> bool:
    """Returns whether the body is a single call whose arguments are only parameters and attributes of self."""
    call = single_call(function)
    if call is None:
        return False
    own = function.args
    parameters = {argument.arg for argument in (*own.posonlyargs, *own.args, *own.kwonlyargs)}
    parameters |= {argument.arg for argument in (own.vararg, own.kwarg) if argument is not None}
    return all(
        _is_passed_on(argument, parameters) for argument in (*call.args, *(keyword.value for keyword in call.keywords))
    )


def _is_passed_on(argument: ast.expr, parameters: set[str]) -> bool:
    if isinstance(argument, ast.Starred):
        argument = argument.value
    if isinstance(argument, ast.Name):
        return argument.id in parameters
    while isinstance(argument, ast.Attribute):
        argument = argument.value
        if isinstance(argument, ast.Name):
            return argument.id == "self"
    return False


def modules_per_folder() -> dict[str, int]:
    """Returns the number of modules in each folder of the server and the coordinator.

    `__init__` modules and the folder of handlers do not count.
    """
    counts: dict[str, int] = {}
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            folder = str(path.parent.relative_to(ROOT))
            if path.name != "__init__.py" and folder != HANDLERS:
                counts[folder] = counts.get(folder, 0) + 1
    return counts


def import_circles() -> list[list[str]]:
    """Returns the circles of modules that import each other: at the top, in functions, or under TYPE_CHECKING."""
    return circles(_imports())


def _imports() -> dict[str, set[str]]:
    paths: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            paths[".".join((package, *(part for part in parts if part != "__init__")))] = path
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        targets = graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                origin = _origin(name, path, node)
                for alias in node.names:
                    submodule = f"{origin}.{alias.name}"
                    targets.add(submodule if submodule in paths else origin)
        targets &= paths.keys() - {name}
    return graph


def _origin(name: str, path: Path, node: ast.ImportFrom) -> str:
    """Returns the absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    base = parts[: len(parts) - node.level + (path.name == "__init__.py")]
    return ".".join([*base, *([node.module] if node.module else [])])


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one node, sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                components.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(components)
