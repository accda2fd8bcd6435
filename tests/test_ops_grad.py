"""Claim: every forward/backward pair of minispec has the right gradient.

CASES is one table: a name "pair" or "pair/variant", and a function that builds forward, backward
and inputs. Values are hot (std 0.4 to 1, gains not 1), ids repeat, keys are masked, and shapes
differ, so that a swapped axis fails by shape. check_pair then compares every element of every
float input with central differences. The last tests read the package itself: a pair that is
missing in the table, or has no backward, is found.
"""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

import minispec
from gradcheck import check_pair, hot_params
from minispec import (attention, layers, lora, loss, masks, pruning, streams, transformer,
                      transitions)
from minispec.config import ModelConfig, StreamConfig

FORWARD_OF = {"softmax_backward": "masked_softmax"}       # pairs that break the naming rule

SMALL = dict(vocab_size=11, width=5, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=7,
             max_positions=6)
BARE = dict(count=2, layers=2, prune_rank=0, transition_rank=0)
IDS = np.array([[3, 3, 1], [0, 3, 6]])                    # 3 occurs three times
TARGETS = np.array([3, 0, 3, 10, 7])
AT = np.array([[1, 2], [3, 4]])                           # of 6: three streams run past the end


# --- builders -----------------------------------------------------------------------------------

def hot(*shape, std=1.0, mean=0.0, seed=0):
    return np.random.default_rng([seed, *shape]).normal(mean, std, shape)


def gain(*shape):
    return hot(*shape, mean=1.0, std=0.4)


def pair(module, name, *inputs, constants=()):
    """The functions are looked up now, so that a bug planted in the module is met."""
    forward, backward = (getattr(module, f"{name}_{way}") for way in ("forward", "backward"))
    return forward, backward, inputs, constants


def with_params(forward, backward, x, params):
    """A pair over (params, x) and (dy, cache, grads) as a pair over plain arrays."""
    def plain_forward(x, *values):
        return forward(dict(zip(params, values)), x)

    def plain_backward(dy, cache):
        grads = {n: np.zeros_like(p) for n, p in params.items()}
        return (backward(dy, cache, grads), *grads.values())

    return plain_forward, plain_backward, [x, *params.values()]


def embed(tables):
    def forward(*values):
        return transformer.embed_forward(dict(zip(tables, values)), IDS, IDS % 4)

    def backward(dy, cache):
        grads = {n: np.zeros_like(t) for n, t in tables.items()}
        transformer.embed_backward(dy, cache, grads)
        return tuple(grads.values())

    return forward, backward, list(tables.values())


def rotate(pairs=2):
    at = hot(2, 1, 5, pairs, std=2.0)
    forward, backward, *rest = pair(attention, "rotate", hot(2, 3, 5, 4))
    return lambda x: forward(x, np.cos(at), np.sin(at)), backward, *rest


def random_mask(*shape):
    return np.random.default_rng(shape).random(shape) < 0.6


def softmax():
    mask = random_mask(2, 3, 7)
    mask[1, 2] = False
    return (lambda s: (attention.masked_softmax(s, mask),) * 2, attention.softmax_backward,
            [hot(2, 3, 7, std=2.0)])


def attend_under(mask, heads, kv_heads):
    forward, backward, *rest = pair(attention, "attention", hot(2, heads, 5, 3),
                                    hot(2, kv_heads, mask.shape[2], 3, seed=1),
                                    hot(2, kv_heads, mask.shape[2], 3))
    return lambda *x: forward(*x, mask), backward, *rest


def attention_grouped():
    mask = random_mask(2, 5, 7)
    mask[1, 2] = False                                    # a row that sees nothing
    return attend_under(mask, heads=6, kv_heads=2)


def bundle(main_row):
    """G = 2; with a main row before its streams: one such row sees nothing at all."""
    context, own = random_mask(2, 3, 5), masks.own_streams(2)[None, None]
    context[0, 1] = False
    if main_row:
        sees = np.array([[True, False, True], [True, True, False]])[:, :, None, None].repeat(2, 3)
        own = np.concatenate([sees, np.broadcast_to(own, (2, 3, 2, 2))], axis=2)
    forward, backward, *rest = pair(
        attention, "bundle", hot(2, 6, 3, own.shape[2], 4), hot(2, 2, 5, 4, seed=1),
        hot(2, 2, 5, 4), hot(2, 2, 3, 2, 4, seed=1), hot(2, 2, 3, 2, 4))
    return lambda *x: forward(*x, context, own), backward, *rest


