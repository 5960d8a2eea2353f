"""The automaton finds what scanning the text finds, and drafts come from where they may come from and nowhere else."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence as Seq
from typing import Any

import pytest
from conftest import ToyTarget, plain_loop, sequence
from hypothesis import given, settings, strategies as st

from flashspec.core import Draft, SamplingParams, Sequence
from flashspec.drafters import automaton
from flashspec.drafters.automaton import (
    MARGIN,
    MIN_CHANCE,
    MOST_CANDIDATES,
    MOST_LINKS,
    ROOT,
    SEPARATOR,
    SuffixAutomaton,
    confidence,
    most,
)
from flashspec.drafters.suffix import PastOutputs, SuffixDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError
from flashspec.tree import children, paths

QUICK = settings(max_examples=200, deadline=None, derandomize=True)
TOKENS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=MOST_LINKS - 1))
NO_EOS: frozenset[int] = frozenset()


# a plain reference: everything by scanning the text


def ends(text: Seq[int], part: Seq[int]) -> list[int]:
    """End positions of a part, in tokens from the beginning."""
    return [end for end in range(len(part), len(text) + 1) if list(text[end - len(part) : end]) == list(part)]


def continuations(text: Seq[int], part: Seq[int]) -> dict[int, tuple[int, int]]:
    """Token -> how often it follows the part, and where the latest such occurrence ends."""
    found: dict[int, tuple[int, int]] = {}
    for end in ends(text, part):
        if end < len(text):
            found[text[end]] = (found.get(text[end], (0, 0))[0] + 1, end + 1)
    return found


def repeated_suffixes(text: Seq[int], min_match: int) -> list[list[int]]:
    """Suffixes that occurred before, longest first, one for each set of end positions."""
    found: list[list[int]] = []
    for length in range(len(text) - 1, min_match - 1, -1):
        part = list(text[len(text) - length :])
        if len(ends(text, part)) > 1 and (not found or ends(text, part) != ends(text, found[-1])):
            found.append(part)
    return found[:MOST_CANDIDATES]


def follow(text: Seq[int], part: list[int]) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """The part, or what the text's own end repeats where nothing follows it, and what follows."""
    if not continuations(text, part):
        part = next(iter(repeated_suffixes(text, 1)), [])
    return part, continuations(text, part) if part else {}


def walk(text: Seq[int], part: list[int], budget: int, eos: Seq[int] = ()) -> tuple[float, list[int], list[float]]:
    guessed: list[int] = []
    sures: list[float] = []
    score, chance = 0.0, 1.0
    while len(guessed) < budget:
        part, found = follow(text, part)
        if not found:
            break
        token = max(found, key=lambda each: found[each])
        sure = confidence(len(part), found[token][0], sum(count for count, _ in found.values()))
        chance *= sure
        if chance < MIN_CHANCE:
            break
        score += chance
        guessed.append(token)
        sures.append(sure)
        if token in eos:
            break
        part = [*part, token]
    return score, guessed, sures


def best(text: Seq[int], min_match: int, budget: int, eos: Seq[int] = ()) -> tuple[list[int], list[int], list[float]]:
    """The match and its guesses with the highest score; a shorter match has to be able to win by a margin."""
    score, chosen = 0.0, ([], [], [])
    for part in repeated_suffixes(text, min_match):
        found = walk(text, part, budget, eos)
        if found[0] > score and most(len(part), budget) > score * (1 + MARGIN):
            score, chosen = found[0], (part, found[1], found[2])
    return chosen


def chances(draft: Draft) -> list[float]:
    """That each node and all above it are accepted."""
    assert draft.confidences is not None
    found: list[float] = []
    for parent, sure in zip(draft.parents, draft.confidences, strict=True):
        found.append(sure * (found[parent] if parent >= 0 else 1.0))
    return found


def draft_of(tokens: Seq[int], budget: int = 8, *, eos: Seq[int] = (), **options: Any) -> Draft:
    return SuffixDrafter(**options).propose([sequence(tokens, eos=eos)], [budget])[0]


# the automaton


