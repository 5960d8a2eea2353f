"""The main job on real input: the same text with and without speculation, where drafts help and where they do not."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import flashspec
from flashspec import SamplingParams

CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total += item["price"] * item["quantity"]
    return total * (1 + tax_rate)
"""
PROMPTS = {
    "rewriting code (drafts help)": f"Repeat this code exactly, then stop:\n\n```python\n{CODE}```",
    "open question (drafts do not)": "Why is the sky blue? Answer in three sentences.",
}


def main() -> None:
    screen = Console(highlight=False)
    with screen.status("loading") as status:
        engine = flashspec.load(drafter="ngram", progress=status.update)
        plain = flashspec.LocalEngine(engine.target, None, tokenizer=engine.tokenizer)
    sampling = SamplingParams(max_tokens=96)
    engine.generate("warm up", SamplingParams(max_tokens=4))
    table = Table(title="SmolLM2-135M-Instruct, n-gram drafts, greedy")
    for name in ("prompt", "tokens", "plain tokens/s", "with drafts", "speedup", "tokens a step", "same text"):
        table.add_column(name, justify="left" if name == "prompt" else "right")
    for name, text in PROMPTS.items():
        messages = [{"role": "user", "content": text}]
        with screen.status(name):
            slow = plain.generate(messages, sampling)
            fast = engine.generate(messages, sampling)
        screen.print(f"[bold]{name}[/]\n{escape(fast.text)}\n")
        table.add_row(
            name, str(len(fast.tokens)), f"{slow.timings.tokens_per_second:.1f}",
            f"{fast.timings.tokens_per_second:.1f}", f"{slow.timings.tpot / fast.timings.tpot:.2f} x",
            f"{len(fast.tokens) / fast.stats.num_steps:.2f}", "yes" if slow.tokens == fast.tokens else "NO",
        )  # fmt: skip
        if slow.tokens != fast.tokens:
            raise SystemExit(f"the texts differ:\n{slow.text}\n---\n{fast.text}")
    screen.print(table)


if __name__ == "__main__":
    main()
