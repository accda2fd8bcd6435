"""growing.py: every builder against growing everything, unions, bad input.

Brute force here works on paths (tuples of columns or tokens) and imports nothing but the API.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_tree import same, token_paths, trees

from minispec.growing import best_first, chain, full_product, grow_by_depth, union
from minispec.tree import Tree


# --- growing -------------------------------------------------------------------------------------

def grow_all(root, children, depth):
    """Every node as (-score, depth, columns, tokens), best first: the order the builders promise.

    children(d, token) -> (tokens, probs) of a node's children at depth d.
    """
    nodes, level = [(-1.0, 0, (), (root,))], [(1.0, (), (root,))]
    for d in range(1, depth + 1):
        below = []
        for score, columns, tokens in level:
            for column, (word, prob) in enumerate(zip(*children(d, tokens[-1]))):
                below.append((score * prob, columns + (column,), tokens + (word,)))
        nodes += [(-score, d, columns, tokens) for score, columns, tokens in below]
        level = below
    return sorted(nodes)


def by_brute_force(root, children, depth, budget):
    best = grow_all(root, children, depth)[:budget + 1]
    rows = sorted((d, columns, tokens, -score) for score, d, columns, tokens in best)
    number = {columns: n for n, (_, columns, _, _) in enumerate(rows)}
    parent = [-1] + [number[columns[:-1]] for _, columns, _, _ in rows[1:]]
    return Tree(parent, [row[2][-1] for row in rows], [row[3] for row in rows])


@st.composite
def levels(draw):
    """top_tokens (G, k), top_probs (G, k), with many ties and in no particular order."""
    count, k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(9)[:k] for _ in range(count)])
    coarse = rng.integers(0, 4, (count, k)) / 4
    fine = rng.dirichlet(np.ones(k + 1), count)[:, :k]
    return tokens, draw(st.sampled_from([coarse, fine]))


@given(levels(), st.integers(0, 30), st.data())
def test_best_first_equals_brute_force_and_the_truncated_product(level, budget, data):
    tokens, probs = level
    depth = data.draw(st.integers(0, len(tokens)))
    tree = best_first(7, tokens, probs, budget, depth)
    children = lambda d, _: (tokens[d - 1].tolist(), probs[d - 1].tolist())
    assert same(tree, by_brute_force(7, children, depth, budget))
    assert same(tree, full_product(7, tokens, probs, depth, max_nodes=budget + 1))
    assert len(tree) == min(budget + 1, sum(tokens.shape[1] ** d for d in range(depth + 1)))


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 4), st.integers(0, 20),
       st.booleans())
def test_grow_by_depth_equals_growing_everything(seed, k, depth, budget, ties):
    rng = np.random.default_rng(seed)
    vocab = 5
    tokens = np.stack([[rng.permutation(vocab)[:k] for _ in range(vocab)]
                       for _ in range(depth + 1)])                # (depth + 1, V, k)
    probs = rng.integers(0, 4, tokens.shape) / 4 if ties else rng.random(tokens.shape) / k
    calls = []

    def expand(d, parents):
        assert parents.dtype == np.int32
        calls.append((d, len(parents)))
        return tokens[d, parents], probs[d, parents]

    tree = grow_by_depth(2, expand, depth, budget)
    children = lambda d, token: (tokens[d, token].tolist(), probs[d, token].tolist())
    assert same(tree, by_brute_force(2, children, depth, budget))
    assert [d for d, _ in calls] == list(range(1, len(calls) + 1))        # one call per depth
    assert all(m <= max(budget, 1) for _, m in calls)                     # the good nodes only


def test_grow_by_depth_expands_only_what_can_still_count():
    """Budget 2, children 0.9 and 0.1: below depth 1, node 0.1 can't beat 0.9 and 0.81."""
    expanded = []

    def expand(d, parents):
        expanded.append(parents.tolist())
        return np.tile([3, 4], (len(parents), 1)), np.tile([0.9, 0.1], (len(parents), 1))

    assert token_paths(grow_by_depth(1, expand, 3, 2)).keys() == {(1,), (1, 3), (1, 3, 3)}
    assert expanded == [[1], [3, 4], [3]]


def test_full_product_is_the_papers_tree():
    """The paper's example: 2 streams, k = 2, seven nodes, the same children below both branches."""
    tree = full_product(0, [[1, 2], [3, 4]], None, 2)
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.token.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert tree.score is None


