"""A comparison says "identical" only if every id is, and gives a speed only then.

Claims: a difference is found at its first place and carries the distance of the two logits, shown
with a lossy rule and with verification that lies; no speed without agreement; plain and speculative
decoding take turns, prompt by prompt; the warm-up is not counted.
"""

from importlib import import_module

import numpy as np
import pytest
from tiny import tiny_model

from minispec.compare import Difference, compare, first_difference
from minispec.config import TreeConfig
from minispec.drafters.streams import Streams
from minispec.model import Model
from minispec.verify import Verdict, walk

# not `from minispec import generate`: that is the function
module, decoding = import_module("minispec.compare"), import_module("minispec.generate")
PROMPTS = [[3, 5, 8], [1, 2], [17]]
SPEEDS = ("cost_ratio", "predicted_speedup", "measured_speedup", "plain_tokens_per_second",
          "speculative_tokens_per_second")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", "conditional", seed=4)


# --- identical ----------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 5}, {"drafter": "prompt_lookup"},
    {"tree": TreeConfig(shape="full", conditional=False, k=2, fused=True)}])
def test_identical_runs(model, settings):
    result = compare(model, PROMPTS, runs=2, max_new_tokens=20, **settings)
    assert result.identical and [pair.prompt for pair in result.pairs] == PROMPTS
    for pair in result.pairs:
        assert pair.difference is None and pair.plain.ids == pair.speculative.ids
        assert len(pair.plain.ids) == 20 and pair.plain.steps[1].drafted == 0
    assert any(pair.speculative.stats.drafted for pair in result.pairs)
    facts = result.as_dict()
    assert facts["identical"] is True and all(facts[name] > 0 for name in SPEEDS)
    stats = result.speculative
    assert facts["tokens_per_forward"] == stats.emitted / stats.forwards >= 1
    assert result.plain.tokens_per_forward == 1 and facts["accept_rate"] == stats.accept_rate


def test_all_runs_count_and_the_warm_up_does_not(model):
    result = compare(model, PROMPTS, runs=3, max_new_tokens=9)
    for runs in (result.comparison.plain, result.comparison.speculative):
        assert [run.emitted for run in runs] == [3 * 8] * 3       # the first token: the prompt's
    assert result.plain.emitted == 3 * 8 and len(result.pairs) == 3


# --- taking turns -------------------------------------------------------------------------------

def test_plain_and_speculative_take_turns(monkeypatch, model):
    calls, ticks = [], []

    def recorded(model, prompt, drafter=None, **settings):
        calls.append((tuple(prompt), drafter))
        assert settings.pop("max_new_tokens") == 5 and settings.pop("seed") == 3
        assert set(settings) <= {"tree"}                  # and both are given the same settings
        return decoding.generate(model, prompt, 5, drafter=drafter, seed=3, **settings)

    monkeypatch.setattr(module, "generate", recorded)
    compare(model, PROMPTS, 2, "prompt_lookup", None, lambda: ticks.append(len(calls)),
            max_new_tokens=5, seed=3)
    warm_up, timed = calls[:2], calls[2:]
    assert {drafter for _, drafter in warm_up} == {None, "prompt_lookup"}
    once = [(tuple(prompt), drafter) for prompt in PROMPTS for drafter in (None, "prompt_lookup")]
    assert timed == once + once
    assert ticks == [2 + 2 * n for n in range(1, 7)]      # after both runs of every prompt


# --- differences --------------------------------------------------------------------------------

def margin(model, prompt, new_ids, a, b):
    row = model.logits([*prompt, *new_ids])[-1]           # (V,)
    return abs(float(row[a]) - float(row[b]))


def check_difference(model, pair):
    """The recorded Difference against a second way to find it -> its index."""
    found, plain, other = pair.difference, pair.plain.ids, pair.speculative.ids
    index = next(i for i in range(len(plain)) if plain[i] != other[i])
    assert (found.index, found.plain_id, found.speculative_id) == (index, plain[index],
                                                                   other[index])
    expected = margin(model, pair.prompt, plain[:index], plain[index], other[index])
    np.testing.assert_allclose(found.margin, expected, rtol=1e-9)
    assert expected > 1e-6
    return index


