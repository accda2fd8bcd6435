"""`generate` and `stream` keep their promises: stops, limits, errors, pieces, repeatability.

Cases H-11 (context end), H-17 (end id inside an accepted run), H-18 (exact max_new_tokens).
"""

import numpy as np
import pytest
from scripted import Noisy, Oracle, Scripted
from tiny import stream_config, tiny_model

from minispec.config import TreeConfig
from minispec.drafters import Drafter
from minispec.drafters.prompt_lookup import PromptLookup
from minispec.generate import generate, start, stream
from minispec.growing import chain
from minispec.model import Model
from minispec.text import Tokenizer
from minispec.tree import Tree

PROMPT = [3, 5, 8]


def with_eos(model, *eos):
    return Model(model.config.replace(eos_ids=eos), model.params, model.streams, model.tokenizer)


def finished(session):
    """Run a session to its end -> its steps; the cache must match the ids at the end."""
    steps = []
    while session.rules.finish_reason is None:
        steps.append(session.step() if steps else session.prompt_step())
    assert len(session.cache) == len(session.ids) - 1
    return steps


@pytest.fixture(scope="module")
def talker():
    """A model with a tokenizer, and streams that help little."""
    texts = ["the cat sat on the mat", "a hat and a bat", "the rat ate the oats"] * 9
    tokenizer = Tokenizer.train(texts, 270)
    model = tiny_model("llama", "conditional", seed=1, vocab_size=tokenizer.vocab_size)
    return Model(model.config, model.params, model.streams, tokenizer)


# --- where it ends ------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("drafts", range(9))
def test_h17_end_id_inside_an_accepted_run(number, drafts):
    model = tiny_model("learned", "conditional", seed=2)
    answer = generate(model, PROMPT, 14).ids
    eos = answer[number - 1]
    expected = answer[:answer.index(eos) + 1]
    model = with_eos(model, eos)
    plain = generate(model, PROMPT, 14)
    assert plain.ids == expected and plain.finish_reason == "stop"
    session = start(model, PROMPT, 14, Oracle(PROMPT, answer, drafts), 0.0, 0, 1.0, 0, (), None)
    steps = finished(session)
    assert sum([step.ids for step in steps], []) == expected == session.rules.ids
    assert session.ids == PROMPT + expected and session.rules.finish_reason == "stop"
    assert sum(step.emitted for step in steps) == len(expected)
    out = generate(model, PROMPT, 14, drafter="streams")
    assert out.ids == expected and out.finish_reason == "stop"


def test_h17_any_of_several_end_ids():
    model = tiny_model("learned", "conditional", seed=2)
    answer = generate(model, PROMPT, 14).ids
    late, early = answer[6], answer[3]
    expected = answer[:min(answer.index(late), answer.index(early)) + 1]
    for drafter in (None, "streams", Oracle(PROMPT, answer)):
        assert generate(with_eos(model, late, early), PROMPT, 14, drafter).ids == expected


@pytest.mark.parametrize("count", range(11))
def test_h18_exactly_max_new_tokens(count):
    model = tiny_model("llama", "conditional", seed=3)
    answer = generate(model, PROMPT, 20).ids
    for drafter in (None, "streams", Oracle(PROMPT, answer, 4)):
        out = generate(model, PROMPT, count, drafter)
        assert out.ids == answer[:count] and out.finish_reason == "length"
        assert len(out.steps) == 0 if count == 0 else len(out.steps) >= 1
        assert all(step.depth_drafted < count for step in out.steps[1:])


@pytest.mark.parametrize("count", [-1, -10, 1.5, "3", None])
def test_h18_impossible_limits(count):
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(tiny_model("llama"), PROMPT, count)


@pytest.mark.parametrize("arch", ["learned", "gpt2", "llama"])
@pytest.mark.parametrize("length", [1, 12, 15, 16])
def test_h11_context_end(arch, length):
    """16 positions: the ids fill them and no draft reaches beyond."""
    model = tiny_model(arch, "conditional", seed=4, max_positions=16)
    prompt = (PROMPT * 6)[:length]
    plain = generate(model, prompt, 99)
    assert len(plain.ids) == 16 - length and plain.finish_reason == "length"
    for fused in (False, True):
        for drafter in ("streams", Oracle(prompt, plain.ids + [1] * 9, 4)):
            out = generate(model, prompt, 99, drafter, tree=TreeConfig(depth=3, fused=fused))
            assert out.ids == plain.ids and out.finish_reason == "length"
            done = np.cumsum([step.emitted for step in out.steps])
            assert all(length + before + step.depth_drafted < 16
                       for before, step in zip(done, out.steps[1:]))


