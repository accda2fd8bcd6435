"""tree.py: derived facts against brute force, smaller trees, drawing, bad input.

Brute force here works on paths (tuples of columns or tokens) and imports nothing but the API.
"""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from minispec.growing import chain
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
