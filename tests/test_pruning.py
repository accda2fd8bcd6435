"""Pruning drops guesses, never answers: scores and survivors are as defined, the output stays.

Scores equal a softmax by hand; survivors are closed under ancestors, hold the root, shrink with
the threshold, fit the budget; logits of the survivors, and with them the ids, do not change.
"""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Noisy
from tiny import random_ids, random_tree, stream_config, tiny_model

from minispec.config import TreeConfig
from minispec.generate import generate, start
from minispec.pruning import exit_scores, survivors
from minispec.tree import Tree


@st.composite
def scored_trees(draw):
    """A Tree and early-exit scores; few different values, so that ties are common."""
    nodes = draw(st.integers(1, 12))
    parent = [-1] + [draw(st.integers(0, n - 1)) for n in range(1, nodes)]
    score = [1.0] + draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]),
                                  min_size=nodes - 1, max_size=nodes - 1))
    return Tree(parent, list(range(nodes))), np.array(score)


def by_hand(tree, scores, threshold):
    """Nodes whose whole path passes the threshold."""
    return [n for n in range(len(tree))
            if all(scores[m] >= threshold for m in tree.path(n) if m)]


@settings(max_examples=200, deadline=None)
@given(scored_trees(), st.sampled_from([0.0, 0.05, 0.1, 0.5, 0.7, 1.0]))
def test_threshold_keeps_exactly_the_nodes_whose_path_passes(case, threshold):
    tree, scores = case
    assert survivors(tree, scores, threshold).tolist() == by_hand(tree, scores, threshold)


@settings(max_examples=200, deadline=None)
@given(scored_trees(), st.sampled_from([0.0, 0.1, 0.5]), st.integers(1, 12))
def test_budget_keeps_the_best_products_and_stays_closed(case, threshold, budget):
    tree, scores = case
    kept = survivors(tree, scores, threshold, budget).tolist()
    candidates = by_hand(tree, scores, threshold)
    assert kept == sorted(set(kept)) and kept[0] == 0
    assert set(kept) <= set(candidates)
    assert all(tree.parent[n] in kept for n in kept[1:])
    assert len(kept) == 1 + min(budget, len(candidates) - 1)
    along = {n: np.prod(scores[tree.path(n)]) for n in candidates}
    left_out = [along[n] for n in candidates if n not in kept]
    assert max(left_out, default=0.0) <= min(along[n] for n in kept) + 1e-15


@settings(max_examples=100, deadline=None)
@given(scored_trees(), st.integers(0, 6))
def test_a_higher_threshold_keeps_a_subset(case, budget):
    tree, scores = case
    last = set(range(len(tree)))
    for threshold in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0):
        kept = set(survivors(tree, scores, threshold).tolist())
        assert kept <= last and 0 in kept
        last = kept
    small = set(survivors(tree, scores, 0.0, budget).tolist())
    large = set(survivors(tree, scores, 0.0, budget + 1).tolist())
    assert not budget or small <= large


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen", "mixed"])
@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_a_softmax_by_hand(arch, seed):
    """early[n] = softmax(head(norm(h[n] down up))), read at each child's token."""
    rng = np.random.default_rng(seed)
    model, tree = tiny_model(arch, "conditional", seed=1), random_tree(rng, 8)
    h = rng.normal(size=(len(tree), 16))
    scores = exit_scores(model.params, model.config, h, tree)
    ref = reference.Reference(model.params, model.config)
    assert scores[0] == 1
    for n in range(1, len(tree)):
        exit_state = h[tree.parent[n]] @ model.params["prune.down"] @ model.params["prune.up"]
        early = reference.softmax(ref.head(ref.norm("norm", exit_state)))
        assert abs(scores[n] - early[tree.token[n]]) < 1e-12


def test_a_lone_root_has_score_one():
    model = tiny_model("llama", "conditional")
    assert exit_scores(model.params, model.config, np.zeros((1, 16)), Tree([-1], [3])) == [1.0]


