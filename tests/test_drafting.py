"""Drafting from streams gives the trees of the definition, within the room there is.

The full product has 1 + sum of k^d nodes; best-first is the best of it; conditional trees equal a
brute-force expansion whose distributions come from reference.conditional. Other drafters stand
behind the same seam, alone or in a union.
"""

import numpy as np
import pytest
import reference
from scripted import Union
from tiny import random_ids, stream_config, tiny_model

from minispec.config import PAPER_TREE, TreeConfig
from minispec.drafters.prompt_lookup import PromptLookup
from minispec.drafters.streams import Streams
from minispec.generate import generate
from minispec.model import StreamStates


def states_of(arch="llama", name="conditional", seed=0):
    """A model, a text, and the streams beside its last id."""
    model, ids = tiny_model(arch, name, seed=seed), random_ids(np.random.default_rng(seed), 5)
    out = model.prefill(model.new_cache(), ids, streams=True)
    return model, ids, StreamStates(model, out.streams[0])


def nodes_of(tree):
    """{tokens below the root: score} of every node but the root."""
    return {tuple(tree.token[tree.path(n)[1:]].tolist()): tree.score[n]
            for n in range(1, len(tree))}


def best(probs, k):
    """The k most probable ids, the lowest first among equals."""
    return sorted(range(len(probs)), key=lambda v: (-probs[v], v))[:k]


def brute_force(next_probs, depth, k, budget=None):
    """{tokens: product of probabilities} of all products of the k best, or the `budget` best.

    next_probs(d, token before) -> (V,) probabilities of depth d."""
    found, level = {}, {(): 1.0}
    for d in range(1, depth + 1):
        level = {path + (v,): score * probs[v] for path, score in level.items()
                 for probs in [next_probs(d, path[-1] if path else None)] for v in best(probs, k)}
        found.update(level)
    ranked = sorted(found, key=lambda path: -found[path])
    return {path: found[path] for path in (ranked if budget is None else ranked[:budget])}


def same_nodes(a, b):
    return a.keys() == b.keys() and all(abs(a[n] - b[n]) < 1e-12 for n in a)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen"])
@pytest.mark.parametrize("k, depth", [(1, 3), (2, 3), (3, 2), (5, 1)])
def test_paper_streams_full_and_best_first(arch, k, depth):
    model, ids, streams = states_of(arch)
    ref = reference.Reference(model.params, model.config)
    probs = [reference.softmax(ref.head(state)) for state in streams.states]
    full = Streams(TreeConfig(shape="full", conditional=False, k=k, depth=depth)).draft(
        ids, streams, room=9)
    assert len(full) == 1 + sum(k ** d for d in range(1, depth + 1))
    assert full.token[0] == ids[-1]
    assert same_nodes(nodes_of(full), brute_force(lambda d, _: probs[d - 1], depth, k))
    for budget in (0, 1, 4, 100):
        tree = Streams(TreeConfig(conditional=False, k=k, depth=depth, budget=budget)).draft(
            ids, streams, room=9)
        assert len(tree) == min(1 + budget, len(full))
        expected = brute_force(lambda d, _: probs[d - 1], depth, k, budget)
        assert same_nodes(nodes_of(tree), expected)


def test_the_papers_tree():
    """k = 3 and three streams: 39 drafted nodes."""
    _, ids, streams = states_of()
    assert len(Streams(PAPER_TREE).draft(ids, streams, room=9)) == 1 + 3 + 9 + 27


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen"])
@pytest.mark.parametrize("k, depth, budget", [(1, 3, 2), (2, 3, 5), (3, 3, 8), (4, 2, 100)])
def test_conditional_trees_equal_brute_force(arch, k, depth, budget):
    model, ids, streams = states_of(arch)
    assert streams.conditional and streams.count == 3

    def next_probs(d, before):
        token = ids[-1] if before is None else before     # the root tells the first stream
        return reference.softmax(reference.conditional(
            model.params, model.config, streams.states[d - 1], d, token))

    config = TreeConfig(k=k, depth=depth, budget=budget)
    tree = Streams(config).draft(ids, streams, room=9)
    assert same_nodes(nodes_of(tree), brute_force(next_probs, depth, k, budget))
    full = Streams(config.replace(shape="full")).draft(ids, streams, room=9)
    assert same_nodes(nodes_of(full), brute_force(next_probs, depth, k))
    unaware = Streams(config.replace(conditional=False)).draft(ids, streams, room=9)
    assert not same_nodes(nodes_of(tree), nodes_of(unaware))