def check_no_speed(result):
    assert not result.identical and result.comparison is None
    facts = result.as_dict()
    assert facts["identical"] is False and [facts[name] for name in SPEEDS] == [None] * 5
    assert facts["tokens_per_forward"] >= 1               # a count, not a speed


def test_a_lossy_rule_is_found_out(model):
    tree = TreeConfig(acceptance="typical")
    result = compare(model, PROMPTS, 1, tree=tree, max_new_tokens=30, temperature=1.5)
    check_no_speed(result)
    differ = [pair for pair in result.pairs if pair.difference is not None]
    assert differ and all(check_difference(model, pair) >= 1 for pair in differ)


@pytest.mark.parametrize("number", [0, 3, 7])
def test_a_lie_of_the_verification_is_found_where_it_is(monkeypatch, model, number):
    """Walk `number` of every speculative run reports another bonus token than the model's."""
    emitted, places = [], []

    class Counting(Streams):
        def begin(self, prompt_ids):
            emitted[:] = [1]                              # by the prompt's pass

    def lying(tree, choices):
        verdict = walk(tree, choices)
        if len(tree) == 1:                                # plain decoding, or no room for drafts
            return verdict
        emitted.append(len(verdict.emitted))
        if len(emitted) != number + 2:
            return verdict
        places.append(sum(emitted) - 1)
        return Verdict(verdict.path, [*verdict.emitted[:-1], (verdict.emitted[-1] + 1) % 19])

    monkeypatch.setattr(decoding, "walk", lying)
    result = compare(model, PROMPTS[:1], 1, Counting(TreeConfig()), max_new_tokens=40)
    check_no_speed(result)
    assert check_difference(model, result.pairs[0]) == places[0] == places[-1]


@pytest.mark.parametrize("runs, wrong_run", [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_one_wrong_id_of_one_run_spoils_the_speed(monkeypatch, model, runs, wrong_run):
    seen = []

    def wrong(model, prompt, **settings):
        out = decoding.generate(model, prompt, **settings)
        if settings.get("drafter") and prompt == PROMPTS[1]:
            seen.append(1)
            if len(seen) == wrong_run:
                out.ids[-1] = (out.ids[-1] + 1) % 19
        return out

    monkeypatch.setattr(module, "generate", wrong)
    result = compare(model, PROMPTS, runs, max_new_tokens=8)
    check_no_speed(result)
    assert [pair.difference is None for pair in result.pairs] == [True, False, True]
    assert check_difference(model, result.pairs[1]) == 7


def test_an_output_that_ends_early_differs_at_its_end(model):
    assert first_difference(model, [3], [4, 5, 6], [4, 5]) == Difference(2, 6, None, None)
    assert first_difference(model, [3], [4], [4, 5, 6]) == Difference(1, None, 5, None)
    assert first_difference(model, [3], [], [7]) == Difference(0, None, 7, None)
    assert first_difference(model, [3], [], []) is None
    assert first_difference(model, [3], [4, 5], [4, 5]) is None


def test_the_first_of_several_differences_counts(model):
    found = first_difference(model, [3, 1], [4, 5, 6], [4, 7, 9])
    assert (found.index, found.plain_id, found.speculative_id) == (1, 5, 7)
    np.testing.assert_allclose(found.margin, margin(model, [3, 1], [4], 5, 7), rtol=1e-9)


# --- bad input ----------------------------------------------------------------------------------

def test_nothing_to_compare(model):
    with pytest.raises(ValueError, match="0 prompts"):
        compare(model, [])
    with pytest.raises(ValueError, match="0 runs"):
        compare(model, PROMPTS, 0)
    with pytest.raises(ValueError, match="unknown drafter 'nope'"):
        compare(model, PROMPTS, 1, "nope")
    plain = Model(model.config, tiny_model("llama", seed=4).params)
    with pytest.raises(ValueError, match="needs streams"):
        compare(plain, PROMPTS, 1)