def multi_stream(main, bundles, cached, sees=False):
    keys, count = cached + main, 2 if bundles else 0
    sees = np.arange(2 * bundles).reshape(2, bundles) % 3 != 1 if sees else None
    view = masks.View(main, random_mask(2, max(main, bundles), keys), bundles, count, sees)
    forward, backward, inputs, _ = pair(
        attention, "multi_stream", hot(2, 4, view.rows, 4), hot(2, 2, keys, 4, seed=1),
        hot(2, 2, keys, 4), hot(2, 2, bundles * count, 4, seed=1), hot(2, 2, bundles * count, 4))
    # a view without streams has no own keys, and gives None for their gradients
    return lambda *x: forward(*x, view), backward, inputs, () if bundles else (3, 4)


def project(first=0, rank=0, bias=True):
    params = {"f.w": hot(5, 7), **({"f.b": hot(7)} if bias else {})}
    if rank:
        params.update({"f.lora_a": hot(5, rank), "f.lora_b": hot(rank, 7)})
    return with_params(lambda p, x: lora.project_forward(p, "f", x, (0.6, first)),
                       lambda dy, c, g: lora.project_backward(dy, c, params, g, "f"),
                       hot(2, 3, 5), params)


def norm(kind, *shape):
    config = ModelConfig(**SMALL, norm=kind)
    params = {"n.gain": gain(5), **({"n.bias": hot(5)} if kind == "layer" else {})}
    return with_params(lambda p, x: transformer.norm_forward(p, config, "n", x),
                       lambda dy, c, g: transformer.norm_backward(dy, c, config, g, "n"),
                       hot(*shape), params)


def mlp(**changes):
    config = ModelConfig(**SMALL, **changes)
    params = {n: p for n, p in hot_params(config, None).items() if n.startswith("blocks.1.mlp")}
    return with_params(
        lambda p, x: transformer.mlp_forward(p, config, 1, x, (1.0, 0)),
        lambda dy, c, g: transformer.mlp_backward(dy, c, params, config, 1, g),
        hot(2, 3, 5), params)


class Rows:
    """A small model and a View of 4 main rows, the last 3 with streams: what a block needs."""

    def __init__(self, model=(), stream=(), sees=False):
        self.config = ModelConfig(**SMALL, **dict(model))
        self.streams = StreamConfig(**BARE, **dict(stream))
        self.params = hot_params(self.config, self.streams)
        documents = np.array([[-1, 0, 0, 0], [0, 0, 1, 1]])       # padded; two in one row
        self.positions = np.array([[0, 0, 1, 2], [0, 1, 0, 1]])
        sees = np.array([[True, False, True], [True, True, False]]) if sees else None
        view = masks.View(4, masks.causal_documents(documents), 3, 2, sees)
        at = streams.Angles(self.config, self.streams, np, "float64")
        self.call = at.call(view, self.positions)

    def pair(self, forward, backward, rows, wanted):
        """Pair over x and the parameters whose names start with one of `wanted`. Each forward gets
        an empty store of keys, and its backward the same one."""
        def with_store(params, x):
            store = streams.Segments(np)
            y, cache = forward({**self.params, **params}, x, store)
            return y, (cache, store)
        return with_params(with_store, lambda dy, c, g: backward(dy, c[0], c[1], g),
                           hot(2, rows, 5),
                           {n: p for n, p in self.params.items() if n.startswith(wanted)})

    def layer(self, name, wanted="blocks.1"):
        """attend or block of layer 1 over all rows of the view."""
        forward, backward, *_ = pair(transformer, name)
        config, call = self.config, self.call
        return self.pair(
            lambda p, x, store: forward(p, config, 1, x, call, store),
            lambda dy, c, store, g: backward(dy, c, self.params, config, 1, call, store, g),
            call.view.rows, wanted)

    def top(self):
        forward, backward, *_ = pair(streams, "top")
        config, call, stream = self.config, self.call, self.streams
        return self.pair(
            lambda p, x, store: forward(p, config, stream, x, self.positions, call, store),
            lambda dy, c, store, g: backward(dy, c, self.params, config, stream, call, store, g),
            4, ("streams.", "blocks.0.attn.k", "blocks.1.mlp.down"))


def insert(at=AT, model=(), **stream):
    config = ModelConfig(**SMALL, **dict(model))
    stream = StreamConfig(**{**BARE, "count": 3, **stream})
    params = {n: p for n, p in hot_params(config, stream).items()
              if n.startswith("streams.") or n == "embed.positions"}
    return with_params(lambda p, x: streams.insert_forward(p, stream, x, at),
                       lambda dy, c, g: streams.insert_backward(dy, c, params, stream, g),
                       hot(2, 2, 5), params)


