"""Correctness and cost on an accelerator, with random weights only: nothing is downloaded. The last line is JSON.

    python scripts/gpu_check.py [--device cuda] [--hidden 2048 --layers 16]

Equality is checked in float32 against forwards without a cache; the cost curve is measured in bfloat16.
"""

import argparse
import json
import statistics
import time

import torch
import transformers as tf

import flashspec
from flashspec.backends import hf
from flashspec.core import EMPTY, Draft, SamplingParams, Sequence
from flashspec.drafters.eagle import EagleDrafter
from flashspec.drafters.medusa import MedusaDrafter
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.heads.eagle import EagleHead
from flashspec.heads.medusa import MedusaHeads
from flashspec.sampling import exponential_noise
from flashspec.train.run import eagle_config

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
FAMILIES = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "mistral": lambda: tf.MistralConfig(**SMALL, sliding_window=16),
    "gemma3": lambda: tf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=16),
}


def served(config, device, dtype):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    hf.use_grouped_attention(model)
    return hf.HFTarget(model)


def argmax_loop(target, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.plain_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def check_family(name, device):
    """Self-tests in float32 and bfloat16, and greedy tokens of every drafter in a ragged batch."""
    config = FAMILIES[name]()
    target = served(config, device, torch.float32)
    report = {"float32": hf.self_test(target), "bfloat16": hf.self_test(served(config, device, torch.bfloat16))}
    prompts = [[5, 6, 7] * 8, [9], list(range(40))]
    expected = [argmax_loop(target, prompt, 24) for prompt in prompts]
    itself = hf.HFTarget(target.model)  # the same weights, a cache of its own
    drafters = {
        "none": None,
        "ngram": NGramDrafter(min_n=1),
        "model": ModelDrafter(itself, vocab_size=300),
        "model, trees": ModelDrafter(itself, vocab_size=300, width=3),
        **head_drafters(target),
    }
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for drafter_name, drafter in drafters.items():
        engine = flashspec.LocalEngine(target, drafter, num_speculative_tokens=4)
        report[drafter_name] = [result.tokens for result in engine.generate(prompts, params)] == expected
    return report


def head_drafters(target):
    """Heads that begin as the target's own output embedding, chains and trees."""
    model, found = target.model, {}
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config = eagle_config(model.config, vocab_size=300, draft_vocab_size=200)
    for width in (1, 3):
        heads, head = MedusaHeads(64, 300, num_heads=3), EagleHead(config)
        heads.start_from(output.cpu())
        head.start_from(embedding.cpu(), output.cpu())
        heads, head = heads.to(model.device, model.dtype), head.to(model.device, model.dtype)
        found[f"medusa, width {width}"] = MedusaDrafter(heads, width=width)
        found[f"eagle3, width {width}"] = EagleDrafter(head, max_length=target.max_length, width=width)
    return found


def noise_is_the_same(device):
    tokens = torch.arange(5000)
    return torch.equal(exponential_noise(1, 2, 3, tokens), exponential_noise(1, 2, 3, tokens.to(device)).cpu())


def cost_curve(device, hidden, layers):
    """Milliseconds to score n tokens after 512, for n = 1 ... 17."""
    config = tf.LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(hidden // 256, 1), max_position_embeddings=2048,
    )  # fmt: skip
    target = served(config, device, torch.bfloat16 if device != "cpu" else torch.float32)
    seq = Sequence("cost", list(range(512)), 512)
    target.score([seq], [EMPTY])
    curve = {}
    for n in (1, 2, 3, 5, 9, 17):
        times = []
        for _ in range(12):
            start = time.perf_counter()
            target.score([seq], [Draft.chain(list(range(n - 1)))])[0].logits.argmax(-1).tolist()  # waits for the device
            times.append(time.perf_counter() - start)
        curve[n] = statistics.median(times[2:]) * 1000
    return curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    tf.utils.logging.set_verbosity_error()
    report = {"device": args.device, "torch": torch.__version__, "transformers": tf.__version__}
    report["name"] = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    report["noise_is_the_same"] = noise_is_the_same(args.device)
    for name in FAMILIES:
        report[name] = check_family(name, args.device)
        print(name, report[name], flush=True)
    report["cost_ms"] = cost_curve(args.device, args.hidden, args.layers)
    print(json.dumps(report))
    equal = all(report[name][drafter] for name in FAMILIES for drafter in ("none", "ngram", "model"))
    raise SystemExit(0 if equal and report["noise_is_the_same"] else 1)


if __name__ == "__main__":
    main()
