"""Which kind of heads a folder holds, told without torch: command lines ask this long before anything is loaded."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Literal

Folder = str | os.PathLike[str]

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


def kind_of(folder: Folder) -> Literal["medusa", "eagle3"] | None:
    """What kind of heads a local folder holds; None for anything else, whatever it is. It reads no weights."""
    config: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # an unreadable one is told by its files, and reading it says what is wrong
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        names, speculator = str(config.get("architectures")).lower(), config.get("speculators_model_type")
        has_draft = speculator is None and config.get("draft_vocab_size") is not None  # its other kinds have one too
        if speculator == "eagle3" or "eagle3" in names or has_draft:
            return "eagle3"
        if "medusa_num_heads" in config or config.get("model_type") == "medusa" or "medusa" in names:
            return "medusa"
    is_other = isinstance(config, dict) and bool(config)
    has_file = not is_other and any(os.path.isfile(os.path.join(folder, name)) for name in MEDUSA_FILES)
    return "medusa" if has_file else None
