"""FlashSpec: lossless speculative decoding for Transformers models."""

from typing import TYPE_CHECKING, Any

from flashspec.core import Chunk, Draft, Drafter, SamplingParams, Score, Sequence, SpecStats, Timings, Verdict
from flashspec.errors import FlashSpecError

if TYPE_CHECKING:
    from flashspec.engine import LocalEngine
    from flashspec.loader import load
    from flashspec.streams import Result

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "Draft",
    "Drafter",
    "FlashSpecError",
    "LocalEngine",
    "Result",
    "SamplingParams",
    "Score",
    "Sequence",
    "SpecStats",
    "Timings",
    "Verdict",
    "load",
]
_LAZY = {"load": "flashspec.loader", "LocalEngine": "flashspec.engine", "Result": "flashspec.streams"}


def __getattr__(name: str) -> Any:
    """torch takes seconds to import: only what needs it does."""
    if name not in _LAZY:
        raise AttributeError(f"module 'flashspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
