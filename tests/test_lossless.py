"""The promise on a real model: SmolLM2-135M's own tokens, greedy and seeded, for every drafter, alone and in a batch.

Compared with a plain loop of cacheless forwards of the same weights, and with Transformers' generate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ScriptedDrafter, plain_loop
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import flashspec
from flashspec.backends.hf import HFTarget
from flashspec.core import Draft, Drafter, SamplingParams
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.text import encode

PROMPTS = [
    [{"role": "user", "content": "Repeat after me: red green blue red green blue red"}],
    [{"role": "user", "content": "用中文说你好，然后解释为什么天空是蓝色的。"}],
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
]
GREEDY = SamplingParams(max_tokens=20)
SEEDED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11)


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> LocalEngine:
    return flashspec.load(smollm2_path, drafter="none", self_test=True)


@pytest.fixture(scope="module")
def prompts(engine: LocalEngine) -> list[list[int]]:
    return [encode(engine.tokenizer, prompt, vocab_size=engine.target.vocab_size) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(engine: LocalEngine, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The plain loops' tokens."""

    def logits(context: object) -> np.ndarray:
        return engine.target.plain_logits(context).numpy()  # type: ignore[attr-defined]

    eos = sorted(engine.target.eos_tokens)
    return {
        name: [plain_loop(logits, prompt, params, eos=eos) for prompt in prompts]
        for name, params in (("greedy", GREEDY), ("seeded", SEEDED))
    }


def drafters(engine: LocalEngine) -> dict[str, Drafter | None]:
    target = engine.target
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=target.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=512)  # fmt: skip
    stranger = HFTarget(LlamaForCausalLM(config).eval())
    itself = HFTarget(target.model)  # type: ignore[attr-defined]
    return {
        "none": None,
        "ngram": NGramDrafter(min_n=1, max_n=3),
        "model": ModelDrafter(itself, vocab_size=target.vocab_size),
        "stranger": ModelDrafter(stranger, vocab_size=target.vocab_size),
        "tree": ScriptedDrafter(lambda tokens, budget: Draft([28, 253, 1, 28][:budget], [-1, -1, 0, 1][:budget])),
    }


@pytest.mark.parametrize("name", ["none", "ngram", "model", "stranger", "tree"])
@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_tokens_are_the_plain_loops(
    engine: LocalEngine, prompts: list[list[int]], expected: dict[str, list[list[int]]], name: str, mode: str
) -> None:
    params = GREEDY if mode == "greedy" else SEEDED
    spec = LocalEngine(engine.target, drafters(engine)[name], tokenizer=engine.tokenizer, num_speculative_tokens=4)
    batch = spec.generate(prompts, params)
    assert [result.tokens for result in batch] == expected[mode]
    assert spec.generate(prompts[0], params).tokens == expected[mode][0]
    for result in batch:
        assert result.text == engine.tokenizer.decode(result.tokens, skip_special_tokens=True)
    if name == "model":
        assert spec.stats().acceptance_rate > 0.95, "a model that drafts for itself is right but for ties"


def test_greedy_tokens_are_transformers_generate(
    smollm2_path: Path, engine: LocalEngine, prompts: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    spec = LocalEngine(engine.target, NGramDrafter(), tokenizer=engine.tokenizer, num_speculative_tokens=8)
    eos = sorted(engine.target.eos_tokens)
    config = GenerationConfig(max_new_tokens=48, do_sample=False, eos_token_id=eos, pad_token_id=eos[0])
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        assert spec.generate(prompt, SamplingParams(max_tokens=48)).tokens == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampling_rules_run_on_the_real_model(engine: LocalEngine, prompts: list[list[int]], verification: str) -> None:
    """A model drafting for itself: p = q up to rounding, so nearly everything is accepted."""
    itself = ModelDrafter(HFTarget(engine.target.model), vocab_size=engine.target.vocab_size)  # type: ignore[attr-defined]
    spec = LocalEngine(engine.target, itself, tokenizer=engine.tokenizer, num_speculative_tokens=4)
    params = SamplingParams(max_tokens=24, temperature=1, top_k=50, seed=1, verification=verification)  # type: ignore[arg-type]
    spec.generate(prompts, params)
    assert spec.stats().num_drafts > 0
    assert spec.stats().acceptance_rate > 0.97


def test_half_characters_are_never_streamed(engine: LocalEngine, prompts: list[list[int]]) -> None:
    spec = LocalEngine(engine.target, NGramDrafter(), tokenizer=engine.tokenizer, num_speculative_tokens=6)
    params = SamplingParams(max_tokens=60, temperature=1.3, seed=3)
    chunks = list(spec.stream(prompts[1], params))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert "".join(chunk.text for chunk in chunks) == engine.tokenizer.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in chunk.text for chunk in chunks[:-1])
