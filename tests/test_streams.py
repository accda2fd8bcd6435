"""Streams are what the definition says, and nothing that they hold reaches a main row.

Stream (t, g) of every model equals reference.run_text, row by row. Main rows are unmoved by stream
states of size 1e3 (arXiv v1 and lossless mode); with main_sees_streams only a row's own streams
move it. Lossless mode computes the base model. Fused and deferred streams are the same streams.
"""

from unittest import mock

import numpy as np
import pytest
import reference
from tiny import ARCHITECTURES, STREAMS, random_ids, random_tree, stream_config, tiny_model

from minispec import masks, streams as streams_module
from minispec.config import TreeConfig
from minispec.drafters.streams import Streams
from minispec.generate import generate
from minispec.model import StreamStates

BLIND = [name for name in STREAMS if not name.startswith("sees")]
ON_ARCHITECTURES = ([(arch, name) for arch in ARCHITECTURES for name in ("conditional", "sees")]
                    + [("llama", name) for name in STREAMS]
                    + [("learned", name) for name in ("same", "insertion", "lossless")])


def run(model, ids, bundles):
    """Logits (T, V) and streams (S, G, C) of one uncached pass, streams beside the last rows."""
    out = model.run(model.new_cache(), np.array(ids), masks.causal(len(ids)), bundles=bundles)
    return out.logits, out.streams


@pytest.mark.parametrize("arch, name", ON_ARCHITECTURES)
@pytest.mark.parametrize("bundles", [6, 2])
def test_streams_equal_the_definition(arch, name, bundles):
    model = tiny_model(arch, name, seed=3)
    ids = random_ids(np.random.default_rng(3), 6)
    logits, states = run(model, ids, bundles)
    at = range(6 - bundles, 6)
    expected, _, streams = reference.run_text(model.params, model.config, ids, model.streams, at)
    assert np.abs(logits - expected).max() < 1e-10
    assert np.abs(states - np.array([streams[t] for t in at])).max() < 1e-10


@pytest.mark.parametrize("arch", ["gpt2", "learned", "llama"])
def test_streams_beyond_the_last_position(arch):
    """The last learned position serves streams that would lie past the table's end."""
    model = tiny_model(arch, "conditional", seed=4, max_positions=5)
    ids = random_ids(np.random.default_rng(4), 5)
    _, states = run(model, ids, 5)
    _, _, streams = reference.run_text(model.params, model.config, ids, model.streams, range(5))
    assert np.abs(states - np.array(list(streams.values()))).max() < 1e-10


def test_options_are_not_idle():
    """Every option changes the streams: a test of the tests above."""
    ids, seen = random_ids(np.random.default_rng(5), 5), {}
    for name in ("paper", "same", "rotation", "insertion", "shared_lora", "lossless", "sees"):
        seen[name] = run(tiny_model("llama", name, seed=5), ids, 1)[1]
    names = list(seen)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            assert np.abs(seen[a] - seen[b]).max() > 1e-3, (a, b)


def test_value_rotation_needs_pairs_of_channels():
    with pytest.raises(ValueError, match="head_dim 5 is odd"):
        tiny_model("learned", "rotation", head_dim=5)


# --- garbage ------------------------------------------------------------------------------------

def garbage(where):
    """Patch: stream rows (bundle, stream) with where[bundle] enter as noise of size 1e3."""
    original = streams_module.insert_forward
    rng = np.random.default_rng(9)

    def insert(params, streams, main, positions):
        s, cache = original(params, streams, main, positions)
        rows = np.repeat(np.asarray(where), streams.count)
        s = np.where(rows[None, :, None], rng.normal(0.0, 1e3, s.shape), s)
        return s, cache

    return mock.patch.object(streams_module, "insert_forward", insert)


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("name", ["conditional", "lossless", "shared_lora", "rotation"])
def test_main_rows_do_not_feel_the_streams(arch, name):
    model = tiny_model(arch, name, seed=6, head_dim=6)
    ids = random_ids(np.random.default_rng(6), 6)
    logits, states = run(model, ids, 6)
    with garbage([True] * 6):
        moved, other = run(model, ids, 6)
    assert np.abs(moved - logits).max() < 1e-12
    assert np.abs(other - states).max() > 0.1
    assert np.abs(run(model, ids, 0)[0] - logits).max() < 1e-12


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_lossless_mode_computes_the_base_model(arch, scale):
    model, base = tiny_model(arch, "lossless", seed=7), tiny_model(arch, None, seed=7)
    params = {name: value if name in base.params else value * scale
              for name, value in model.params.items()}
    assert any(name.endswith(".lora_b") for name in params)
    model = type(model)(model.config, params, model.streams)
    ids = random_ids(np.random.default_rng(7), 7)
    assert np.abs(run(model, ids, 7)[0] - base.logits(ids)).max() < 1e-12