@pytest.mark.parametrize("name", ["conditional", "sees", "all_layers", "lossless"])
@pytest.mark.parametrize("fused", [False, True])
def test_survivors_compute_what_they_computed_before(name, fused):
    """Logits, hidden states, streams and cached rows of the survivors; scores from layer L-A."""
    model = tiny_model("llama", name, seed=2)
    rng = np.random.default_rng(2)
    prompt, tree = random_ids(rng, 4), random_tree(rng, 9, root=7)
    whole_cache, cache = model.new_cache(), model.new_cache()
    for c in (whole_cache, cache):
        model.prefill(c, prompt)
    whole = model.step(whole_cache, tree, fused)
    node = len(tree) - 1
    kept = np.flatnonzero(tree.ancestors[node])
    given = []
    out = model.step(cache, tree, fused, lambda scores: given.append(scores) or kept)
    assert len(kept) < len(tree) and out.kept.tolist() == kept.tolist()
    expected = exit_scores(model.params, model.config, whole.hidden, tree)
    assert np.abs(given[0] - expected).max() < 1e-12
    assert np.abs(out.logits - whole.logits[kept]).max() < 1e-12
    assert np.abs(out.hidden - whole.hidden[kept]).max() < 1e-12
    if out.streams is not None:
        assert np.abs(out.streams - whole.streams[kept]).max() < 1e-12
    with_streams = fused or name == "sees"
    assert out.rows == len(kept) * (1 + model.streams.count * with_streams)
    whole_cache.keep(kept)
    cache.keep(range(len(kept)))
    end = len(cache)
    assert end == len(whole_cache) == 4 + len(kept)
    assert np.abs(cache.keys[..., :end, :] - whole_cache.keys[..., :end, :]).max() < 1e-12
    assert np.abs(cache.values[..., :end, :] - whole_cache.values[..., :end, :]).max() < 1e-12


def test_pruning_nothing_is_no_pruning():
    model, tree = tiny_model("llama", "conditional"), Tree([-1, 0, 0], [1, 2, 3])
    cache = model.new_cache()
    model.prefill(cache, [1, 2])
    assert model.step(cache, tree, prune=lambda scores: np.arange(3)).kept is None


@pytest.mark.parametrize("name", ["conditional", "sees", "lossless"])
@pytest.mark.parametrize("drafter", ["streams", "noisy"])
def test_output_is_the_same_at_any_threshold(name, drafter):
    model, prompt = tiny_model("learned", name, seed=3), [3, 1]
    plain = generate(model, prompt, 20)
    last = None
    for threshold, budget in ((0, 0), (1e-9, 0), (0.02, 0), (0.2, 0), (1.0, 0), (0, 1), (0, 4),
                              (0.02, 3)):
        drafts = (drafter if drafter == "streams" else
                  Noisy(prompt, plain.ids, np.random.default_rng(4), 19))
        tree = TreeConfig(budget=8, prune_threshold=threshold, prune_budget=budget)
        out = generate(model, prompt, 20, drafter=drafts, tree=tree)
        assert out.ids == plain.ids, (threshold, budget)
        sizes = [len(step.tree) for step in out.steps[1:]]
        assert not budget or max(sizes) <= 1 + budget
        if threshold == 1.0:              # prunes all but the root: plain decoding
            assert set(sizes) == {1} and out.stats.tokens_per_forward == 1
            assert out.stats.drafted > 0
        if budget == 0 and drafter == "streams":
            assert last is None or out.stats.forwards >= last
            last = out.stats.forwards


def test_pruning_needs_the_map():
    model = tiny_model("llama", stream_config("paper", prune_rank=0))
    tree = TreeConfig(prune_threshold=0.1)
    with pytest.raises(ValueError, match="pruned, but this model has no pruning map"):
        start(model, [1], 4, "streams", 0.0, 0, 1.0, 0, (), tree)
