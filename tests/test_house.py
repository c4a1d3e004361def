"""The rules of the house that a reader cannot see at a glance: which way imports point, sizes, where names stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "mlx_voicechat"
FOLDERS = {"cli": f"{PACKAGE}.cli", "server": f"{PACKAGE}.server", "convert": f"{PACKAGE}.convert"}
MOST_ENTRIES, MOST_LINES, MOST_FUNCTION_LINES, MOST_COMMAND_LINES, MOST_PARAMETERS = 20, 450, 60, 90, 12
# What each wing may import of the package; itself besides.
ALLOWED = {
    "networks": {"config", "errors"},
    "weights": {"config", "errors", "text", "networks"},
    "sound": {"errors"},
}
# Top-level modules that stand below these, and may not import them.
BELOW = {
    "frame": {"model", "session", "voicechat"},
    "noise": {"model", "session", "voicechat"},
    "model": {"session", "voicechat"},
    "session": {"voicechat"},
}
LATE = {"starlette", "typer", "uvicorn", "huggingface_hub"}  # never at the top of a module of the package
STORED_NAME = re.compile(r"\b(stt_model|tts_model)\\?\.")
NAMES_STAND = {"mlx_voicechat/weights/layout.py", "convert/plans.py"}


def sources() -> dict[str, Path]:
    """Every module by its import name."""
    found = {}
    for folder in (PACKAGE, *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join((FOLDERS.get(parts[0], parts[0]), *parts[1:]))
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = sources()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def where(name: str) -> str:
    return MODULES[name].relative_to(ROOT).as_posix()


def imported(name: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """What a statement of module `name` imports, absolute; modules of ours down to the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        is_package = MODULES[name].name == "__init__.py"
        parts = name.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        yield whole if whole in MODULES else base


def imports(name: str) -> set[str]:
    """All imports of a module, those inside functions and those for types alone too."""
    nodes = (node for node in ast.walk(TREES[name]) if isinstance(node, ast.Import | ast.ImportFrom))
    return {target for node in nodes for target in imported(name, node)} - {name}


GRAPH = {name: {target for target in imports(name) if target in MODULES and target != PACKAGE} for name in MODULES}


def wing(name: str) -> str:
    """The first name below the package, "" for what is outside."""
    return name.split(".")[1] if name.startswith(f"{PACKAGE}.") else ""


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def is_command(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is what `cli/NAME.py` is for: its parameters are the command's options."""
    return name == f"{PACKAGE}.cli.{node.name}"


def test_the_package_is_small_enough_to_be_seen() -> None:
    entries = [path.name for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_no_import_is_circular() -> None:
    state: dict[str, int] = {}
    circles = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 1:
            circles.append(" -> ".join((*path[path.index(name) :], name)))
        if name in state:
            return
        state[name] = 1
        for target in sorted(GRAPH[name]):
            visit(target, (*path, name))
        state[name] = 2

    for name in MODULES:
        visit(name, ())
    assert circles == []


@pytest.mark.parametrize("name", ALLOWED)
def test_a_wing_knows_what_is_below_it_alone(name: str) -> None:
    wrong = [
        f"{source} imports {target}"
        for source, targets in GRAPH.items()
        for target in targets
        if wing(source) == name and wing(target) not in ALLOWED[name] | {name}
    ]
    assert wrong == []


def test_the_package_knows_neither_commands_nor_server_nor_conversion() -> None:
    outer = set(FOLDERS)
    wrong = [f"{s} imports {t}" for s, ts in GRAPH.items() for t in ts if wing(s) not in outer and wing(t) in outer]
    assert wrong == []


@pytest.mark.parametrize("name", BELOW)
def test_a_conversation_stands_on_the_model_and_not_the_other_way(name: str) -> None:
    assert {wing(target) for target in GRAPH.get(f"{PACKAGE}.{name}", set())} & BELOW[name] == set()


def test_heavy_libraries_are_imported_late() -> None:
    wrong = []
    for name, tree in TREES.items():
        if wing(name) in FOLDERS:
            continue
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                wrong += [f"{name}: {t}" for t in imported(name, node) if t.split(".")[0] in LATE]
    assert wrong == []


def test_ctypes_stays_out() -> None:
    assert [name for name in MODULES if "ctypes" in imports(name)] == []


def test_no_module_is_too_long() -> None:
    lengths = {where(name): len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    wrong = []
    for name, node in functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > (MOST_COMMAND_LINES if is_command(name, node) else MOST_FUNCTION_LINES):
            wrong.append(f"{where(name)} {node.name}: {lines} lines")
    assert wrong == []


def test_no_function_has_too_many_parameters() -> None:
    wrong = []
    for name, node in functions():
        count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        if count > MOST_PARAMETERS and not is_command(name, node):
            wrong.append(f"{where(name)} {node.name}: {count} parameters")
    assert wrong == []


def test_names_of_stored_tensors_stand_in_one_place() -> None:
    wrong = []
    for name, tree in TREES.items():
        if where(name) in NAMES_STAND:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and STORED_NAME.search(node.value):
                wrong.append(f"{where(name)}:{node.lineno}")
    assert wrong == []
