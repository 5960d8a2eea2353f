"""Measure ways to draft against plain decoding, and against Transformers' own, interleaved in one run.

Every prompt goes through every method before the next prompt, in an order that rotates, so that a machine that
slows down slows all of them. Speedups are medians of ratios between runs on the same prompt.
"""

from flashspec.bench.run import BenchOptions, run_bench
from flashspec.bench.tune import run_tune

__all__ = ["BenchOptions", "run_bench", "run_tune"]
