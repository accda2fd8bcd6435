"""Claim: the parts that families added compute what their definitions say.

The error function, scaled rotary frequencies, partial rotary, sliding windows (in training, cached
decoding, trees and streams alike) and the orders of a block, each against a plain computation.
Their gradients: test_ops_grad.py and test_model_grad.py. Against transformers: test_families.py.
"""

import math

import numpy as np
import pytest

import reference
from gradcheck import Problem
from minispec import masks
from minispec.attention import rope_table, rotate_forward
from minispec.backend import erf
from minispec.config import ModelConfig
from minispec.layers import ACTIVATIONS
from minispec.model import Model
from minispec.parameters import base_shapes, init_params
from minispec.rope_scaling import rope_stretch
from minispec.transformer import embed_forward, norm_forward
from tiny import stream_config, tiny_model


# --- activations --------------------------------------------------------------------------------

def test_erf_is_exact_enough_in_both_precisions():
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, 1e-300, -1e-8, 30.0, -np.inf, np.inf]])
    exact = np.array([math.erf(v) for v in x])
    assert np.abs(erf(x) - exact).max() < 1e-14
    single = erf(x.astype("float32"))
    assert single.dtype == np.float32 and np.abs(single - exact).max() < 4e-7
    assert np.array_equal(erf(-x), -erf(x))               # odd, to the bit
    assert np.isnan(erf(np.array([np.nan]))).all() and erf(np.zeros((2, 0))).shape == (2, 0)


def test_activations_by_their_definitions():
    x = np.linspace(-6, 6, 401)
    by_hand = {
        "relu": [max(v, 0.0) for v in x],
        "gelu_exact": [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x],
        "gelu": [v * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
                 for v in x],
        "silu": [v / (1 + math.exp(-v)) for v in x]}
    assert by_hand.keys() == ACTIVATIONS.keys()
    for name, expected in by_hand.items():
        y, _ = ACTIVATIONS[name][0](x)
        assert np.abs(y - expected).max() < 1e-13, name
        assert ACTIVATIONS[name][0](x.astype("float32"))[0].dtype == np.float32
    tanh, exact = (ACTIVATIONS[n][0](x)[0] for n in ("gelu", "gelu_exact"))
    assert 1e-4 < np.abs(tanh - exact).max() < 1e-3       # two functions, easily confused


# --- rotary -------------------------------------------------------------------------------------

def frequencies(config):
    """What Angles turns by at position 1, recovered from the table."""
    width = config.rotary_dim or config.head_dim
    cos, sin = rope_table(np, np.array([1.0]), width, config.rope_theta, "float64",
                          rope_stretch(config))
    return np.arctan2(sin, cos)[0]


def test_h20_llama3_frequencies():
    """head_dim 64, theta 500000, factor 32, low 1, high 4, original 8192."""
    plain = ModelConfig(head_dim=64, rope_theta=500000.0)
    scaled = plain.replace(rope_scaling="llama3", rope_factor=32.0, rope_low=1.0, rope_high=4.0,
                           rope_original=8192)
    before, after = frequencies(plain), frequencies(scaled)
    assert np.allclose(before, 500000.0 ** (-np.arange(32) / 32), rtol=1e-9)
    assert np.array_equal(after[:15], before[:15])
    assert np.allclose(after[15:18], [1.29054793e-3, 4.29556797e-4, 9.70828780e-5], rtol=1e-7)
    assert np.allclose(after[18:], before[18:] / 32, rtol=1e-9)


def test_linear_scaling_is_a_stretch_of_positions():
    config = ModelConfig(rope_scaling="linear", rope_factor=2.5)
    assert np.allclose(frequencies(config) * 2.5, frequencies(ModelConfig()))


def test_h21_rope_pairs_channel_i_with_i_plus_half():
    cos, sin = rope_table(np, np.array([1.0]), 8, 10000.0, "float64")
    y, _ = rotate_forward(np.eye(8)[None, None, :1], cos, sin)
    assert np.allclose(y[0, 0, 0], [math.cos(1), 0, 0, 0, math.sin(1), 0, 0, 0], atol=1e-15)
    half = tuple(t[:, :2] for t in rope_table(np, np.array([1.0]), 4, 10000.0, "float64"))
    y, _ = rotate_forward(np.eye(8)[None, None, :1], *half)      # rotary_dim 4 of 8
    assert np.allclose(y[0, 0, 0], [math.cos(1), 0, math.sin(1), 0, 0, 0, 0, 0], atol=1e-15)


