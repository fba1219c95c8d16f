"""Arrows between modules go one way."""

import ast
import graphlib
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("jaxspec", "pallas_kernels")

# A room imports only rooms of the lines below its own.
FLOORS = (
    ("trace",),
    ("measure", "serving"),
    ("console",),
    ("engine",),
    ("training",),
    ("proposers",),
    ("acceptance", "sampling", "checkpoint"),
    ("models",),
    ("layers",),
    ("cache", "text", "demo"),
    ("files",),
    ("errors", "short_repr"),
)
# The rooms of the engine, and the modules beside them, in the same way.
ENGINE_FLOORS = (
    ("engine",),
    ("text_generation",),
    ("calls",),
    ("event_stream", "setup"),
    ("schedule",),
    ("plan",),
    ("step",),
    ("programs",),
    ("requests",),
    ("stats", "adapt"),
)
HEIGHT = {room: -line for line, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(tree: ast.Module) -> set[str]:
    """Everything imported anywhere in the module, in functions too, as full names."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {own(f"{node.module}.{alias.name}") or node.module for alias in node.names}
    return names


def own(name: str) -> str | None:
    return name if name in MODULES else None


def room(module: str) -> str:
    """`jaxspec.engine.schedule.loop` is in `engine`; `jaxspec.errors`, `jaxspec` are their own."""
    return module.split(".")[:2][-1]


IMPORTS = {module: imported(tree) for module, tree in MODULES.items()}
COMMANDS = {
    module
    for module, tree in MODULES.items()
    if module.count(".") == 1
    and any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
}
ARROWS = [
    (module, target)
    for module, targets in IMPORTS.items()
    for target in sorted(targets)
    if target.startswith("jaxspec.")
]


def test_there_is_something_to_look_at():
    assert len(MODULES) > 20
    assert ("jaxspec.models.qwen3", "jaxspec.layers.decoder") in ARROWS


def test_no_cycles():
    graph = {module: targets & set(MODULES) for module, targets in IMPORTS.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_every_room_has_a_place():
    inside = {room(module) for module in MODULES if module.startswith("jaxspec.")}
    folders = {name for name in inside if (ROOT / "jaxspec" / name).is_dir()}
    assert folders <= set(HEIGHT)


def test_rooms_import_only_what_lies_below():
    assert [arrow for arrow in ARROWS if not points_down(*arrow)] == []


def points_down(module: str, target: str) -> bool:
    if room(module) not in HEIGHT:
        # The public API and the commands use every room, but no command.
        return target not in COMMANDS
    height = HEIGHT.get(room(target), 1)
    return room(module) == room(target) or height < HEIGHT[room(module)]


def test_the_engine_s_rooms_import_only_what_lies_below():
    height = {room: -line for line, rooms in enumerate(ENGINE_FLOORS) for room in rooms}
    inside = [
        (one.split(".")[2], other.split(".")[2])
        for one, other in ARROWS
        if one.startswith("jaxspec.engine.") and other.startswith("jaxspec.engine.")
    ]
    assert len(inside) > 50
    assert {room for arrow in inside for room in arrow} <= set(height)
    assert [(a, b) for a, b in inside if a != b and height[a] <= height[b]] == []


def test_kernels_know_nothing_of_jaxspec():
    assert {name for name in importers_of("jaxspec") if name.startswith("pallas_kernels")} == set()


def test_only_commands_parse_arguments():
    assert importers_of("argparse") <= COMMANDS | {"jaxspec.console.parser"}


@pytest.mark.parametrize("package", ["torch", "transformers", "tests", "oracles", "__future__"])
def test_never_imported(package):
    assert importers_of(package) == set()


@pytest.mark.parametrize("package", ["optax", "matplotlib", "tqdm"])
def test_what_an_extra_brings_is_for_training_measuring_and_commands_only(package):
    rooms = ("jaxspec.training", "jaxspec.measure", "jaxspec.trace", "jaxspec.console.progress")
    allowed = COMMANDS | {module for module in MODULES if module.startswith(rooms)}
    assert importers_of(package) <= allowed


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_what_serves_over_http_is_for_the_server_only(package):
    assert {room(module) for module in importers_of(package)} == {"serving"}


def importers_of(package: str) -> set[str]:
    return {
        module
        for module, targets in IMPORTS.items()
        if any(target.split(".")[0] == package for target in targets)
    }


def test_what_is_imported_is_declared():
    """Extras may bring more to the rooms and commands that ask for them by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = lambda requirement: re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    always = {name(one) for one in project["dependencies"]} | {"orbax"}
    of_an_extra = {"matplotlib", "prometheus_client", "optax", "starlette", "uvicorn"}
    known = always | of_an_extra | sys.stdlib_module_names | set(PACKAGES)
    found = {full.split(".")[0] for tree in MODULES.values() for full in imported(tree)}
    assert found <= known, sorted(found - known)