def test_h11_prompt_beyond_the_context():
    model = tiny_model("learned", None, max_positions=16)
    with pytest.raises(ValueError, match="prompt has 17 tokens, the model's context is 16"):
        generate(model, [1] * 17, 10)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stop_strings_end_alike(talker, temperature):
    """Any stop string, cut anywhere: same ids, text and reason as plain, streamed or not."""
    settings = dict(max_new_tokens=20, temperature=temperature)
    text = generate(talker, "the cat", **settings).text
    answer = generate(talker, "the cat", **settings).ids
    prompt = talker.tokenizer.encode("the cat")
    found = 0
    for begin in range(1, len(text), 3):
        for stop in (text[begin:begin + 1], (text[begin:begin + 4], "never there")):
            plain = generate(talker, "the cat", stop=stop, **settings)
            found += plain.finish_reason == "stop"
            first = stop if isinstance(stop, str) else stop[0]
            assert plain.text == text[:text.index(first)]
            for drafter in ("streams", Oracle(prompt, answer, 4)):
                out = generate(talker, "the cat", drafter=drafter, stop=stop, **settings)
                assert (out.ids, out.text, out.finish_reason) == (plain.ids, plain.text, "stop")
    assert found > 5


# --- stream and generate ------------------------------------------------------------------------

@pytest.mark.parametrize("drafter", [None, "streams", "prompt_lookup"])
@pytest.mark.parametrize("stop", [(), "a", ("t ", " o")])
def test_streamed_pieces_joined_are_the_output(talker, drafter, stop):
    settings = dict(max_new_tokens=24, drafter=drafter, temperature=2.0, seed=5, stop=stop)
    out = generate(talker, "the hat", **settings)
    steps = list(stream(talker, "the hat", **settings))
    assert "".join(step.text for step in steps) == out.text
    assert sum([step.ids for step in steps], []) == out.ids
    assert steps[0].prompt and not any(step.prompt for step in steps[1:])
    if not stop:
        assert out.text == talker.tokenizer.decode(out.ids)


def test_text_and_ids_are_the_same_prompt(talker):
    ids = talker.tokenizer.encode("the cat")
    assert generate(talker, "the cat", 9).ids == generate(talker, ids, 9).ids
    assert generate(talker, np.array(ids), 9).ids == generate(talker, tuple(ids), 9).ids


def test_end_id_is_the_last_id_and_no_text(talker):
    answer = generate(talker, "the cat", 12)
    model = with_eos(talker, answer.ids[5])
    out = generate(model, "the cat", 12, drafter="streams")
    upto = answer.ids.index(answer.ids[5])
    assert out.ids == answer.ids[:upto + 1]
    assert out.text == talker.tokenizer.decode(answer.ids[:upto])


def test_two_calls_are_equal_and_leave_no_trace():
    model = tiny_model("qwen", "conditional", seed=6)
    before = {name: value.copy() for name, value in model.params.items()}
    prompt = list(PROMPT)
    for settings in (dict(), dict(temperature=2.0, seed=3)):
        for drafter in (None, "streams", "prompt_lookup"):
            runs = [generate(model, prompt, 15, drafter, **settings) for _ in range(2)]
            assert runs[0].ids == runs[1].ids
            assert prompt == PROMPT       # the caller's list is not the session's
    assert all(np.array_equal(value, before[name]) for name, value in model.params.items())
    sampled = [generate(model, PROMPT, 15, temperature=2.0, seed=seed).ids for seed in (3, 4)]
    assert sampled[0] != sampled[1]


def test_a_drafter_serves_one_prompt_after_the_other():
    """`begin` makes it forget: a shared PromptLookup drafts as a new one."""
    model, lookup = tiny_model("llama", None, seed=7), PromptLookup()
    for prompt in ([1, 2, 3, 1, 2], [4, 5, 4, 5], [1, 2, 3, 1, 2]):
        shared = generate(model, prompt, 20, drafter=lookup)
        fresh = generate(model, prompt, 20, drafter=PromptLookup())
        assert shared.ids == fresh.ids == generate(model, prompt, 20).ids
        assert shared.stats.drafted == fresh.stats.drafted


def test_packed_models_decode_alike():
    model = tiny_model("llama", "conditional", seed=8)
    plain = generate(model, PROMPT, 15, "streams").ids
    assert generate(model.pack(), PROMPT, 15, "streams").ids == plain
    assert generate(model.unpack(), PROMPT, 15, "streams").ids == plain


# --- typical acceptance -------------------------------------------------------------------------