@given(text=TOKENS)
@QUICK
def test_every_substring_has_its_count_and_its_latest_end(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    assert len(automaton.label) <= max(2 * len(text), 2)
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        part, state = text[start:end], ROOT
        for token in part:
            state = automaton.child(state, token)
            assert state != ROOT
        found = continuations(text, part)
        assert (automaton.count[state], automaton.latest[state]) == (len(ends(text, part)), ends(text, part)[-1])
        assert automaton.total[state] == sum(count for count, _ in found.values())
        order = sorted(found, key=lambda token: found[token], reverse=True)
        assert [automaton.label[child] for child in automaton.children(state)] == order
        assert automaton.heaviest[state] == (automaton.child(state, order[0]) if order else ROOT)


@given(text=TOKENS, other=TOKENS)
@QUICK
def test_what_is_no_substring_has_no_path(text: list[int], other: list[int]) -> None:
    automaton, state = SuffixAutomaton(text), ROOT
    for length, token in enumerate(other, 1):
        state = automaton.child(state, token)
        assert (state != ROOT) == bool(ends(text, other[:length]))
        if state == ROOT:
            break


@given(text=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
@QUICK
def test_the_longest_repeated_suffix_in_any_portions(text: list[int], cuts: list[int]) -> None:
    automaton = SuffixAutomaton()
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        automaton.extend(text[start:end])
        expected = repeated_suffixes(text[:end], 1)
        found = list(automaton.matches(automaton.repeated(), 1))
        assert [length for _, length in found] == [len(part) for part in expected]
        assert [automaton.count[state] for state, _ in found] == [len(ends(text[:end], part)) for part in expected]
    assert automaton.tokens == text


@given(text=TOKENS, other=TOKENS)
@QUICK
def test_advance_finds_the_longest_suffix_of_one_text_in_another(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    cursor = (ROOT, 0)
    for end, token in enumerate(other, 1):
        cursor = automaton.advance(cursor, token)
        assert cursor[1] == max(n for n in range(end + 1) if not n or ends(text, other[end - n : end]))
        if cursor[1]:
            assert automaton.count[cursor[0]] == len(ends(text, other[end - cursor[1] : end]))


@given(text=TOKENS, more=TOKENS, other=TOKENS, at=st.integers(0, 30))
@QUICK
def test_a_cursor_outlives_the_growth_of_the_text(text: list[int], more: list[int], other: list[int], at: int) -> None:
    text, more = text[: MOST_LINKS // 2], more[: MOST_LINKS // 2 - 1]
    automaton = SuffixAutomaton(text)
    cursor = (ROOT, 0)
    for end, token in enumerate(other, 1):
        cursor = automaton.advance(cursor, token)
        if end == at:
            automaton.extend(more)
            text = text + more
        state, length = automaton.settle(cursor)
        matched, expected = other[end - length : end], ROOT
        for each in matched:
            expected = automaton.child(expected, each)
        assert state == expected
        assert not matched or automaton.count[state] == len(ends(text, matched))


def test_a_long_loop_costs_a_bounded_number_of_links_and_keeps_lower_bounds() -> None:
    automaton = SuffixAutomaton([7] * 500)
    state = ROOT
    for length in range(1, 501):
        state = automaton.child(state, 7)
        assert automaton.count[state] == min(501 - length, MOST_LINKS)
    assert automaton.walk(automaton.repeated(), 20, NO_EOS).tokens == [7] * 20


@given(text=TOKENS)
@QUICK
def test_past_the_bound_the_heaviest_child_is_still_a_child(text: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automaton, "MOST_LINKS", 2)
        found = SuffixAutomaton(text)
    for state, child in enumerate(found.heaviest):
        assert child == ROOT or child == found.child(state, found.label[child])


# what is proposed


@given(text=TOKENS, min_match=st.integers(1, 4), budget=st.integers(0, 12), eos=st.sets(st.integers(0, 4), max_size=1))
@QUICK
def test_drafts_are_the_references(text: list[int], min_match: int, budget: int, eos: set[int]) -> None:
    _, tokens, confidences = best(text, min_match, budget, list(eos))
    draft = draft_of(text, budget, eos=list(eos), min_match=min_match)
    assert draft == Draft.chain(tokens, drafter="suffix", confidences=draft.confidences)
    assert draft.confidences == pytest.approx(confidences)


@given(text=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
@QUICK
def test_drafts_do_not_depend_on_the_steps_in_which_tokens_came(text: list[int], cuts: list[int]) -> None:
    drafter, seq = SuffixDrafter(), sequence([])
    for nth, (start, end) in enumerate(itertools.pairwise([0, *sorted(cuts), len(text)])):
        seq.tokens += text[min(start, len(text)) : end]
        found = drafter.propose([seq], [6 * (nth % 2)])[0]  # a budget of nothing may come between
        assert found == draft_of(seq.tokens, 6 * (nth % 2))


@pytest.mark.parametrize("period", [1, 2, 3, 5, 37])
def test_a_loop_goes_on_for_as_long_as_it_is_asked_to(period: int) -> None:
    loop = list(range(10, 10 + period)) * 80
    for end in (40 * period, 40 * period + period // 2):
        assert draft_of(loop[:end], 30).tokens == loop[end : end + 30]
    assert draft_of([1, 2, 3, 1, 2, 3, 1, 2], 4).tokens == [3, 1, 2, 3]


def test_the_more_frequent_continuation_wins_then_the_later_one() -> None:
    assert draft_of([1, 2, 1, 2, 1, 3, 1], 1).tokens == [2]
    assert draft_of([1, 2, 9, 1, 3, 8, 1], 1).tokens == [3]


def test_evidence_decides_and_the_longest_match_only_among_equals() -> None:
    often = [5, 6] * 40
    assert draft_of([4, 5, 7, 4, 5, 9, *often, 8, 4, 5], 1).tokens == [6]  # forty times after 5; 4 5 had 7 and 9
    assert draft_of([4, 5, 7, 5, 6, 4, 5], 1).tokens == [7]


@pytest.mark.parametrize("tokens", [[], [4], [1, 2], list(range(50))])
def test_a_text_without_repetition_has_no_draft(tokens: list[int]) -> None:
    assert draft_of(tokens) == Draft([], [], None, "suffix", [])
    assert draft_of(tokens, tree=True).tokens == []


def test_nothing_is_guessed_behind_the_end_of_a_sequence() -> None:
    text = [1, 2, 3, 9, 4, 5, 1, 2, 3, 9, 4, 5, 1, 2]
    assert draft_of(text, eos=[9]).tokens == [3, 9]
    assert draft_of(text, eos=[9], tree=True).tokens == [3, 9]
    assert draft_of(text).tokens[:4] == [3, 9, 4, 5]


def test_a_budget_is_kept_and_one_of_nothing_is_made_up_for() -> None:
    drafter, seq = SuffixDrafter(), sequence([1, 2, 3])
    for budget in (0, -1):
        assert drafter.propose([seq], [budget])[0].tokens == []
    seq.tokens += [1, 2]
    assert [len(drafter.propose([seq], [budget])[0]) for budget in (1, 2)] == [1, 2]
    assert draft_of([1, 2] * 50, 33).tokens == [1, 2] * 16 + [1]


def test_confidence_grows_with_what_was_seen_and_stays_a_probability() -> None:
    for length, count, more in itertools.product(range(1, 40, 3), range(1, 9), range(4)):
        sure = confidence(length, count, count + more)
        assert 0 < sure < 1
        assert sure <= confidence(length + 1, count, count + more)
        assert sure <= confidence(length, count + 1, count + 1 + more)
        assert sum(confidence(length, each, count + more) for each in (count, more)) <= 1
        assert most(length, 5) >= sure
    assert confidence(3, 2, 1) == confidence(3, 2, 2)  # lower bounds


@given(text=TOKENS, length=st.integers(1, 20), budget=st.integers(1, 12))
@QUICK
def test_no_match_scores_more_than_its_length_allows(text: list[int], length: int, budget: int) -> None:
    for part in repeated_suffixes(text, length):
        assert walk(text, part, budget)[0] <= most(len(part), budget) + 1e-12


# the engine's rule


class Rule:
    """Refuses what ``refuses`` says, and keeps what it was asked."""

    def __init__(self, refuses: Callable[[list[float]], bool]) -> None:
        self.refuses = refuses
        self.asked: list[list[float]] = []

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        path = [sure for sure in confidences if sure is not None]
        self.asked.append(path)
        return not self.refuses(path)

    def length(self, seq: Sequence, confidences: Seq[float]) -> int:
        return next((i for i in range(len(confidences)) if not self.worth(seq, confidences[: i + 1])), len(confidences))


def test_a_draft_ends_where_the_rule_ends_it() -> None:
    drafter, seq = SuffixDrafter(), sequence([1, 2, 3, 4] * 5)
    free = drafter.propose([seq], [9])[0]
    assert free.confidences is not None
    rule = drafter.rule = Rule(lambda path: len(path) > 3)
    draft = drafter.propose([seq], [9])[0]
    assert (draft.tokens, draft.confidences) == (free.tokens[:3], free.confidences[:3])
    assert rule.asked == [free.confidences[:n] for n in (1, 2, 3, 4)]
    drafter.rule = Rule(lambda path: True)
    assert len(drafter.propose([seq], [9])[0]) == 0


def test_a_trees_rule_is_asked_about_paths_and_what_is_refused_takes_what_is_below() -> None:
    seq = sequence([9, 1, 2, 10, 9, 1, 3, 11, 9, 1, 2, 10, 9, 1, 3, 13, 9, 1])
    free = SuffixDrafter(tree=True).propose([seq], [12])[0]
    drafter = SuffixDrafter(tree=True)
    rule = drafter.rule = Rule(lambda path: len(path) > 1)
    draft = drafter.propose([seq], [12])[0]
    assert free.confidences is not None
    assert max(map(len, paths(free.parents))) > 1
    roots = children(free.parents)[-1]
    assert draft.tokens == [free.tokens[node] for node in roots]
    known = [[free.confidences[node] for node in path] for path in paths(free.parents)]
    assert all(path in known for path in rule.asked)


# trees


@given(text=TOKENS, budget=st.integers(0, 12), eos=st.sets(st.integers(0, 4), max_size=1))
@QUICK
def test_a_tree_holds_the_likeliest_nodes(text: list[int], budget: int, eos: set[int]) -> None:
    def below(part: list[int], chance: float, depth: int) -> list[float]:
        part, found = follow(text, part)
        total = sum(count for count, _ in found.values())
        likely: list[float] = []
        for token, (count, _) in found.items():
            each = chance * confidence(len(part), count, total)
            if each >= MIN_CHANCE and depth:
                likely += [each, *([] if token in eos else below([*part, token], each, depth - 1))]
        return likely

    draft = draft_of(text, budget, eos=list(eos), tree=True)
    match = best(text, 1, budget, list(eos))[0]
    expected = sorted(below(match, 1.0, budget), reverse=True)[:budget] if match else []
    assert chances(draft) == pytest.approx(expected)  # best first, so parents come before their children
    assert all(parent < node for node, parent in enumerate(draft.parents))
    for siblings in children(draft.parents).values():
        assert len({draft.tokens[node] for node in siblings}) == len(siblings)


@given(text=TOKENS, budget=st.integers(0, 12), eos=st.sets(st.integers(0, 4), max_size=1))
@QUICK
def test_a_tree_of_one_branch_is_the_chain(text: list[int], budget: int, eos: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automaton, "MOST_BRANCHES", 1)
        assert draft_of(text, budget, eos=list(eos), tree=True) == draft_of(text, budget, eos=list(eos))


def test_a_tree_branches_where_the_text_did() -> None:
    draft = draft_of([1, 2, 10, 1, 3, 11, 1, 2, 12, 1, 3, 13, 1], 6, tree=True)
    assert not draft.is_chain
    assert {draft.tokens[node] for node in children(draft.parents)[-1]} == {2, 3}


# past outputs


def finished(drafter: SuffixDrafter, prompt: Seq[int], output: Seq[int], name: str = "old") -> None:
    """A request that ran and ended."""
    seq = sequence([*prompt, *output], num_prompt_tokens=len(prompt), name=name)
    drafter.propose([seq], [0])
    drafter.forget(seq)


def running(prompt: Seq[int], output: Seq[int] = (), name: str = "new") -> Sequence:
    return sequence([*prompt, *output], num_prompt_tokens=len(prompt), name=name)


def test_a_finished_output_is_drafted_for_the_next_request() -> None:
    drafter = SuffixDrafter(namespace="a")
    finished(drafter, [1, 2], [10, 11, 12, 13, 14])
    assert drafter.propose([running([5], [11, 12])], [9])[0].tokens == [13, 14]
    assert drafter.propose([running([5], [10], name="another")], [9])[0].tokens == [11, 12, 13, 14]
    assert drafter.propose([running([5], [14], name="its end")], [9])[0].tokens == []


def test_an_output_is_followed_as_it_grows_and_while_the_store_grows() -> None:
    drafter = SuffixDrafter(namespace="a")
    seq = running([5], [10])
    assert drafter.propose([seq], [3])[0].tokens == []
    finished(drafter, [1], [10, 11, 12, 13])
    assert drafter.propose([seq], [3])[0].tokens == [11, 12, 13]
    seq.tokens += [11, 99]
    assert drafter.propose([seq], [3])[0].tokens == []
    finished(drafter, [1], [11, 99, 98])
    seq.tokens += [12]
    assert drafter.propose([seq], [3])[0].tokens == [13]


def test_prompts_are_neither_stored_nor_looked_up() -> None:
    drafter = SuffixDrafter(namespace="a")
    finished(drafter, [20, 21, 22, 23], [30, 31])
    assert drafter.propose([running([5], [20, 21])], [9])[0].tokens == []
    finished(drafter, [1], [40, 41, 42])
    assert drafter.propose([running([7, 40])], [9])[0].tokens != [41, 42]
    held = {token for text in drafter.past_outputs.texts("a") for token in text.tokens}  # type: ignore[union-attr]
    assert held == {30, 31, 40, 41, 42, SEPARATOR}


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6), st.booleans())
@QUICK
def test_no_draft_runs_across_two_outputs(outputs: list[list[int]], tree: bool) -> None:
    drafter = SuffixDrafter(namespace="a", tree=tree)
    for output in outputs:
        finished(drafter, [90, 91], output)
    seq = running([92], outputs[0][:1])
    draft = drafter.propose([seq], [12])[0]
    for path in paths(draft.parents):
        guessed = [outputs[0][0], *(draft.tokens[node] for node in path)]
        assert any(ends(output, guessed) for output in outputs)


@pytest.mark.parametrize("tree", [False, True])
def test_namespaces_never_leak(tree: bool) -> None:
    store, secret = PastOutputs(), [10, 11, 12, 13, 14]
    by_prompt = SuffixDrafter(
        past_outputs=store, namespace=lambda seq: {1: "a", 2: "b"}.get(seq.tokens[0]), predicted=None, tree=tree
    )
    finished(by_prompt, [1], secret)
    finished(by_prompt, [2], [50, 51])
    finished(by_prompt, [3], [60, 61, 62])  # belongs to none
    for first, expected in ((1, [12, 13, 14]), (2, []), (3, [])):
        seq = running([first], secret[:2], name=str(first))
        assert by_prompt.propose([seq], [9])[0].tokens == expected
    assert SuffixDrafter(past_outputs=store, tree=tree).propose([running([1], secret[:2])], [9])[0].tokens == []
    other = SuffixDrafter(past_outputs=store, namespace="b", tree=tree)
    assert other.propose([running([1], secret[:2])], [9])[0].tokens == []
    assert other.propose([running([1], [60, 61], name="x")], [9])[0].tokens == []
    assert SuffixDrafter(past_outputs=store, namespace="a").propose([running([1], [11])], [9])[0].tokens == [12, 13]


def test_nothing_is_stored_without_a_namespace() -> None:
    store = PastOutputs()
    finished(SuffixDrafter(past_outputs=store), [1], [2, 3, 4])
    finished(SuffixDrafter(past_outputs=store, namespace=lambda seq: None), [1], [2, 3, 4])
    assert store.num_tokens == 0
    assert SuffixDrafter().past_outputs is None


def test_the_bound_holds_and_the_recent_outputs_stay() -> None:
    store, rng = PastOutputs(max_tokens=200), random.Random(0)
    for nth in range(300):
        output = [1000 * (nth + 1) + i for i in range(rng.randrange(0, 40))]
        store.add("a", output)
        assert store.num_tokens <= 200
        if len(output) > 1:
            drafter = SuffixDrafter(past_outputs=store, namespace="a")
            assert drafter.propose([running([1], output[:1])], [1])[0].tokens == output[1:2]
    held = {token // 1000 for text in store.texts("a") for token in text.tokens}
    assert store.num_tokens > 90
    assert min(held - {SEPARATOR // 1000}) > 280


def test_of_the_namespaces_the_least_recently_used_goes_first() -> None:
    store = PastOutputs(max_tokens=100)
    for name in "abc":
        store.add(name, list(range(28)))  # 30 with separators
    assert store.texts("a")
    store.add("d", list(range(28)))
    assert [bool(store.texts(name)) for name in "abcd"] == [True, False, True, True]
    store.add("d", list(range(40)))
    assert store.num_tokens <= 100
    assert len(store.texts("d")) == 2


def test_an_output_too_long_for_the_store_is_cut() -> None:
    store = PastOutputs(max_tokens=20)
    store.add("a", range(100))
    assert (store.num_tokens, store.texts("a")[0].tokens) == (10, [SEPARATOR, *range(8), SEPARATOR])
    store.add("a", [])
    assert store.num_tokens == 10


def test_a_request_outlives_the_generation_it_was_matched_in() -> None:
    store = PastOutputs(max_tokens=40)
    drafter = SuffixDrafter(past_outputs=store, namespace="a")
    store.add("a", range(10))
    seq = running([99], [2])
    assert drafter.propose([seq], [2])[0].tokens == [3, 4]
    for start in (100, 200, 300):
        store.add("a", range(start, start + 15))
    seq.tokens += [3]
    assert drafter.propose([seq], [2])[0].tokens == []
    seq.tokens += [301]
    assert drafter.propose([seq], [2])[0].tokens == [302, 303]


# predicted output


@pytest.mark.parametrize("min_match", [1, 4])
def test_a_prediction_is_drafted_from_its_first_token_and_after_a_deviation(min_match: int) -> None:
    drafter = SuffixDrafter(min_match=min_match)
    drafter.predict("new", range(10, 40))
    seq = running([1, 2, 3])
    guessed = drafter.propose([seq], [9])[0].tokens
    assert guessed
    assert guessed == list(range(10, 10 + len(guessed)))
    seq.tokens += range(10, 20)
    assert drafter.propose([seq], [4])[0].tokens == [20, 21, 22, 23]
    seq.tokens += [7]
    assert drafter.propose([seq], [4])[0].tokens == []
    seq.tokens += range(30, 30 + min_match)
    guessed = drafter.propose([seq], [4])[0].tokens
    assert guessed
    assert guessed == list(range(30 + min_match, 30 + min_match + len(guessed)))
    seq.tokens[-min_match:] = range(36, 40)
    assert drafter.propose([running([1], range(30, 40))], [4])[0].tokens == []  # it ends here


def test_a_prediction_may_come_by_request_or_while_it_runs_and_goes_with_it() -> None:
    drafter = SuffixDrafter(predicted=lambda seq: [11, 12, 13] if seq.tokens[0] == 1 else None)
    assert drafter.propose([running([1], [11]), running([2], [11], name="b")], [2, 2])[0].tokens == [12, 13]
    seq = running([2], [11], name="c")
    assert drafter.propose([seq], [2])[0].tokens == []
    drafter.predict("c", [11, 21, 22])
    assert drafter.propose([seq], [2])[0].tokens == [21, 22]
    drafter.predict("c", [])
    assert drafter.propose([seq], [2])[0].tokens == []
    drafter.predict("c", [11, 31])
    drafter.forget(seq)
    assert drafter.propose([seq], [2])[0].tokens == []


def test_the_text_itself_comes_first_among_equals() -> None:
    drafter = SuffixDrafter(namespace="a")
    finished(drafter, [1], [70, 10, 50])
    drafter.predict("new", [71, 10, 60])
    assert drafter.propose([running([3, 10, 40], [10])], [1])[0].tokens == [40]
    drafter.predict("other", [71, 10, 60])
    assert drafter.propose([running([3], [10], name="other")], [1])[0].tokens == [60]
    assert drafter.propose([running([3], [10], name="third")], [1])[0].tokens == [50]


# sequences and options


def test_sequences_do_not_learn_from_each_other_and_a_forgotten_one_leaves_nothing() -> None:
    drafter = SuffixDrafter()
    seqs = [sequence([1, 2, 3, 1, 2], name="a"), sequence([1, 2], name="b"), sequence([1, 2, 5, 1, 2], name="c")]
    assert [draft.tokens for draft in drafter.propose(seqs, [1, 4, 2])] == [[3], [], [5, 1]]
    drafter.forget(seqs[0])
    drafter.forget(sequence([1], name="unknown"))
    assert drafter.propose([sequence([1, 2], name="a")], [3])[0].tokens == []


def test_an_id_used_again_starts_over() -> None:
    drafter = SuffixDrafter()
    assert drafter.propose([sequence([1, 2, 3, 1, 2])], [1])[0].tokens == [3]
    assert drafter.propose([sequence([7, 8, 9, 1, 2, 4])], [3])[0].tokens == []
    seq = sequence([1, 2, 3, 4, 1, 2])
    assert drafter.propose([seq], [1])[0].tokens == [3]
    seq.tokens[:] = [1, 2, 9]
    assert drafter.propose([seq], [1])[0].tokens == []


@pytest.mark.parametrize("value", [0, -1, 65, 2.5, "2", None, True])
def test_min_match_out_of_range(value: Any) -> None:
    with pytest.raises(OptionError, match=rf"min_match is {value!r}; .* from 1 to 64"):
        SuffixDrafter(min_match=value)


def test_other_options_out_of_range() -> None:
    for value in (0, 15, 1e6, True, None):
        with pytest.raises(OptionError, match=rf"max_tokens is {value!r}; .* at least 16"):
            PastOutputs(max_tokens=value)  # type: ignore[arg-type]
    for name in ("", 5):
        with pytest.raises(OptionError, match=rf"namespace is {name!r}; .* at least one character"):
            SuffixDrafter(namespace=name)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"namespace is {name!r}"):
            SuffixDrafter(namespace=lambda seq, name=name: name).propose([sequence([1])], [1])  # type: ignore[misc]
    for token in (-1, "a", 1.0, True):
        with pytest.raises(OptionError, match=rf"a predicted output has {token!r}; .* token ids"):
            SuffixDrafter().predict("s", [1, token])  # type: ignore[list-item]


# exactness and cost


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, temperature=0.7, seed=5),
        SamplingParams(max_tokens=40, temperature=0.9, top_k=4, seed=2, repetition_penalty=1.2),
    ],
)
def test_tokens_are_the_plain_loops(params: SamplingParams, k: int, tree: bool) -> None:
    target = ToyTarget(12, eos=[7], scale=4.0)
    prompts = [[1, 2, 3], [4], [5, 6, 5, 6, 5, 6, 5], [0, 1, 2, 0, 1, 2, 0, 1]]
    expected = [plain_loop(target.logits, prompt, params, eos=[7]) for prompt in prompts]
    drafter = SuffixDrafter(namespace="a", predicted=lambda seq: [1, 2, 3, 4, 5], tree=tree)
    engine = LocalEngine(target, drafter, num_speculative_tokens=k)
    for _ in range(2):  # the second time there are past outputs
        assert [engine.generate(prompt, params).tokens for prompt in prompts] == expected
        assert [result.tokens for result in engine.generate(prompts, params)] == expected
    assert engine.stats().num_accepted_tokens > 20
    assert not drafter._requests


@pytest.mark.parametrize("kind", ["random", "loop", "copied"])
def test_a_token_costs_microseconds_at_8000_tokens(kind: str) -> None:
    rng = random.Random(0)
    text = [rng.randrange(500) for _ in range(4100)]
    text = {"random": text * 2, "loop": [5, 6, 7] * 2800, "copied": text[:2000] * 5}[kind]
    drafter, seq = SuffixDrafter(), sequence(text[:8000])
    drafter.propose([seq], [16])
    fastest = float("inf")
    for start in range(8000, 8200, 20):
        started = time.perf_counter()
        for token in text[start : start + 20]:
            seq.tokens.append(token)
            drafter.propose([seq], [16])
        fastest = min(fastest, (time.perf_counter() - started) / 20)
    assert fastest < 100e-6  # a ceiling for a busy machine; it is about a fifth of that on an idle one