def early_exit(kind):
    """The final norm is borrowed: no gradient is asked for."""
    config, params = ModelConfig(**SMALL, norm=kind), {"prune.down": hot(5, 2),
                                                       "prune.up": hot(2, 5)}
    borrowed = {"norm.gain": gain(5), "norm.bias": hot(5)}
    return with_params(lambda p, h: pruning.exit_forward({**borrowed, **p}, config, h),
                       lambda dy, c, g: pruning.exit_backward(dy, c, config, g),
                       hot(3, 5), params)


def head(name, *shape, **more):
    """head_loss is both ways in one: dloss goes in as its weights."""
    params = {name: hot(*shape), **{n.replace("_", "."): p for n, p in more.items()}}
    ones = np.ones(len(TARGETS))
    return with_params(lambda p, x: (loss.head_loss(p, {}, x, TARGETS, ones)[0], x),
                       lambda dy, x, g: loss.head_loss(params, g, x, TARGETS, dy)[2],
                       hot(5, 7), params)


# --- the table ----------------------------------------------------------------------------------

LEARNED = dict(positions="learned")
NEOX = dict(norm="layer", activation="gelu_exact", gated=False, mlp_bias=True)
CASES = {
    "linear": lambda: pair(layers, "linear", hot(2, 3, 5), hot(5, 7), hot(7)),
    "linear/one row": lambda: pair(layers, "linear", hot(1, 5), hot(5, 1), hot(1)),
    "linear/frozen": lambda: (layers.linear_forward,
                              lambda dy, c: layers.linear_backward(dy, c, need_dw=False),
                              [hot(2, 3, 5), hot(5, 7), hot(7)], (1,)),
    "linear/no bias": lambda: (layers.linear_forward,
                               lambda dy, c: layers.linear_backward(dy, c)[:2],
                               [hot(2, 3, 5), hot(5, 7)]),
    "embed": lambda: embed({"embed.tokens": hot(7, 5)}),
    "embed/learned positions": lambda: embed({"embed.tokens": hot(7, 5),
                                              "embed.positions": hot(4, 5)}),
    "embed/projected": lambda: embed({"embed.tokens": hot(7, 3), "embed.project.w": hot(3, 5),
                                      "embed.positions": hot(4, 5)}),
    "layernorm": lambda: pair(layers, "layernorm", hot(2, 3, 5), gain(5), hot(5)),
    "rmsnorm": lambda: pair(layers, "rmsnorm", hot(2, 3, 5, mean=0.5), gain(5)),
    "silu": lambda: pair(layers, "silu", hot(2, 31, std=2.0)),
    "gelu": lambda: pair(layers, "gelu", hot(2, 31, std=2.0)),
    "gelu_exact": lambda: pair(layers, "gelu_exact", hot(2, 31, std=2.0)),
    "relu": lambda: pair(layers, "relu", hot(2, 31, std=2.0)),    # none of them within 1e-2 of 0
    "cross_entropy": lambda: pair(layers, "cross_entropy", hot(5, 11, std=2.0), TARGETS),
    "rotate": rotate,
    "rotate/partial": lambda: rotate(pairs=1),
    "softmax": softmax,
    "attention": attention_grouped,
    "attention/as many keys as rows": lambda: attend_under(random_mask(1, 5, 5), 3, 3),
    "bundle": lambda: bundle(main_row=False),
    "bundle/with main row": lambda: bundle(main_row=True),
    "multi_stream": lambda: multi_stream(main=5, bundles=3, cached=2),
    "multi_stream/all rows": lambda: multi_stream(main=3, bundles=3, cached=4),
    "multi_stream/sees own": lambda: multi_stream(main=3, bundles=3, cached=2, sees=True),
    "multi_stream/sees own, plain rows": lambda: multi_stream(5, 3, cached=0, sees=True),
    "multi_stream/alone": lambda: multi_stream(main=0, bundles=1, cached=5),      # deferred
    "multi_stream/none": lambda: multi_stream(main=3, bundles=0, cached=2),
    "project": project,
    "project/adapter": lambda: project(rank=2),
    "project/adapter, stream rows": lambda: project(first=1, rank=2, bias=False),
    "norm/rms": lambda: norm("rms", 2, 3, 5),
    "norm/layer": lambda: norm("layer", 3, 5),
    "mlp/gated": lambda: mlp(activation="silu", gated=True),
    "mlp/plain": lambda: mlp(activation="gelu", gated=False, mlp_bias=True),
    "attend": lambda: Rows(dict(qkv_bias=True, out_bias=True)).layer("attend", "blocks.1.attn"),
    "attend/no rope": lambda: Rows(LEARNED, sees=True).layer("attend", "blocks.1.attn"),
    "attend/query and key norms": lambda: Rows(dict(qk_norm=True)).layer("attend",
                                                                         "blocks.1.attn"),
    "attend/partial rotary": lambda: Rows(dict(rotary_dim=2)).layer("attend", "blocks.1.attn.q"),
    "attend/value rotation": lambda: Rows(stream=dict(kind="rotation", rotation_angle=0.5)).layer(
        "attend", "blocks.1.attn"),
    "block": lambda: Rows(stream=dict(lora_rank=1, lora_alpha=0.5), sees=True).layer("block"),
    "block/layernorm": lambda: Rows(dict(norm="layer", activation="gelu", gated=False)).layer(
        "block", "blocks.1.norm"),
    "parallel_block": lambda: Rows(dict(NEOX, residual="parallel")).layer("block"),
    "parallel_block/shared norm": lambda: Rows(dict(NEOX, residual="shared")).layer("block"),
    "post_block": lambda: Rows(dict(NEOX, residual="post")).layer("block"),
    "top": lambda: Rows().top(),
    "insert": insert,
    "insert/low rank": lambda: insert(insertion_rank=2),
    "insert/copies": lambda: insert(kind="rotation"),
    "insert/low rank, no embedding": lambda: insert(insertion_rank=2, kind="rotation"),
    "insert/ahead": lambda: insert(model=LEARNED, insertion_rank=2),
    "insert/ahead, one row for all": lambda: insert(AT[:1], LEARNED),
    "insert/same": lambda: insert(model=LEARNED, positions="same"),
    # the token embedding, input 1, is a constant here by design
    "transition": lambda: pair(transitions, "transition", hot(3, 5), hot(3, 5, seed=1), hot(5, 2),
                               hot(5, 2, seed=1), hot(2, 5), constants=(1,)),
    "exit/rms": lambda: early_exit("rms"),
    "exit/layer": lambda: early_exit("layer"),
    "head_loss/tied": lambda: head("embed.tokens", 11, 7),
    "head_loss/bias": lambda: head("embed.tokens", 11, 7, head_b=hot(11)),
    "head_loss/projected": lambda: head("head.w", 3, 11, head_project_w=hot(7, 3)),
    "head_loss/untied": lambda: head("head.w", 7, 11),
}


