"""tree.py: derived facts against brute force, builders against growing everything, bad input.

Brute force here works on paths (tuples of columns or tokens) and imports nothing but the API.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minispec.growing import best_first, chain, full_product, grow_by_depth, union
from minispec.tree import Tree


@st.composite
def trees(draw, largest=12, root=7, scored=False):
    """Random valid trees over few tokens, so that different branches repeat tokens."""
    parent, token, score = [-1], [root], [1.0]
    for _ in range(draw(st.integers(0, largest - 1))):
        above, word = draw(st.integers(0, len(parent) - 1)), draw(st.integers(0, 4))
        if (above, word) not in zip(parent, token):
            parent.append(above)
            token.append(word)
            score.append(score[above] * draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    return Tree(parent, token, score if scored else None)


def same(a, b):
    scores = (a.score is None) == (b.score is None)
    if scores and a.score is not None:
        scores = np.array_equal(a.score, b.score)
    rows = [(tree.parent.tolist(), tree.token.tolist()) for tree in (a, b)]
    return scores and rows[0] == rows[1]


def token_paths(tree):
    """{tokens root..n: score or None} over all nodes: a tree without its numbering."""
    score = [None] * len(tree) if tree.score is None else tree.score.tolist()
    return {tuple(tree.token[tree.path(n)].tolist()): score[n] for n in range(len(tree))}


# --- what follows from the two arrays ------------------------------------------------------------

@given(trees())
def test_derived_facts_equal_their_definitions(tree):
    for n in range(len(tree)):
        line, m = [], n
        while m != -1:
            line.append(m)
            m = int(tree.parent[m])
        assert tree.path(n) == line[::-1]
        assert tree.depth[n] == len(line) - 1
        assert tree.ancestors[n].tolist() == [m in line for m in range(len(tree))]
        kids = [m for m in range(len(tree)) if tree.parent[m] == n]
        assert tree.children(n) == kids
        for word in range(6):
            want = [m for m in kids if tree.token[m] == word]
            assert tree.find_child(n, word) == (want[0] if want else None)
    assert tree.positions(5).tolist() == [5 + d for d in tree.depth.tolist()]
    leaves = [n for n in range(len(tree)) if n not in tree.parent.tolist()]
    assert tree.paths() == [tree.path(n) for n in leaves]
    assert tree.max_depth == max(len(path) for path in tree.paths()) - 1


def test_h19_siblings_neither_see_each_other_nor_sit_in_a_row():
    tree = Tree([-1, 0, 0, 2], [10, 11, 12, 13])
    assert tree.ancestors.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0],
                                                   [1, 0, 1, 0], [1, 0, 1, 1]]
    assert tree.positions(100).tolist() == [100, 101, 101, 102]


def test_arrays_are_int32_and_frozen():
    given_parent = np.array([-1, 0])
    tree = Tree(given_parent, [3, 4], [1, 0.5])
    given_parent[1] = 9                   # the caller's array is not the tree's
    assert tree.parent.tolist() == [-1, 0]
    for array in (tree.parent, tree.token, tree.depth, tree.positions(2)):
        assert array.dtype == np.int32
    for array in (tree.parent, tree.token, tree.score, tree.depth, tree.ancestors):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("parent, token, score, message", [
    ([], [], None, "expected a row of whole numbers"),
    ([-1, 0], [1], None, "two equal lengths"),
    ([[-1]], [[1]], None, "expected a row"),
    ([-1.0], [1], None, "whole numbers"),
    ([0], [1], None, r"parent\[0\] is 0, expected -1"),
    ([-1, -1], [1, 2], None, r"parent\[1\] is -1, expected 0..0"),
    ([-1, 1], [1, 2], None, r"parent\[1\] is 1, expected 0..0"),
    ([-1, 2, 0], [1, 2, 3], None, r"parent\[1\] is 2, expected 0..0"),
    ([-1, 0], [1, -2], None, r"token\[1\] is -2"),
    ([-1, 0, 0], [1, 2, 2], None, "siblings with different tokens"),
    ([-1, 0], [1, 2], [1.0], "score has 1 entries"),
    ([-1, 0], [1, 2], [0.5, 0.5], "1 for the root"),
    ([-1, 0, 1], [1, 2, 3], [1, 0.2, 0.3], r"score\[2\] is 0.3, expected 0..0.2"),
    ([-1, 0], [1, 2], [1, float("nan")], r"score\[1\] is nan"),
    ([-1, 0], [1, 2], [1, -0.5], r"score\[1\] is -0.5"),
])
def test_invalid_trees_are_refused(parent, token, score, message):
    with pytest.raises(ValueError, match=message):
        Tree(parent, token, score)


def test_same_token_in_different_branches_is_fine():
    assert len(Tree([-1, 0, 0, 1, 2], [5, 5, 6, 6, 6])) == 5


# --- smaller trees -------------------------------------------------------------------------------

@given(trees(scored=True), st.data())
def test_close_then_take_keeps_exactly_the_unbroken_paths(tree, data):
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree))))
    closed = tree.close(keep)
    want = [all(keep[m] for m in tree.path(n)) for n in range(len(tree))]
    assert closed.tolist() == want
    if not keep[0]:
        with pytest.raises(ValueError, match="the root is not among them"):
            tree.take(keep)
        return
    if (closed != keep).any():
        with pytest.raises(ValueError, match="the parent of node"):
            tree.take(keep)
    small = tree.take(closed)
    old = token_paths(tree)
    numbers = np.flatnonzero(closed)
    assert token_paths(small) == {key: old[key] for n, key in enumerate(old) if closed[n]}
    assert small.token.tolist() == tree.token[numbers].tolist()           # old order
    assert same(small, tree.take(numbers[::-1]))                          # numbers, in any order


def test_take_refuses_masks_and_numbers_that_do_not_fit():
    tree = chain(1, [2, 3])
    for keep in ([True, True], [0, 3], [0, -1], [[0]], []):
        with pytest.raises(ValueError):
            tree.take(keep)


@given(trees(scored=True), st.integers(0, 6))
def test_cut_drops_what_lies_deeper(tree, depth):
    want = {key: score for key, score in token_paths(tree).items() if len(key) <= depth + 1}
    assert token_paths(tree.cut(depth)) == want


@given(trees(scored=True), st.integers(1, 14))
def test_truncate_keeps_the_best_scores(tree, count):
    order = sorted(range(len(tree)), key=lambda n: (-tree.score[n], n))[:count]
    assert same(tree.truncate(count), tree.take(order))
    plain = Tree(tree.parent, tree.token)
    assert same(plain.truncate(count), plain.take(list(range(min(count, len(tree))))))


def test_cut_and_truncate_refuse_nonsense():
    with pytest.raises(ValueError, match="max_depth is -1"):
        chain(1, [2]).cut(-1)
    with pytest.raises(ValueError, match="max_nodes is 0"):
        chain(1, [2]).truncate(0)


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


# --- render --------------------------------------------------------------------------------------

def test_render_draws_branches_scores_and_the_accepted_path():
    tree = Tree([-1, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5], [1, 0.6, 0.4, 0.3, 0.2, 0.1])
    words = ["the", "cat", "dog", "sat", "ran", "barked"]
    assert tree.render(words.__getitem__, path=[0, 1, 4]) == "\n".join([
        "the ✓",
        "├─ cat 0.60 ✓",
        "│  ├─ sat 0.30",
        "│  └─ ran 0.20 ✓",
        "└─ dog 0.40",
        "   └─ barked 0.10"])
    assert chain(8, [9]).render() == "8\n└─ 9"
