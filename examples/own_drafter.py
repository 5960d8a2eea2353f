"""A drafter of your own: propose() is all it takes, and whatever it guesses, the output stays exact.

This one remembers which token followed which, across requests, and guesses the same again.
"""

import flashspec
from flashspec import Draft, SamplingParams


class BigramDrafter(flashspec.Drafter):
    name = "bigram"

    def __init__(self):
        self.followers = {}

    def propose(self, seqs, budgets):
        return [self.guess(seq, budget) for seq, budget in zip(seqs, budgets)]

    def guess(self, seq, budget):
        tokens, last = [], seq.tokens[-1]
        while len(tokens) < budget and last in self.followers:
            tokens.append(last := self.followers[last])
        return Draft.chain(tokens, drafter=self.name)

    def observe(self, seqs, drafts, verdicts, scores):
        for seq in seqs:
            self.followers.update(zip(seq.tokens, seq.tokens[1:]))


if __name__ == "__main__":
    engine = flashspec.load(drafter=BigramDrafter(), num_speculative_tokens=4)
    question = [{"role": "user", "content": "Write the numbers from 1 to 20."}]
    for attempt in ("first", "again"):
        result = engine.generate(question, SamplingParams(max_tokens=48))
        print(
            f"{attempt}: {result.timings.tokens_per_second:.0f} tokens/s, "
            f"mean acceptance length {result.stats.mean_acceptance_length:.2f}"
        )
    print(result.text)
