"""Rules about the tree that no linter knows."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
LIBS = sorted(path.parent for path in ROOT.glob("libs/*/pyproject.toml"))
DISTRIBUTIONS = [ROOT / "core", ROOT / "runtime", *LIBS, *PLUGINS]

#: The packages of core that plugins import from.
PUBLIC = {"dynamo_core", "dynamo_core.errors", "dynamo_core.kv", "dynamo_core.protocol"}
#: The libraries that plugins import from the top level only.
FLAT = {"dynamo_http", "dynamo_leases", "dynamo_redis", "dynamo_telemetry", "dynamo_text"}
#: A library may show its names lazily, as core does.
SHOWN_TO_LIBRARIES = PUBLIC | {"dynamo_core.lazy"}

#: Import names of distributions whose names differ.
IMPORT_NAMES = {
    "pyyaml": "yaml",
    "importlib-metadata": "importlib_metadata",
    "dynamo-core": "dynamo_core",
    "nats-py": "nats",
    "pyzmq": "zmq",
}


def manifest(distribution: Path) -> dict[str, Any]:
    return tomllib.loads((distribution / "pyproject.toml").read_text())


def sources(distribution: Path) -> list[Path]:
    return sorted((distribution / "src").rglob("*.py"))


@cache
def imports(path: Path, *, typing: bool = True) -> list[str]:
    """Return every module a file imports, also inside functions; without `typing` not those for type checkers alone."""
    found: list[str] = []
    tree = ast.parse(path.read_text())
    if not typing:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.append(node.module)
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("distribution", [*LIBS, *PLUGINS], ids=relative)
def test_the_folder_of_a_distribution_is_complete_and_could_leave(distribution: Path) -> None:
    for part in ("pyproject.toml", "README.md", "src", "tests"):
        assert (distribution / part).exists(), f"{relative(distribution)} has no {part}"
    module = next((distribution / "src").iterdir())
    assert (module / "py.typed").exists()
    assert list((distribution / "tests").glob("test_*.py")), "a distribution has tests of its own"


@pytest.mark.parametrize("lib", LIBS, ids=relative)
def test_a_library_is_named_after_its_folder(lib: Path) -> None:
    assert manifest(lib)["project"]["name"] == f"dynamo-{lib.name}"
    assert next((lib / "src").iterdir()).name == f"dynamo_{lib.name}"


@pytest.mark.parametrize("plugin", PLUGINS, ids=relative)
def test_a_plugins_four_names_agree(plugin: Path) -> None:
    project = manifest(plugin)["project"]
    module = next((plugin / "src").iterdir()).name

    assert re.fullmatch(r"dynamo-plugin-[a-z0-9-]+", project["name"])
    assert module == project["name"].replace("-", "_")
    for name, target in project["entry-points"]["dynamo"].items():
        assert target == module
        kind = name.split("-")[0]
        # The two kinds of parsers belong together.
        family = "parsers-" if kind.endswith("_parser") else f"{kind.replace('_', '-')}-"
        # A frontend that remembers brings the store that needs nothing else.
        families = ("frontend-", family) if kind == "response_store" else (family,)
        assert project["name"].removeprefix("dynamo-plugin-").startswith(families)


@pytest.mark.parametrize("plugin", PLUGINS, ids=relative)
def test_a_plugin_imports_only_public_packages_and_no_sibling(plugin: Path) -> None:
    own = next((plugin / "src").iterdir()).name
    for path in sources(plugin):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "dynamo_core":
                assert name in PUBLIC, f"{relative(path)} imports {name}"
            if parts[0] in FLAT:
                assert len(parts) == 1, f"{relative(path)} imports {name}: import from {parts[0]} itself"
            if parts[0].startswith("dynamo_plugin_"):
                assert parts[0] == own, f"{relative(path)} imports its sibling {name}"


# The kits hold plugins to what the framework itself does, and know it from inside; two libraries are halves of it.
@pytest.mark.parametrize("lib", [lib for lib in LIBS if lib.name not in {"http", "telemetry", "testing"}], ids=relative)
def test_a_library_imports_only_public_packages_of_core(lib: Path) -> None:
    for path in sources(lib):
        for name in imports(path):
            if name.split(".")[0] == "dynamo_core":
                assert name in SHOWN_TO_LIBRARIES, f"{relative(path)} imports {name}"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=relative)
def test_a_distribution_declares_its_imports(distribution: Path) -> None:
    project = manifest(distribution)["project"]
    requirements = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        requirements += extra
    declared = {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements}
    allowed = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}
    # These come with a declared dependency and are part of its interface.
    if "opentelemetry_api" in allowed:
        allowed.add("opentelemetry")
    if "pydantic" in allowed:
        allowed.add("pydantic_core")
    # Core's own dependencies reach its plugins through its contracts.
    if "dynamo_core" in allowed:
        allowed |= {"msgspec", "pydantic"}
    own = next((distribution / "src").iterdir()).name
    for path in sources(distribution):
        if "_template" in path.parts:
            continue
        # Core names the types of libraries that it does not need.
        for name in imports(path, typing=distribution.name != "core"):
            top = name.split(".")[0]
            known = top in allowed or top == own or top in sys.stdlib_module_names
            assert known, f"{relative(path)} imports {top}, which {relative(distribution)} does not declare"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=relative)
def test_no_unsafe_function_is_used(distribution: Path) -> None:
    for path in [*sources(distribution), *(distribution / "tests").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve"} & set(names), f"{relative(path)}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{relative(path)}:{node.lineno}"
            if isinstance(node, ast.Attribute) and node.attr in {"recv_pyobj", "unsafe_load", "full_load"}:
                pytest.fail(f"{relative(path)}:{node.lineno} uses {node.attr}")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=relative)
def test_every_task_has_an_owner(distribution: Path) -> None:
    for path in sources(distribution):
        if path.name == "tasks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_group = isinstance(node.func.value, ast.Name) and node.func.value.id == "group"
            if node.func.attr in {"create_task", "ensure_future"} and not of_group:
                pytest.fail(f"{relative(path)}:{node.lineno} makes a task that no TaskSet or task group owns")


def test_every_distribution_is_installed_checked_and_released_together() -> None:
    development = (ROOT / "requirements-dev.txt").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions = {manifest(distribution)["project"]["version"] for distribution in DISTRIBUTIONS}

    for distribution in DISTRIBUTIONS:
        assert re.search(rf"^-e \./{relative(distribution)}(\[|$)", development, re.M), relative(distribution)
        assert f"{relative(distribution)}/src" in settings["tool"]["mypy"]["mypy_path"]
    assert len(versions) == 1


def test_the_original_owners_module_name_is_left_alone() -> None:
    for distribution in DISTRIBUTIONS:
        for path in sources(distribution):
            assert all(name.split(".")[0] != "dynamo" for name in imports(path)), relative(path)


def test_no_file_names_a_path_of_a_machine_or_the_host_of_a_registry() -> None:
    # Spelt in pieces, so that this file does not name them either.
    words = ["/ro" + "ot/", "/wo" + "rk/", "index-" + "url", "files.python" + "hosted", "py" + "pi.org/simple"]
    for path in _texts():
        text = path.read_text(errors="replace")
        for word in words:
            assert word not in text, f"{relative(path)} names {word}"


def _texts() -> Iterator[Path]:
    for suffix in ("*.py", "*.md", "*.toml", "*.txt", "*.yaml", "*.yml", "*.json", "Makefile", "run"):
        for path in ROOT.rglob(suffix):
            parts = path.relative_to(ROOT).parts
            # Environments of real engines stand beside `.venv`.
            foreign = {".git", ".hypothesis", "node_modules"}.union(part for part in parts if part.startswith(".venv"))
            if path.is_file() and not foreign & set(parts):
                yield path
