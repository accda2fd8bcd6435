"""Claim: every forward/backward pair of minispec has the right gradient.

One table of cases. A case builds (forward, backward, inputs) at hot values: std 0.4 to 1, gains
not 1, repeated ids, masked keys, ragged shapes that differ, so that a swapped axis fails by shape.
check_pair then compares every element of every float input with central differences. The last
tests read the package itself: a pair that is missing here, or has no backward, is found.
"""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest

import minispec
from gradcheck import check_pair, hot_params
from minispec import attention, layers, lora, loss, masks, pruning, streams, transformer, transitions
from minispec.config import ModelConfig, StreamConfig

CASES = {}                              # name of the case -> (name of the pair, builder)
# every *_forward must have a *_backward beside it, except these
ELSEWHERE = {"embed": "Pass.run scatters its gradient; test_model_grad.py checks both tables"}
FORWARD_OF = {"softmax_backward": "masked_softmax"}       # pairs that break the naming rule


def case(pair):
    def add(build):
        assert build.__name__ not in CASES
        CASES[build.__name__] = pair, build
        return build
    return add


def hot(*shape, std=1.0, mean=0.0, seed=0):
    return np.random.default_rng([seed, *shape]).normal(mean, std, shape)


def with_params(forward, backward, x, params):
    """A pair over (params, x) and (dy, cache, grads) as a pair over plain arrays."""
    def plain_forward(x, *values):
        return forward(dict(zip(params, values)), x)

    def plain_backward(dy, cache):
        grads = {n: np.zeros_like(p) for n, p in params.items()}
        return (backward(dy, cache, grads), *grads.values())

    return plain_forward, plain_backward, [x, *params.values()]


# --- layers -------------------------------------------------------------------------------------

@case("linear")
def linear():
    return layers.linear_forward, layers.linear_backward, [hot(2, 3, 5), hot(5, 7), hot(7)]


@case("linear")
def linear_without_bias():
    return (layers.linear_forward, lambda dy, c: layers.linear_backward(dy, c)[:2],
            [hot(3, 5), hot(5, 7)])


@case("linear")
def linear_frozen():
    """need_dw=False leaves out dw (None here means: not compared) and nothing else."""
    def backward(dy, cache):
        dx, dw, db = layers.linear_backward(dy, cache, need_dw=False)
        assert dw is None
        return dx, dw, db
    return layers.linear_forward, backward, [hot(2, 3, 5), hot(5, 7), hot(7)]


@case("embedding")
def embedding():
    ids = np.array([[3, 3, 1], [0, 3, 6]])                # 3 occurs three times
    return layers.embedding_forward, layers.embedding_backward, [ids, hot(7, 5)]


@case("layernorm")
def layernorm():
    return (layers.layernorm_forward, layers.layernorm_backward,
            [hot(2, 3, 5), hot(5, mean=1.0, std=0.4), hot(5)])


@case("rmsnorm")
def rmsnorm():
    return (layers.rmsnorm_forward, layers.rmsnorm_backward,
            [hot(2, 3, 5, mean=0.5), hot(5, mean=1.0, std=0.4)])


@case("silu")
def silu():
    return layers.silu_forward, layers.silu_backward, [hot(2, 31, std=2.0)]


@case("gelu")
def gelu():
    return layers.gelu_forward, layers.gelu_backward, [hot(2, 31, std=2.0)]


@case("cross_entropy")
def cross_entropy():
    return (layers.cross_entropy_forward, layers.cross_entropy_backward,
            [hot(5, 11, std=2.0), np.array([3, 0, 3, 10, 7])])


@case("linear")
def linear_one_row():
    return layers.linear_forward, layers.linear_backward, [hot(1, 5), hot(5, 1), hot(1)]


# --- attention ----------------------------------------------------------------------------------

def angles(rows, half, batch=2):
    at = hot(batch, 1, rows, half, std=2.0)
    return np.cos(at), np.sin(at)


@case("rotate")
def rotate():
    cos, sin = angles(5, 2)
    return (lambda x: attention.rotate_forward(x, cos, sin), attention.rotate_backward,
            [hot(2, 3, 5, 4)])


