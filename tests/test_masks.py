"""Masks are the paper's pictures: every builder equals its definition, key by key.

The definitions are `reference.sees` for streams and a walk up the tree for nodes (case H-19);
documents never look across their ends (case H-36).
"""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_tree

from minispec import masks
from minispec.tree import Tree


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5))
def test_causal_sees_the_cache_and_itself_and_nothing_later(rows, cached):
    mask = masks.causal(rows, cached)
    assert mask.shape == (rows, cached + rows) and mask.dtype == bool
    for t in range(rows):
        assert mask[t].tolist() == [key <= cached + t for key in range(cached + rows)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_documents_are_causal_inside_and_blind_across(rows):
    documents = np.array(rows)
    mask = masks.causal_documents(documents)
    for b, row in enumerate(rows):
        for t in range(5):
            for j in range(5):
                allowed = t == j or (j < t and row[t] == row[j] and row[t] >= 0)
                assert mask[b, t, j] == allowed, (row, t, j)


def test_padding_is_never_seen_by_a_document():
    mask = masks.causal_documents(np.array([[-1, -1, 0, 0, 1, -1]]))
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def test_h19_siblings_do_not_see_each_other():
    tree = Tree([-1, 0, 0, 2], [5, 6, 7, 8])
    mask = masks.tree_context(tree.ancestors, cached=3)
    assert mask[:, :3].all()
    assert mask[:, 3:].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0],
                                                [1, 0, 1, 1]]
    assert tree.positions(3).tolist() == [3, 4, 4, 5]


@pytest.mark.parametrize("seed", range(20))
def test_tree_context_is_the_way_up_to_the_root(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 12)))
    cached = int(rng.integers(0, 4))
    mask = masks.tree_context(tree.ancestors, cached)
    for n in range(len(tree)):
        path = reference.chain_to(tree.parent, n)
        assert mask[n].tolist() == [True] * cached + [m in path for m in range(len(tree))]


def test_own_streams_see_the_earlier_ones():
    assert masks.own_streams(3).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_stream_positions_ahead_and_same():
    assert masks.stream_positions(np.array([4, 7]), 3).tolist() == [5, 6, 7, 8, 9, 10]
    assert masks.stream_positions(np.array([4, 7]), 3, ahead=False).tolist() == [4] * 3 + [7] * 3
    two = masks.stream_positions(np.array([[0, 1], [5, 6]]), 2)
    assert two.tolist() == [[1, 2, 2, 3], [6, 7, 7, 8]]


@pytest.mark.parametrize("main_sees", [False, True])
@pytest.mark.parametrize("cached, rows, bundles, streams", [
    (0, 4, 4, 3), (2, 4, 2, 3), (3, 3, 1, 4), (0, 1, 1, 1), (5, 1, 1, 2)])
def test_explicit_equals_the_definition(cached, rows, bundles, streams, main_sees):
    sees_own = np.ones((1, bundles), dtype=bool) if main_sees else None
    view = masks.View(rows, masks.causal(rows, cached)[None], bundles, streams, sees_own)
    mask = masks.explicit(view)
    row_of = ([reference.Row(cached + t, 0, None) for t in range(rows)]
              + [reference.Row(cached + t, g, None) for t in range(rows - bundles, rows)
                 for g in range(1, streams + 1)])
    keys = [reference.Row(t, 0, None) for t in range(cached)] + row_of
    assert mask.shape == (1, view.rows, cached + view.rows)
    for n, row in enumerate(row_of):
        expected = [reference.sees(row, key, main_sees) for key in keys]
        assert mask[0, n].tolist() == expected, (n, row.t, row.g)


def test_explicit_per_bundle_and_per_text():
    """`sees_own` may differ between bundles and between the texts of a batch."""
    sees_own = np.array([[True, False], [False, True]])
    view = masks.View(3, masks.causal(3)[None], 2, 2, sees_own)
    mask = masks.explicit(view)
    assert mask.shape == (2, 7, 7)
    own = mask[:, 1:3, 3:].astype(int)    # the two main rows that are bundles, stream keys
    assert own.tolist() == [[[1, 1, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 1, 1]]]
    assert not mask[:, 0, 3:].any()       # a main row that is no bundle


def test_explicit_streams_alone():
    """T = 0: the bundles' main rows are in the cache, only streams run."""
    view = masks.View(0, np.array([[[1, 1, 1, 0], [1, 0, 1, 1]]], dtype=bool), 2, 2)
    assert view.rows == 4
    assert masks.explicit(view)[0].astype(int).tolist() == [
        [1, 1, 1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 0, 1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0, 1, 1]]


def test_streams_of_tree_nodes_see_what_their_node_sees():
    tree = Tree([-1, 0, 0, 2], [5, 6, 7, 8])
    context = masks.tree_context(tree.ancestors, cached=2)
    view = masks.View(4, context[None], 4, 2)
    mask = masks.explicit(view)[0]
    for n in range(4):
        for g in range(2):
            row = mask[4 + 2 * n + g]
            assert row[:6].tolist() == context[n].tolist()
            own = [bundle == n and other <= g for bundle in range(4) for other in range(2)]
            assert row[6:].tolist() == own


def test_h36_streams_stay_in_their_document():
    """Two packed documents: no stream sees a key of the other one, nor another bundle's streams."""
    documents = np.array([[0, 0, 0, 1, 1]])
    view = masks.View(5, masks.causal_documents(documents), 5, 2)
    mask = masks.explicit(view)[0]
    for t in range(5):
        for g in range(2):
            row = mask[5 + 2 * t + g]
            same = [bool(documents[0, j] == documents[0, t] and j <= t) for j in range(5)]
            assert row[:5].tolist() == same
            assert np.flatnonzero(row[5:]).tolist() == [2 * t + o for o in range(g + 1)]
