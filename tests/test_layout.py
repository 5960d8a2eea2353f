"""Imports point one way, and heavy ones wait until they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashspec

PACKAGE = Path(flashspec.__file__).parent
LAYERS = [
    ["errors", "machine"],
    ["core"],
    ["tree"],
    ["sampling"],
    ["verify"],
    ["cache", "text"],
    ["prefixes", "grammar"],
    ["vocabulary", "heads"],
    ["drafters", "backends"],
    ["costs"],
    ["controller"],
    ["choice"],
    ["scheduler", "streams"],
    ["engine"],
    ["metrics", "planner", "weights"],
    ["vllm"],
    ["pretrained"],
    ["trained", "train"],
    ["loader"],
    ["doctor"],
    ["server", "report"],
    ["bench"],
    ["cli"],
]
SERVER = [
    ["protocol", "upstream"],
    ["gate", "tools"],
    ["worker", "exported"],
    ["answers", "replies"],
    ["service"],
    ["app"],
    ["run"],
    ["proxy"],
]


def levels(layers: list[list[str]]) -> dict[str, int]:
    return {name: level for level, names in enumerate(layers) for name in names}


LEVEL = levels(LAYERS)


def imported(file: Path, package: str = "flashspec") -> set[str]:
    """Names of a package's modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith(f"{package}.")]
        found |= {name.removeprefix(f"{package}.").split(".")[0] for name in names}
    return found


def test_imports_point_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        if relative.name == "__init__.py":
            continue
        own = relative.parts[0].removesuffix(".py")
        for name in imported(file):
            assert name == own or LEVEL[name] < LEVEL[own], f"{relative} imports flashspec.{name}, which is above it"


def test_imports_inside_the_server_point_one_way() -> None:
    level = levels(SERVER)
    for file in (PACKAGE / "server").glob("[!_]*.py"):
        for name in imported(file, "flashspec.server"):
            assert level[name] < level[file.stem], f"server/{file.name} imports {name}.py, which is not below it"


@pytest.mark.parametrize(
    "modules", ["flashspec, flashspec.cli", "flashspec.server.proxy, flashspec.server.run", "flashspec.vllm.launch"]
)
def test_core_command_line_help_and_the_proxy_need_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
