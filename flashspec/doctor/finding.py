"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. ``remedy`` is empty unless something needs attention."""

    name: str
    status: Literal["ok", "attention", "skipped"]
    evidence: str
    remedy: str = ""


def judged(name: str, is_sound: bool, evidence: str, remedy: str) -> Finding:
    return Finding(name, "ok", evidence) if is_sound else Finding(name, "attention", evidence, remedy)