def random_mask(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


@case("softmax")
def softmax_masked():
    mask = random_mask(2, 3, 7)
    mask[1, 2] = False

    def forward(scores):
        probs = attention.masked_softmax(scores, mask)
        return probs, probs
    return forward, attention.softmax_backward, [hot(2, 3, 7, std=2.0)]


def attention_case(mask, heads=6, kv_heads=2):
    keys = mask.shape[2]
    return (lambda q, k, v: attention.attention_forward(q, k, v, mask),
            attention.attention_backward,
            [hot(2, heads, 5, 3), hot(2, kv_heads, keys, 3, seed=1), hot(2, kv_heads, keys, 3)])


@case("attention")
def attention_grouped():
    mask = random_mask(2, 5, 7)
    mask[1, 2] = False                                    # a row that sees nothing
    return attention_case(mask)


@case("attention")
def attention_shared_mask():
    return attention_case(random_mask(1, 5, 5), heads=3, kv_heads=3)      # as many keys as rows


@case("bundle")
def bundle():
    """Streams only, G = 2, as without main_sees_streams. Bundle 1 of text 0 sees no main key."""
    context, own = random_mask(2, 3, 5), masks.own_streams(2)[None, None]
    context[0, 1] = False
    return bundle_case(context, own, rows=2)


@case("bundle")
def bundle_with_main_row():
    """A main row in front of its streams; one of them sees nothing at all."""
    context, own = random_mask(1, 3, 5), np.tile(masks.own_streams(2), (2, 3, 1, 1))
    own = np.concatenate([random_mask(2, 3, 1, 1).repeat(2, -1), own], axis=2)
    context[0, 1], own[0, 1, 0], own[1, 1, 0] = False, False, True
    return bundle_case(context, own, rows=3)


def bundle_case(context, own, rows):
    return (lambda *x: attention.bundle_forward(*x, context, own), attention.bundle_backward,
            [hot(2, 6, 3, rows, 4), hot(2, 2, 5, 4, seed=1), hot(2, 2, 5, 4),
             hot(2, 2, 3, 2, 4, seed=1), hot(2, 2, 3, 2, 4)])


def multi_stream_case(main, bundles, cached, sees=None, heads=4, kv_heads=2, count=2):
    if sees is not None:
        sees = np.arange(2 * bundles).reshape(2, bundles) % 3 != 1
    keys = cached + main
    view = masks.View(main, random_mask(2, max(main, bundles), keys), bundles,
                      count if bundles else 0, sees)
    inputs = [hot(2, heads, view.rows, 4), hot(2, kv_heads, keys, 4, seed=1),
              hot(2, kv_heads, keys, 4)]
    backward = attention.multi_stream_backward
    if bundles:
        inputs += [hot(2, kv_heads, bundles * count, 4, seed=s) for s in (1, 2)]
        return lambda *x: attention.multi_stream_forward(*x, view), backward, inputs
    return (lambda q, k, v: attention.multi_stream_forward(q, k, v, None, None, view),
            lambda dy, c: backward(dy, c)[:3], inputs)


@case("multi_stream")
def multi_stream():
    return multi_stream_case(main=5, bundles=3, cached=2)


@case("multi_stream")
def multi_stream_every_row_a_bundle():
    return multi_stream_case(main=3, bundles=3, cached=4)


@case("multi_stream")
def multi_stream_sees_own():
    return multi_stream_case(main=3, bundles=3, cached=2, sees=True)


@case("multi_stream")
def multi_stream_sees_own_with_plain_rows():
    return multi_stream_case(main=5, bundles=3, cached=0, sees=True)


@case("multi_stream")
def multi_stream_alone():
    """T = 0: the deferred pass."""
    return multi_stream_case(main=0, bundles=1, cached=5)


@case("multi_stream")
def multi_stream_without_streams():
    return multi_stream_case(main=3, bundles=0, cached=2)


# --- transformer --------------------------------------------------------------------------------

SMALL = dict(vocab_size=11, width=5, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=7,
             max_positions=6)


def project_case(first=0, rank=0, bias=True):
    params = {"f.w": hot(5, 7)}
    if bias:
        params["f.b"] = hot(7)
    if rank:
        params.update({"f.lora_a": hot(5, rank), "f.lora_b": hot(rank, 7)})
    return with_params(lambda p, x: lora.project_forward(p, "f", x, (0.6, first)),
                       lambda dy, c, g: lora.project_backward(dy, c, params, g, "f"),
                       hot(2, 3, 5), params)


@case("project")
def project():
    return project_case()


@case("project")
def project_with_adapter():
    return project_case(rank=2)


@case("project")
def project_with_adapter_on_stream_rows():
    return project_case(first=1, rank=2, bias=False)


def norm_case(kind, shape):
    config = ModelConfig(**{**SMALL, "norm": kind})
    params = {"n.gain": hot(5, mean=1.0, std=0.4)}
    if kind == "layer":
        params["n.bias"] = hot(5)
    return with_params(lambda p, x: transformer.norm_forward(p, config, "n", x),
                       lambda dy, c, g: transformer.norm_backward(dy, c, config, g, "n"),
                       hot(*shape), params)


@case("norm")
def norm_rms():
    return norm_case("rms", (2, 3, 5))


@case("norm")
def norm_layer():
    return norm_case("layer", (3, 5))


def mlp_case(**changes):
    config = ModelConfig(**{**SMALL, **changes})
    params = {n: p for n, p in hot_params(config, None).items() if n.startswith("blocks.1.mlp")}
    return with_params(
        lambda p, x: transformer.mlp_forward(p, config, 1, x, (1.0, 0)),
        lambda dy, c, g: transformer.mlp_backward(dy, c, params, config, 1, g),
        hot(2, 3, 5), params)


@case("mlp")
def mlp_gated():
    return mlp_case(activation="silu", gated=True)


@case("mlp")
def mlp_plain():
    return mlp_case(activation="gelu", gated=False, mlp_bias=True)


class Rows:
    """A small model with a View of main and stream rows: what a block needs to run."""

    def __init__(self, model=(), stream=(), sees=None):
        self.config = ModelConfig(**{**SMALL, **dict(model)})
        self.streams = StreamConfig(count=2, layers=2, prune_rank=0, transition_rank=0,
                                    **dict(stream))
        self.params = hot_params(self.config, self.streams)
        documents = np.array([[-1, 0, 0, 0], [0, 0, 1, 1]])
        self.positions = np.array([[0, 0, 1, 2], [0, 1, 0, 1]])
        if sees is not None:
            sees = np.array([[True, False, True], [True, True, False]])
        view = masks.View(4, masks.causal_documents(documents), 3, 2, sees)
        at = streams.Angles(self.config, self.streams, np, "float64")
        self.call = at.call(view, self.positions)

    def pair(self, forward, backward, rows, wanted):
        """Pair over x and the parameters whose names start with one of `wanted`; each forward gets
        an empty store of keys, and its backward the same one."""
        names = [n for n in self.params if n.startswith(wanted)]

        def with_store(params, x):
            store = streams.Segments(np)
            y, cache = forward({**self.params, **params}, x, store)
            return y, (cache, store)
        return with_params(with_store, lambda dy, c, g: backward(dy, c[0], c[1], g),
                           hot(2, rows, 5), {n: self.params[n] for n in names})


def layer_case(name, rows, wanted):
    """attend or block of layer 1 over all rows of the view."""
    forward, backward = (getattr(transformer, f"{name}_{way}") for way in ("forward", "backward"))
    return rows.pair(
        lambda p, x, store: forward(p, rows.config, 1, x, rows.call, store),
        lambda dy, c, store, g: backward(dy, c, rows.params, rows.config, 1, rows.call, store, g),
        rows.call.view.rows, wanted)


@case("attend")
def attend_rope():
    return layer_case("attend", Rows(dict(qkv_bias=True, out_bias=True)), "blocks.1.attn")


@case("attend")
def attend_value_rotation():
    rows = Rows(stream=dict(kind="rotation", rotation_angle=0.5), sees=True)
    return layer_case("attend", rows, "blocks.1.attn")


@case("attend")
def attend_without_rope():
    return layer_case("attend", Rows(dict(positions="learned")), "blocks.1.attn")


@case("block")
def block():
    return layer_case("block", Rows(stream=dict(lora_rank=1, lora_alpha=0.5), sees=True),
                      "blocks.1")


@case("block")
def block_layernorm():
    return layer_case("block", Rows(dict(norm="layer", activation="gelu", gated=False)),
                      "blocks.1.norm")


# --- streams ------------------------------------------------------------------------------------

@case("top")
def top():
    rows = Rows()
    return rows.pair(
        lambda p, x, store: streams.top_forward(p, rows.config, rows.streams, x, rows.positions,
                                                rows.call, store),
        lambda dy, c, store, g: streams.top_backward(dy, c, rows.params, rows.config, rows.streams,
                                                     rows.call, store, g),
        4, ("streams.", "blocks.0.attn.k", "blocks.1.mlp.down"))


def insert_case(positions, model=(), **stream):
    config = ModelConfig(**{**SMALL, **dict(model)})
    stream = StreamConfig(**{"count": 3, "layers": 1, "prune_rank": 0, "transition_rank": 0,
                             **stream})
    params = {n: p for n, p in hot_params(config, stream).items()
              if n.startswith("streams.") or n == "embed.positions"}
    return with_params(lambda p, x: streams.insert_forward(p, stream, x, positions),
                       lambda dy, c, g: streams.insert_backward(dy, c, params, stream, g),
                       hot(2, 2, 5), params)


AT = np.array([[1, 2], [3, 4]])                           # of 6: streams run past the table's end


@case("insert")
def insert_identity():
    return insert_case(AT)


@case("insert")
def insert_low_rank():
    return insert_case(AT, insertion_rank=2)


@case("insert")
def insert_low_rank_without_embedding():
    return insert_case(AT, insertion_rank=2, kind="rotation")


@case("insert")
def insert_nothing_but_copies():
    return insert_case(AT, kind="rotation")


@case("insert")
def insert_positions_ahead():
    return insert_case(AT, dict(positions="learned"), insertion_rank=2)


@case("insert")
def insert_positions_ahead_one_row_for_all():
    return insert_case(AT[:1], dict(positions="learned"))


@case("insert")
def insert_positions_same():
    return insert_case(AT, dict(positions="learned"), positions="same")


@case("transition")
def transition():
    """The token embedding is a constant here by design: its gradient is None."""
    return (transitions.transition_forward, transitions.transition_backward,
            [hot(3, 5), hot(3, 5, seed=1), hot(5, 2), hot(5, 2, seed=1), hot(2, 5)])


def exit_case(kind):
    config = ModelConfig(**{**SMALL, "norm": kind})
    params = {"prune.down": hot(5, 2), "prune.up": hot(2, 5)}
    borrowed = {"norm.gain": hot(5, mean=1.0, std=0.4), "norm.bias": hot(5)}
    return with_params(lambda p, h: pruning.exit_forward({**borrowed, **p}, config, h),
                       lambda dy, c, g: pruning.exit_backward(dy, c, config, g),
                       hot(3, 5), params)


@case("exit")
def exit_rms():
    return exit_case("rms")


@case("exit")
def exit_layer():
    return exit_case("layer")


def head_case(name, shape):
    """head_loss is both ways in one: dloss goes in as its weights."""
    params, targets = {name: hot(*shape)}, np.array([3, 0, 3, 10, 7, 3, 1])

    def forward(p, x):
        return loss.head_loss(p, {}, x, targets, np.ones(7))[0], x

    def backward(dy, x, grads):
        return loss.head_loss(params, grads, x, targets, dy)[2]
    return with_params(forward, backward, hot(7, 5), params)


@case("head_loss")
def head_tied():
    return head_case("embed.tokens", (11, 5))


@case("head_loss")
def head_untied():
    return head_case("head.w", (5, 11))


# --- the tests ----------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_central_differences(name):
    check_pair(*CASES[name][1]())


def test_a_row_that_sees_nothing_is_zero_both_ways():
    """Finite, zero out, zero back: also where the gradient that comes in is huge."""
    forward, backward, (q, k, v) = attention_grouped()
    y, cache = forward(q, k, v)
    assert not y[1, :, 2].any() and y[0, :, 2].any()
    dq, dk, dv = backward(np.full_like(y, 1e6), cache)
    assert not dq[1, :, 2].any() and np.isfinite(dk).all() and np.isfinite(dv).all()

    forward, backward, inputs = bundle_with_main_row()
    y, cache = forward(*inputs)
    assert not y[0, :, 1, 0].any() and y[1, :, 1, 0].any() and y[0, :, 1, 1].any()
    grads = backward(np.full_like(y, 1e6), cache)
    assert not grads[0][0, :, 1, 0].any() and all(np.isfinite(g).all() for g in grads)


def functions(suffix):
    """{name: module} of all functions of the package whose name ends in `suffix`."""
    found = {}
    for info in pkgutil.walk_packages(minispec.__path__, "minispec."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == info.name \
                    and name.endswith(suffix):
                found[name] = info.name
    return found


def test_every_forward_has_a_backward_beside_it_and_a_case_here():
    forwards, backwards = functions("_forward"), functions("_backward")
    assert len(forwards) >= 18
    covered = {pair for pair, _ in CASES.values()}
    for name, module in forwards.items():
        pair = name[:-len("_forward")]
        if pair not in ELSEWHERE:
            assert backwards.get(pair + "_backward") == module, f"{module}.{name}: no backward"
            assert pair in covered, f"{module}.{name}: no case in test_ops_grad.py"


def test_every_backward_has_its_forward():
    names = functions("")
    for name, module in functions("_backward").items():
        forward = FORWARD_OF.get(name, name.replace("_backward", "_forward"))
        assert names.get(forward) == module, f"{module}.{name}: no {forward} beside it"