# --- sliding window -----------------------------------------------------------------------------

@pytest.mark.parametrize("window", [1, 2, 5, 99])
def test_in_window_by_definition(window):
    at, keys = np.array([3, 4, 9]), np.arange(8)
    mask = masks.in_window(at, keys, window)
    assert mask.tolist() == [[t - k < window for k in keys.tolist()] for t in at.tolist()]
    assert masks.in_window(at[None], keys[None], window).shape == (1, 3, 8)


def test_a_window_cuts_what_a_row_sees_and_a_wide_one_cuts_nothing():
    ids = np.random.default_rng(0).integers(0, 19, 20)
    plain = tiny_model("llama")
    wide = Model(plain.config.replace(sliding_window=20), plain.params)
    narrow = Model(plain.config.replace(sliding_window=4), plain.params)
    assert np.array_equal(wide.logits(ids), plain.logits(ids))
    difference = np.abs(narrow.logits(ids) - plain.logits(ids)).max(axis=1)
    assert not difference[:4].any() and (difference[4:] > 1e-6).all()
    # three layers of window 4 reach back 9 positions: an earlier token is out of sight
    other = ids.copy()
    other[5] = (ids[5] + 1) % 19
    moved = np.abs(narrow.logits(other) - narrow.logits(ids)).max(axis=1)
    assert not moved[:5].any() and (moved[5:15] > 0).all() and not moved[15:].any()


def test_a_window_in_the_cache_and_in_trees():
    """Logits at tree node n equal those of the text root..n, however far the window reaches."""
    from tiny import random_tree
    rng = np.random.default_rng(1)
    model = tiny_model("llama", sliding_window=3)
    ids = rng.integers(0, 19, 9).tolist()
    for _ in range(5):
        tree, cache = random_tree(rng, 8), model.new_cache()
        model.prefill(cache, ids)
        logits = model.step(cache, tree).logits
        for n in range(len(tree)):
            path = [int(tree.token[i]) for i in reference.chain_to(tree.parent.tolist(), n)]
            assert np.abs(logits[n] - model.logits(ids + path)[-1]).max() < 1e-10


@pytest.mark.parametrize("change", [
    dict(sliding_window=3), dict(positions="learned", position_offset=2, embed_width=5),
    dict(head_bias=True, residual="shared", rotary_dim=2)], ids=str)
def test_training_computes_what_decoding_computes(change):
    """The main loss of a pass is the cross-entropy of `logits`, document by document."""
    for layout in ("padded", "packed"):
        problem = Problem(model=change, streams=None, layout=layout)
        _, metrics = problem.gradients()
        total = 0.0
        for document in problem.documents:
            logits = problem.model.logits(document.ids)
            for t in range(max(document.start, 1) - 1, len(document.ids) - 1):
                probs = reference.softmax(logits[t])
                total -= math.log(probs[document.ids[t + 1]])
        assert metrics.loss["main"] == pytest.approx(total, rel=1e-10)


# --- blocks and ends ----------------------------------------------------------------------------