def test_a_model_without_the_map_falls_back_to_the_papers_streams():
    _, ids, streams = states_of(name="paper")
    assert not streams.conditional
    trees = [Streams(TreeConfig(conditional=c)).draft(ids, streams, room=9) for c in (True, False)]
    assert same_nodes(*map(nodes_of, trees))


@pytest.mark.parametrize("shape", ["full", "best_first"])
@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 9])
def test_room_limits_the_depth(shape, conditional, room):
    _, ids, streams = states_of()
    config = TreeConfig(shape=shape, conditional=conditional, k=2, budget=14)
    tree = Streams(config).draft(ids, streams, room)
    assert tree.max_depth == min(room, 3)
    assert tree.token[0] == ids[-1]
    shallow = Streams(config.replace(depth=1)).draft(ids, streams, room)
    assert shallow.max_depth == min(room, 1)


def test_k_above_the_vocabulary_takes_all_of_it():
    _, ids, streams = states_of()
    tokens, probs = streams.guesses(1000)
    assert tokens.shape == probs.shape == (3, 19)
    assert np.abs(probs.sum(axis=1) - 1).max() < 1e-12
    assert (np.diff(probs, axis=1) <= 0).all()


def test_equal_logits_rank_by_id():
    model = tiny_model("qwen", "conditional")
    head = np.zeros((16, 19))
    head[:, [12, 4, 7]] = 1.0
    params = dict(model.params, **{"head.w": head})
    streams = StreamStates(type(model)(model.config, params, model.streams), np.ones((3, 16)))
    tokens, probs = streams.guesses(3)
    assert tokens.tolist() == [[4, 7, 12]] * 3
    assert np.abs(probs - np.exp(16) / (3 * np.exp(16) + 16)).max() < 1e-15


# --- other drafters -----------------------------------------------------------------------------

def test_prompt_lookup_stands_behind_the_same_seam():
    """It also serves a model without streams, which the output shows nothing of."""
    model, prompt = tiny_model("llama", None, seed=1), [3, 1, 4, 1, 5, 3, 1]
    plain = generate(model, prompt, 20)
    out = generate(model, prompt, 20, drafter="prompt_lookup")
    assert out.ids == plain.ids and out.stats.drafted > 0
    assert out.ids == generate(model, prompt, 20, drafter=PromptLookup(2, 4)).ids


def test_a_union_drafts_both():
    model, ids, streams = states_of()
    ids = ids + ids[:3]
    lookup, own = PromptLookup(), Streams(TreeConfig(k=2, budget=5))
    lookup.begin(ids)
    both = Union([lookup, own])
    both.begin(ids)
    tree = both.draft(ids, streams, room=9)
    parts = [nodes_of(d.draft(ids, streams, 9)) for d in (lookup, own)]
    assert nodes_of(tree).keys() == parts[0].keys() | parts[1].keys()
    assert min(len(part) for part in parts) > 0
    for path, score in nodes_of(tree).items():
        assert score == max(part.get(path, 0.0) for part in parts)
    assert len(Union([lookup, own], budget=4).draft(ids, streams, 9)) == 5


def test_a_union_decodes_the_same_ids_in_fewer_passes():
    model, prompt = tiny_model("llama", stream_config("lossless"), seed=2), [3, 1, 4, 1]
    plain = generate(model, prompt, 30)
    runs = {name: generate(model, prompt, 30, drafter=drafter) for name, drafter in {
        "streams": Streams(TreeConfig()), "lookup": PromptLookup(),
        "union": Union([Streams(TreeConfig()), PromptLookup()])}.items()}
    assert all(run.ids == plain.ids for run in runs.values())
    passes = {name: run.stats.forwards for name, run in runs.items()}
    assert passes["union"] <= min(passes["streams"], passes["lookup"])
