"""Imports point one way, and heavy ones wait until they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

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
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(file: Path) -> set[str]:
    """Names of the package's own modules that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flashspec."):
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("flashspec.")]
        found |= {name.split(".")[1] for name in names}
    return found


def test_imports_point_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        relative = file.relative_to(PACKAGE)
        if relative.name == "__init__.py":
            continue
        own = relative.parts[0].removesuffix(".py")
        for name in imported(file):
            assert name == own or LEVEL[name] < LEVEL[own], f"{relative} imports flashspec.{name}, which is above it"


def test_core_and_command_line_help_need_no_torch() -> None:
    code = "import sys, flashspec, flashspec.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