# --- the tests ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name):
    check_pair(*CASES[name]())


def test_a_row_that_sees_nothing_is_zero_both_ways():
    """Finite, zero out, zero back: also where the gradient that comes in is huge."""
    forward, backward, (q, k, v), _ = attention_grouped()
    y, cache = forward(q, k, v)
    assert not y[1, :, 2].any() and y[0, :, 2].any()
    dq, dk, dv = backward(np.full_like(y, 1e6), cache)
    assert not dq[1, :, 2].any() and np.isfinite(dk).all() and np.isfinite(dv).all()

    forward, backward, inputs, _ = bundle(main_row=True)
    y, cache = forward(*inputs)
    assert not y[0, :, 1, 0].any() and y[1, :, 1, 0].any() and y[0, :, 1, 1].any()
    grads = backward(np.full_like(y, 1e6), cache)
    assert not grads[0][0, :, 1, 0].any() and all(np.isfinite(g).all() for g in grads)


def functions(suffix):
    """{name: module} of all functions of the package whose name ends in `suffix`."""
    found = {}
    for info in pkgutil.walk_packages(minispec.__path__, "minispec."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if inspect.isfunction(value) and value.__module__ == info.name:
                if name.endswith(suffix):
                    found[name] = info.name
    return found


def test_every_forward_has_a_backward_beside_it_and_a_case_here():
    forwards, backwards = functions("_forward"), functions("_backward")
    assert len(forwards) >= 18
    covered = {name.split("/")[0] for name in CASES}
    for name, module in forwards.items():
        kind = name[:-len("_forward")]
        assert backwards.get(kind + "_backward") == module, f"{module}.{name}: no backward"
        assert kind in covered, f"{module}.{name}: no case in test_ops_grad.py"


def test_every_backward_has_its_forward():
    names = functions("")
    for name, module in functions("_backward").items():
        forward = FORWARD_OF.get(name, name.replace("_backward", "_forward"))
        assert names.get(forward) == module, f"{module}.{name}: no {forward} beside it"
