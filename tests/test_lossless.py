"""Speculative decoding emits, id for id, what plain decoding emits.

320 random cases in float64 over models, prompts, tree shapes, pruning, drafters and sampling; plain
decoding itself equals the definition in reference.py. Wrong rules, planted one at a time, must make
the comparison fail (test_lossless_controls.py). Case H-02: near-ties.
"""

from collections import Counter

import lossless_cases
import numpy as np
import pytest
import reference
from lossless_cases import CASES, difference, make_case, plain_ids, speculative
from scripted import Garbage, Noisy, Oracle, RandomTrees
from tiny import ARCHITECTURES, STREAMS, random_ids, tiny_model

from minispec.compare import first_difference
from minispec.config import TreeConfig
from minispec.generate import generate
from minispec.sampling import coin_at


@pytest.mark.parametrize("chunk", range(16))
def test_ids_equal_plain_decoding(chunk):
    for number in range(chunk, CASES, 16):
        case = make_case(number)
        plain, out = plain_ids(case), speculative(case)
        assert difference(plain, out.ids) is None, (case, difference(plain, out.ids))
        assert out.stats.emitted == out.stats.accepted + out.stats.forwards


def test_the_cases_cover_what_they_should():
    cases = [make_case(number) for number in range(CASES)]
    assert len(cases) >= 300 and len({str(case) for case in cases}) == len(cases)
    for what, least in {
            "arch": 40, "streams": 10, "drafter": 20, "sampling": 40, "eos": 60, "context": 60,
            "length": 30}.items():
        counts = Counter(str(getattr(case, what)) for case in cases)
        assert min(counts.values()) >= least and len(counts) >= 2, (what, counts)
    assert {case.arch for case in cases} == set(ARCHITECTURES)
    assert {case.streams for case in cases} == {None, *STREAMS}
    assert {case.drafter for case in cases} == set(lossless_cases.DRAFTERS)
    for what in ("shape", "conditional", "k", "depth", "budget", "fused", "prune_threshold",
                 "prune_budget"):
        counts = Counter(getattr(case.tree, what) for case in cases)
        assert len(counts) >= 2 and min(counts.values()) >= 10, (what, counts)


def test_the_cases_are_no_easy_ones():
    """Outputs vary, drafts are accepted, rejected, pruned and cut."""
    outs = [speculative(make_case(number)) for number in range(0, CASES, 4)]
    distinct = [len(set(out.ids)) for out in outs if len(out.ids) > 9]
    assert np.median(distinct) >= 5 and np.mean(np.array(distinct) >= 3) > 0.9
    steps = [step for out in outs for step in out.steps[1:]]
    assert sum(step.accepted > 0 for step in steps) > 60
    assert sum(step.accepted < step.depth_drafted for step in steps) > 100
    assert sum(step.accepted > 1 and list(step.path) != list(range(len(step.path)))
               for step in steps) > 10    # paths that are not contiguous in node order
    assert sum(len(step.tree) < 1 + step.drafted for step in steps) > 20
    assert sum(step.cut for step in steps) >= 1
    assert {out.finish_reason for out in outs} == {"stop", "length"}


# --- the reference of the reference -------------------------------------------------------------

@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("name", [None, "shared_lora", "lossless", "sees", "sees_lora"])
def test_plain_decoding_equals_the_definition(arch, name):
    """With main_sees_streams: streams beside the prompt's last row and beside every new token."""
    model, prompt = tiny_model(arch, name, seed=1), [3, 5, 8]
    expected = reference.decode(model.params, model.config, prompt, 8, model.streams)
    assert generate(model, prompt, 8).ids == expected


@pytest.mark.parametrize("name", ["conditional", "sees"])
def test_plain_sampling_equals_the_definition(name):
    model, prompt = tiny_model("qwen", name, seed=2), [3, 5]
    for seed in range(3):
        expected = reference.decode(
            model.params, model.config, prompt, 8, model.streams,
            lambda logits, at: reference.inverse_cdf(logits, coin_at(seed, at), 2.0))
        assert generate(model, prompt, 8, temperature=2.0, seed=seed).ids == expected


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_lossless_mode_decodes_as_the_base_model(arch):
    model, base = tiny_model(arch, "lossless", seed=3), tiny_model(arch, None, seed=3)
    for temperature in (0.0, 1.5):
        plain = generate(base, [3, 5], 24, temperature=temperature).ids
        out = generate(model, [3, 5], 24, drafter="streams", temperature=temperature)
        assert out.ids == plain


# --- drafters that know everything or nothing ---------------------------------------------------

@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("name", [None, "sees"])
def test_an_oracle_gives_depth_and_one_tokens_a_pass(temperature, depth, name):
    model, prompt, passes = tiny_model("llama", name, seed=4), [3, 5], 3
    count = 1 + passes * (depth + 1)      # the first token comes with the prompt
    plain = generate(model, prompt, count, temperature=temperature).ids
    out = generate(model, prompt, count, Oracle(prompt, plain, depth), temperature=temperature)
    assert out.ids == plain
    assert out.stats.forwards == passes and out.stats.tokens_per_forward == depth + 1
    assert out.stats.accept_rate == [1.0] * depth


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("depth", [1, 5])
def test_garbage_costs_passes_and_nothing_else(temperature, depth):
    model, prompt = tiny_model("mixed", None, seed=5), [3, 5]
    plain = generate(model, prompt, 20, temperature=temperature).ids
    out = generate(model, prompt, 20, Garbage(prompt, plain, depth, 19), temperature=temperature)
    assert out.ids == plain
    assert out.stats.tokens_per_forward == 1 and out.stats.accept_rate[0] == 0
    wild = generate(model, prompt, 20, RandomTrees(np.random.default_rng(5), 19),
                    temperature=temperature)
    assert wild.ids == plain and wild.stats.tokens_per_forward < 2


# --- H-02: near-ties ----------------------------------------------------------------------------

def near_tied(dtype):
    """Every two ids have heads that differ by 1e-6 at most: their logits nearly tie."""
    model = tiny_model("qwen", "conditional", seed=6, vocab_size=20)
    head = model.params["head.w"]
    noise = np.random.default_rng(6).uniform(-1e-6, 1e-6, (16, 10))
    head[:, 1::2] = head[:, ::2] + noise
    params = {name: value.astype(dtype) for name, value in model.params.items()}
    return type(model)(model.config, params, model.streams)


SHAPES = [TreeConfig(shape="full", k=k, depth=depth) for k, depth in ((1, 3), (2, 2), (4, 3))]


def near_tie_runs(model):
    prompt = random_ids(np.random.default_rng(7), 20)
    plain = generate(model, prompt, 44).ids
    yield prompt, plain, plain
    for tree in SHAPES:
        yield prompt, plain, generate(model, prompt, 44, drafter="streams", tree=tree).ids
    for nodes in (4, 16):
        drafter = Noisy(prompt, plain, np.random.default_rng(8), 20, nodes, right=0.7)
        yield prompt, plain, generate(model, prompt, 44, drafter=drafter).ids


def test_h02_near_ties_in_float64_are_decided_alike():
    model = near_tied("float64")
    for _, plain, ids in near_tie_runs(model):
        assert difference(plain, ids) is None


def test_h02_near_ties_in_float32_differ_by_a_margin_that_is_reported():
    """Nothing but a near-tie may differ, and `compare` tells how near it was."""
    model = near_tied("float32")
    for prompt, plain, ids in near_tie_runs(model):
        found = first_difference(model, prompt, plain, ids)
        assert found is None or found.margin < 1e-4