@pytest.mark.parametrize("k, depth", [(1, 4), (3, 3), (5, 2), (2, 0)])
def test_full_product_holds_every_combination(k, depth):
    rng = np.random.default_rng(k)
    tokens = np.stack([rng.permutation(20)[:k] for _ in range(4)])
    probs = rng.dirichlet(np.ones(k), 4)
    tree = full_product(99, tokens, probs, depth)
    assert len(tree) == sum(k ** d for d in range(depth + 1))
    want = {(99, *(tokens[d, c] for d, c in enumerate(columns))):
            np.prod([probs[d, c] for d, c in enumerate(columns)])
            for d in range(depth + 1) for columns in product(range(k), repeat=d)}
    have = token_paths(tree)
    assert have.keys() == want.keys()
    assert all(abs(have[key] - want[key]) < 1e-12 for key in want)
    assert (np.diff(tree.depth) >= 0).all()


def test_full_product_without_probabilities_is_cut_in_node_order():
    tree = full_product(0, [[1, 2], [3, 4]], None, 2, max_nodes=4)
    assert tree.parent.tolist() == [-1, 0, 0, 1]
    assert tree.token.tolist() == [0, 1, 2, 3]


def test_builders_take_float32_rounding_but_not_logits():
    above_one = np.array([[1.0000001, 0.0]], dtype=np.float32)
    assert best_first(0, [[1, 2]], above_one, 2, 1).score.tolist() == [1, 1, 0]
    for probs in ([[2.5, 1.0]], [[-0.5, 0.5]], [[float("nan"), 0.1]]):
        with pytest.raises(ValueError, match="between 0 and 1"):
            best_first(0, [[1, 2]], probs, 2, 1)


@pytest.mark.parametrize("build, message", [
    (lambda: best_first(0, [[1]], [[1.0]], -1, 1), "budget is -1"),
    (lambda: best_first(0, [[1]], [[1.0]], 1, -1), "depth is -1"),
    (lambda: best_first(0, [[1]], [[1.0]], 1, 2), "depth is 2, but there are guesses for 1"),
    (lambda: best_first(0, [[1, 2]], [[1.0]], 1, 1), r"tokens have shape \(1, 2\)"),
    (lambda: full_product(0, [[1]], None, 1, max_nodes=0), "max_nodes is 0"),
    (lambda: full_product(0, [[1, 1]], None, 1), "siblings with different tokens"),
    (lambda: grow_by_depth(0, lambda d, t: ([[1], [2]], [[1.0], [1.0]]), 1, 4),
     r"expected both \(1, k\)"),
    (lambda: grow_by_depth(0, None, 1, -1), "budget is -1"),
])
def test_builders_refuse_nonsense(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_chain():
    assert same(chain(4, [5, 5, 6]), Tree([-1, 0, 1, 2], [4, 5, 5, 6]))
    assert same(chain(4, [5, 6], [0.5, 0.5]), Tree([-1, 0, 1], [4, 5, 6], [1, 0.5, 0.25]))
    assert same(chain(4, [], []), Tree([-1], [4], [1]))


# --- union ---------------------------------------------------------------------------------------

@given(st.lists(trees(largest=7, scored=True), min_size=1, max_size=3), st.integers(0, 12))
def test_union_holds_every_path_once_with_its_best_score(parts, budget):
    merged = union(parts)
    want = {}
    for part in parts:
        for key, score in token_paths(part).items():
            want[key] = max(score, want.get(key, 0.0))
    assert token_paths(merged) == want
    assert len(merged) == len(want)
    best = union(parts, budget)
    assert same(best, merged.truncate(budget + 1))
    assert sorted(best.score) == sorted(sorted(want.values(), reverse=True)[:budget + 1])
    bare = union([Tree(part.parent, part.token) for part in parts])
    assert bare.score is None or len(bare) == 1
    assert token_paths(bare).keys() == want.keys()


def test_union_of_streams_and_a_copied_chain():
    streams = Tree([-1, 0, 0, 1], [1, 2, 3, 4], [1, 0.6, 0.3, 0.2])
    copied = chain(1, [2, 5], [0.5, 0.5])
    merged = union([streams, Tree([-1], [1]), copied], budget=3)
    assert token_paths(merged) == {(1,): 1, (1, 2): 0.6, (1, 3): 0.3, (1, 2, 5): 0.25}


@pytest.mark.parametrize("parts, budget, message", [
    ([], None, "root tokens are"),
    ([chain(1, [2]), chain(3, [2])], None, r"root tokens are \[1, 3\]"),
    ([chain(1, [2], [0.5]), chain(1, [3])], 2, "a budget needs scores"),
    ([chain(1, [2], [0.5])], -1, "budget is -1"),
])
def test_union_refuses_nonsense(parts, budget, message):
    with pytest.raises(ValueError, match=message):
        union(parts, budget)