def test_typical_acceptance_is_lossy_and_says_so():
    choices = TreeConfig.__dataclass_fields__["acceptance"].metadata
    assert "LOSSY" in choices["help"]
    model = tiny_model("mixed", "conditional", seed=9)
    tree = TreeConfig(acceptance="typical")
    changed, gained = 0, 0
    for seed in range(6):
        settings = dict(max_new_tokens=20, temperature=3.0, seed=seed)
        plain = generate(model, PROMPT, **settings)
        exact = generate(model, PROMPT, drafter="streams", **settings)
        out = generate(model, PROMPT, drafter="streams", tree=tree, **settings)
        assert exact.ids == plain.ids and len(out.ids) == 20
        assert out.stats.emitted == out.stats.accepted + out.stats.forwards
        changed += out.ids != plain.ids
        gained += exact.stats.forwards - out.stats.forwards
    assert changed > 0 and gained > 0
    # without a drafter there is nothing to accept: plain decoding
    assert generate(model, PROMPT, tree=tree, **settings).ids == plain.ids


# --- errors -------------------------------------------------------------------------------------

class Wrong(Drafter):
    """Returns the tree it was made with."""

    def __init__(self, tree):
        self.tree = tree

    def draft(self, ids, streams, room):
        return self.tree


@pytest.mark.parametrize("prompt, text", [
    ([], "prompt is empty"), ("text", "no tokenizer"), ([1, 19], "id 19 is outside"),
    ([-1], "id -1 is outside"), ([[1, 2]], "flat sequence"), ([1.5], "integers")])
def test_impossible_prompts(prompt, text):
    with pytest.raises(ValueError, match=text):
        generate(tiny_model("llama"), prompt, 4)


@pytest.mark.parametrize("settings, text", [
    (dict(drafter="medusa"), "unknown drafter 'medusa', expected None, 'streams'"),
    (dict(drafter=3), "drafter is a int"),
    (dict(drafter=Drafter), "drafter is a type"),
    (dict(drafter="streams"), "needs streams, this model has none"),
    (dict(drafter="prompt_lookup", tree=TreeConfig(prune_threshold=0.1)), "no pruning map"),
    (dict(temperature=-1.0), "temperature"), (dict(top_p=0.0), "top_p"), (dict(top_k=-1), "top_k"),
    (dict(stop=""), "stop string"), (dict(stop="x"), "need a tokenizer"),
    (dict(seed=-1), "seed"), (dict(temperature=1.0, seed=1.5), "seed")])
def test_impossible_settings(settings, text):
    """Found by `stream` as well, before its first step."""
    for function in (generate, stream):
        with pytest.raises(ValueError, match=text):
            function(tiny_model("llama"), PROMPT, **{"max_new_tokens": 4, **settings})


def test_drafters_that_break_their_promise():
    model = tiny_model("llama", None, seed=10)
    first = generate(model, PROMPT, 1).ids[0]
    with pytest.raises(ValueError, match=f"Wrong returned a tree with root {(first + 1) % 19}, "
                                         f"expected the last token {first}"):
        generate(model, PROMPT, 4, Wrong(chain((first + 1) % 19, [])))
    with pytest.raises(ValueError, match="id 19 is outside the vocabulary of 19"):
        generate(model, PROMPT, 4, Wrong(Tree([-1, 0], [first, 19])))
    with pytest.raises(NotImplementedError, match="Drafter does not say how to draft"):
        generate(model, PROMPT, 4, Drafter())


def test_too_many_streams_layers():
    with pytest.raises(ValueError, match="model has only 3 layers"):
        tiny_model("llama", stream_config("paper", layers=4))


def test_steps_say_what_happened():
    """drafted counts before pruning, tree after it; path and emitted describe the walk."""
    model = tiny_model("llama", "conditional", seed=11)
    answer = generate(model, PROMPT, 20).ids
    out = generate(model, PROMPT, 18, Scripted(PROMPT, answer, [2, 0, 4, 1, 3, 0, 9, 9], 4, 19),
                   tree=TreeConfig(prune_budget=8))
    assert [step.accepted for step in out.steps[1:6]] == [2, 0, 4, 1, 3]
    for step in out.steps[1:]:
        at = [int(n) for n in step.path]
        assert step.ids == step.tree.token[at[1:]].tolist()[:step.emitted] + step.ids[len(at) - 1:]
        assert len(step.tree) <= 1 + step.drafted <= 9
        assert step.rows == len(step.tree) and step.seconds > 0
    noisy = generate(model, PROMPT, 18, Noisy(PROMPT, answer, np.random.default_rng(1), 19),
                     tree=TreeConfig(prune_budget=2))
    assert max(len(step.tree) for step in noisy.steps[1:]) <= 3 < max(
        1 + step.drafted for step in noisy.steps[1:])