def test_a_stream_feels_its_own_position_alone():
    """Streams of other positions are never seen: garbage there moves no other stream."""
    model = tiny_model("llama", "conditional", seed=8)
    ids = random_ids(np.random.default_rng(8), 5)
    _, states = run(model, ids, 5)
    with garbage([False, True, False, True, False]):
        _, moved = run(model, ids, 5)
    assert np.abs(moved - states)[[0, 2, 4]].max() < 1e-12
    assert np.abs(moved - states)[[1, 3]].max(axis=(1, 2)).min() > 0.1


@pytest.mark.parametrize("t", range(5))
def test_a_main_row_sees_its_own_streams_only(t):
    """With one top layer a main row feels its own streams alone. (With more, it also feels the
    main rows before it, which felt theirs.)"""
    model = tiny_model("llama", stream_config("sees", layers=1), seed=9)
    ids = random_ids(np.random.default_rng(9), 5)
    logits, _ = run(model, ids, 5)
    with garbage(np.arange(5) != t):
        others, _ = run(model, ids, 5)
    with garbage(np.arange(5) == t):
        own, _ = run(model, ids, 5)
    assert np.abs(others[t] - logits[t]).max() < 1e-12
    assert np.abs(own[t] - logits[t]).max() > 1e-3
    assert np.abs(np.delete(own - logits, t, axis=0)).max() < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_tree_nodes_feel_the_streams_of_their_ancestors_alone(seed):
    rng = np.random.default_rng(seed)
    model = tiny_model("qwen", "sees", seed=10)
    prompt, tree = random_ids(rng, 4), random_tree(rng, 8)
    node = len(tree) - 1
    cache = model.new_cache()
    model.prefill(cache, prompt)
    logits = model.step(cache, tree).logits[node]
    with garbage(~tree.ancestors[node]):
        assert np.abs(model.step(cache, tree).logits[node] - logits).max() < 1e-12
    with garbage(tree.ancestors[node]):
        assert np.abs(model.step(cache, tree).logits[node] - logits).max() > 1e-3


# --- fused and deferred -------------------------------------------------------------------------

@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "learned"])
def test_fused_and_deferred_streams_are_the_same(arch, name):
    model = tiny_model(arch, name, seed=11, head_dim=6)
    rng = np.random.default_rng(11)
    prompt, tree = random_ids(rng, 5), random_tree(rng, 7)
    for node in range(len(tree)):
        cache = model.new_cache()
        model.prefill(cache, prompt)
        fused = model.step(cache, tree, fused=True)
        deferred = model.step(cache, tree)
        assert np.abs(fused.logits - deferred.logits).max() < 1e-12
        assert deferred.streams is None
        path = tree.path(node)
        cache.keep(path)
        states = model.deferred_streams(cache, deferred.hidden[node])
        assert np.abs(states - fused.streams[node]).max() < 1e-10
        ids = prompt + tree.token[path].tolist()
        last = len(ids) - 1
        _, _, expected = reference.run_text(model.params, model.config, ids, model.streams, [last])
        assert np.abs(states - expected[last]).max() < 1e-10
        for config in FORMS:
            trees = [Streams(config).draft(ids, StreamStates(model, s), room=9)
                     for s in (states, fused.streams[node])]
            assert same_tree(*trees)


FORMS = [TreeConfig(shape=shape, conditional=conditional, k=k, budget=6)
         for shape in ("full", "best_first") for conditional in (False, True) for k in (1, 3)]


def same_tree(a, b):
    return a.parent.tolist() == b.parent.tolist() and a.token.tolist() == b.token.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_run_drafts_the_same_trees_fused_and_deferred(form):
    model = tiny_model("mixed", "lossless", seed=12)
    runs = [generate(model, [3, 1, 4], 14, drafter="streams", tree=form.replace(fused=fused))
            for fused in (True, False)]
    assert runs[0].ids == runs[1].ids
    assert len(runs[0].steps) == len(runs[1].steps) > 3
    for a, b in zip(runs[0].steps[1:], runs[1].steps[1:]):
        assert same_tree(a.tree, b.tree)
    assert runs[0].stats.rows > runs[1].stats.rows