def block_by_hand(model, x, layer=0):
    """One block on one row that sees itself alone: attention is then its value projection."""
    p, c = model.params, model.config

    def norm(name, x):
        return norm_forward(p, c, f"blocks.{layer}.{name}", x)[0]

    def linear(name, x):
        name = f"blocks.{layer}.{name}"
        return x @ p[name + ".w"] + p.get(name + ".b", 0.0)

    def attend(x):
        v = linear("attn.v", x).reshape(c.kv_heads, c.head_dim).repeat(c.heads // c.kv_heads, 0)
        return linear("attn.out", v.reshape(-1))

    def mlp(x):
        act = ACTIVATIONS[c.activation][0]
        return linear("mlp.down", act(linear("mlp.up", x))[0])

    if c.residual == "parallel":
        return x + attend(norm("norm1", x)) + mlp(norm("norm2", x))
    if c.residual == "shared":
        h = norm("norm1", x)
        return x + attend(h) + mlp(h)
    if c.residual == "post":
        x = norm("norm1", x + attend(x))
        return norm("norm2", x + mlp(x))
    x = x + attend(norm("norm1", x))
    return x + mlp(norm("norm2", x))


@pytest.mark.parametrize("residual", ["chained", "parallel", "shared", "post"])
def test_the_order_of_a_block_and_the_two_ends(residual):
    """A text of one token: no attention pattern, so four lines say it all."""
    model = tiny_model("gpt2", residual=residual, layers=1, final_norm=residual != "post",
                       embed_width=5, position_offset=2, head_bias=True, tied=residual == "post",
                       activation="relu")
    p = model.params
    x = p["embed.tokens"][7] @ p["embed.project.w"] + p["embed.positions"][2]
    x = block_by_hand(model, x)
    if residual != "post":
        x = norm_forward(p, model.config, "norm", x)[0]
    x = x @ p["head.project.w"]
    head = p["embed.tokens"].T if residual == "post" else p["head.w"]
    for maybe_packed in (model, model.pack()):
        assert np.abs(maybe_packed.logits([7])[0] - (x @ head + p["head.b"])).max() < 1e-12


def test_query_and_key_norms_set_the_size_of_a_head():
    """Scaling q's projection changes nothing once heads are normalised; without, it does."""
    for qk_norm in (True, False):
        model = tiny_model("llama", qk_norm=qk_norm, norm_eps=1e-12)
        before = model.logits([3, 4, 5, 6])
        model.params["blocks.1.attn.q.w"] *= 7.0
        assert (np.abs(model.logits([3, 4, 5, 6]) - before).max() < 1e-9) == qk_norm


def test_learned_positions_begin_behind_the_offset():
    params = {"embed.tokens": np.zeros((4, 2)), "embed.positions": np.arange(10.0).reshape(5, 2)}
    x, _ = embed_forward(params, np.array([[1, 2]]), np.array([[2, 3]]))
    assert x.tolist() == [[[4, 5], [6, 7]]]
    config = ModelConfig(positions="learned", position_offset=2, max_positions=7)
    assert base_shapes(config)["embed.positions"] == (9, config.width)


def test_streams_of_a_model_with_an_offset_move_along_the_same_table():
    """Insertion adds E[t+g+offset] - E[t+offset]: with the rows in front cut off and no offset the
    same streams come out."""
    streams = stream_config("conditional")
    model = tiny_model("gpt2", streams, position_offset=3, max_positions=12)
    table = model.params["embed.positions"]
    assert len(table) == 15
    plain = Model(model.config.replace(position_offset=0),
                  {**model.params, "embed.positions": table[3:].copy()}, streams)
    for at in (4, 11):                                    # at 11 streams run past the table's end
        ids = np.arange(at)
        states = []
        for m in (model, plain):
            cache = m.new_cache()
            hidden = m.prefill(cache, ids.tolist()).hidden[0]
            states += [m.deferred_streams(cache, hidden), m.prefill(m.new_cache(), ids.tolist(),
                                                                    streams=True).streams[0]]
        assert all(np.abs(s - states[0]).max() < 1e-10 for s in states)


def test_every_setting_changes_the_output():
    """A field that nothing reads would pass all of the above."""
    base = dict(heads=2, kv_heads=2, head_dim=4, width=8, layers=2, vocab_size=19, mlp_width=8)
    rope = dict(rope_scaling="llama3", rope_factor=4.0, rope_original=20)
    changes = [dict(rotary_dim=2), dict(sliding_window=2), rope, dict(rope, rope_low=2.0),
               dict(rope, rope_high=9.0), dict(rope, rope_original=9), dict(rope, rope_factor=5.0),
               dict(rope_scaling="linear", rope_factor=4.0), dict(activation="relu"),
               dict(activation="gelu"), dict(activation="gelu_exact"), dict(residual="parallel"),
               dict(residual="post")]
    params = {n: p * 5 for n, p in init_params(ModelConfig(**base), dtype="float64").items()}
    outputs = [Model(ModelConfig(**base, **change), params).logits(np.arange(12))
               for change in [{}, *changes]]
    for i, one in enumerate(outputs):
        assert all(np.abs(one - other).max() > 1e-9 for other in outputs[:i]), (changes, i)
