"""Attention in both forms equals three plain loops, for any mask, to 1e-12.

The factored multi-stream form never builds the large mask; it must equal plain attention under
`masks.explicit`, whatever is cached, grouped, or seen.
"""

import numpy as np
import pytest
import reference

from minispec import attention, masks

HEADS = [(4, 4), (4, 2), (6, 2), (3, 1)]  # H, Hkv


def normal(rng, *shape):
    return rng.normal(0.0, 2.0, shape)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("masks_given", [1, 2])
def test_plain_attention_equals_the_loops(heads, kv_heads, masks_given):
    rng = np.random.default_rng(heads * 10 + kv_heads)
    q, k, v = (normal(rng, 2, h, n, 4) for h, n in ((heads, 3), (kv_heads, 5), (kv_heads, 5)))
    mask = rng.random((masks_given, 3, 5)) < 0.6
    mask[0, 1] = False                    # a row that sees nothing
    y, _ = attention.attention_forward(q, k, v, mask)
    expected = reference.attention(q, k, v, np.broadcast_to(mask, (2, 3, 5)))
    assert np.abs(y - expected).max() < 1e-12


def test_a_row_that_sees_nothing_gives_zeros():
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, 1, 2, 3, 4) for _ in range(3))
    y, _ = attention.attention_forward(q * 1e4, k, v, np.zeros((1, 3, 3), dtype=bool))
    assert (y == 0).all()


def test_large_scores_stay_finite():
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, 1, 2, 3, 4) for _ in range(3))
    y, _ = attention.attention_forward(q * 1e3, k * 1e3, v, masks.causal(3)[None])
    expected = reference.attention(q * 1e3, k * 1e3, v, masks.causal(3)[None])
    assert np.abs(y - expected).max() < 1e-12


def view_of(case, rng, batch):
    """A random View of the named kind, with 4 cached keys where it has any."""
    context = rng.random((batch, 4, 8)) < 0.7
    context[:, :, 0] = True
    sees = rng.random((batch, 2)) < 0.5
    return {
        "no streams": masks.View(4, context),
        "last two": masks.View(4, context, 2, 3),
        "all rows": masks.View(4, context, 4, 2),
        "one": masks.View(1, context[:, :1], 1, 4),
        "sees own": masks.View(4, context, 2, 3, np.ones((1, 2), dtype=bool)),
        "some see own": masks.View(4, context, 2, 3, sees),
        "all see own": masks.View(4, context, 4, 2, np.ones((1, 4), dtype=bool)),
        "streams alone": masks.View(0, context[:, :3], 3, 2),
        "one bundle alone": masks.View(0, context[:, :1], 1, 4),
        "shared context": masks.View(4, context[:1], 2, 3, sees),
        "sees nothing": masks.View(4, np.zeros_like(context), 2, 3),
    }[case]


CASES = ["no streams", "last two", "all rows", "one", "sees own", "some see own", "all see own",
         "streams alone", "one bundle alone", "shared context", "sees nothing"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_factored_attention_equals_the_loops_under_the_explicit_mask(case, heads, kv_heads):
    rng = np.random.default_rng([heads, kv_heads, len(case)])
    view = view_of(case, rng, batch=2)
    keys, streams = view.context.shape[2], view.rows - view.main
    q = normal(rng, 2, heads, view.rows, 4)
    k, v = normal(rng, 2, kv_heads, keys, 4), normal(rng, 2, kv_heads, keys, 4)
    k_own, v_own = normal(rng, 2, kv_heads, streams, 4), normal(rng, 2, kv_heads, streams, 4)
    y, _ = attention.multi_stream_forward(q, k, v, k_own, v_own, view)
    mask = masks.explicit(view)
    everything = [np.concatenate(pair, axis=2) for pair in ((k, k_own), (v, v_own))]
    expected = reference.attention(q, *everything, np.broadcast_to(mask, (2, *mask.shape[1:])))
    assert np.abs(y - expected).max() < 1e-12
    plain, _ = attention.attention_forward(q, *everything, mask)
    assert np.abs(y - plain).max() < 1e-12


def test_inputs_are_left_alone():
    rng = np.random.default_rng(3)
    view = view_of("some see own", rng, batch=2)
    arrays = [normal(rng, 2, 4, view.rows, 4), *(normal(rng, 2, 2, 8, 4) for _ in range(2)),
              *(normal(rng, 2, 2, 6, 4) for _ in range(2))]
    before = [a.copy() for a in arrays]
    attention.multi_stream_forward(*arrays, view)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before))


def test_rope_turns_pairs_of_halves():
    """Channel i pairs with i + D/2 (case H-21), by position * theta^(-2i/D)."""
    cos, sin = attention.rope_table(np, np.arange(5.0), 8, 100.0, "float64")
    x = normal(np.random.default_rng(4), 1, 1, 5, 8)
    y, _ = attention.rotate_forward(x, cos, sin)
    for t in range(5):
        angles = [t * 100.0 ** (-2 * i / 8) for i in range(4)]
        assert np.abs(y[0, 0, t] - reference.rotate(x[0, 0, t], angles)).max() < 1e-12


def test_rope_scores_depend_on_distance_alone():
    rng = np.random.default_rng(5)
    q, k = normal(rng, 8), normal(rng, 8)

    def score(a, b):
        cos, sin = attention.rope_table(np, np.array([a, b], dtype=float), 8, 1e4, "float64")
        y, _ = attention.rotate_forward(np.stack([q, k])[None, None], cos, sin)
        return y[0, 0, 0] @ y[0, 0, 1]

    assert abs(score(3, 1) - score(41, 39)) < 1e-12
    assert abs(score(3, 1) - score(3, 2)) > 1e-3
