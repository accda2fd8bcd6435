"""Every parameter of a model: its name, its shape and how it starts.

Parameters live in one flat dict, `{"blocks.3.attn.q.w": array (C, H*D), ...}`. All matrices are
stored (in, out), so y = x W. Three groups: the base model, the streams (with the early-exit map
and the conditional streams), and the LoRA adapters.

Read first: config.py. Proven by: tests/test_params.py.
"""

import numpy as np

from .lora import adapter_names


def base_shapes(config):
    """{name: shape} of the transformer alone."""
    c = config
    inner = c.embed_width or c.width
    shapes = {"embed.tokens": (c.vocab_size, inner)}
    if c.embed_width:
        shapes["embed.project.w"] = (inner, c.width)
    if c.positions == "learned":
        shapes["embed.positions"] = (c.max_positions + c.position_offset, c.width)
    for i in range(c.layers):
        block = f"blocks.{i}."
        for norm in ("norm1",) if c.residual == "shared" else ("norm1", "norm2"):
            shapes.update(_norm(c, block + norm))
        for name in ("q", "k", "v"):
            width = c.head_dim * (c.heads if name == "q" else c.kv_heads)
            shapes.update(_linear(f"{block}attn.{name}", c.width, width, c.qkv_bias))
        for name in ("q_norm", "k_norm") if c.qk_norm else ():
            shapes[f"{block}attn.{name}.gain"] = (c.head_dim,)
        shapes.update(_linear(block + "attn.out", c.heads * c.head_dim, c.width, c.out_bias))
        for name in ("gate", "up") if c.gated else ("up",):
            shapes.update(_linear(f"{block}mlp.{name}", c.width, c.mlp_width, c.mlp_bias))
        shapes.update(_linear(block + "mlp.down", c.mlp_width, c.width, c.mlp_bias))
    if c.final_norm:
        shapes.update(_norm(c, "norm"))
    if c.embed_width:
        shapes["head.project.w"] = (c.width, inner)
    if not c.tied:
        shapes["head.w"] = (inner, c.vocab_size)
    if c.head_bias:
        shapes["head.b"] = (c.vocab_size,)
    return shapes


def _norm(config, name):
    shapes = {name + ".gain": (config.width,)}
    if config.norm == "layer":
        shapes[name + ".bias"] = (config.width,)
    return shapes


def _linear(name, width_in, width_out, bias):
    shapes = {name + ".w": (width_in, width_out)}
    if bias:
        shapes[name + ".b"] = (width_out,)
    return shapes


def stream_shapes(config, streams):
    """{name: shape} of what Speculative Streaming adds, adapters excepted.

    With embeddings, the identity insertion and rank-8 pruning these are (G + 2*8) * C numbers
    (papers' tables: 20 h for G = 4), and 3 R C more per stream if streams are conditional.
    """
    shapes, width = {}, config.width
    if streams.kind == "embedding":
        shapes["streams.embed"] = (streams.count, width)
    if streams.insertion_rank:
        shapes["streams.insert.down"] = (width, streams.insertion_rank)
        shapes["streams.insert.up"] = (streams.insertion_rank, width)
    if streams.prune_rank:
        shapes["prune.down"] = (width, streams.prune_rank)
        shapes["prune.up"] = (streams.prune_rank, width)
    if streams.transition_rank:
        rank, count = streams.transition_rank, streams.count
        shapes["transitions.state"] = (count, width, rank)
        shapes["transitions.token"] = (count, config.embed_width or width, rank)
        shapes["transitions.out"] = (count, rank, width)
    return shapes


def adapter_shapes(config, streams):
    """{name: shape} of the LoRA pairs."""
    base, shapes = base_shapes(config), {}
    for name in adapter_names(config, streams):
        rows, columns = base[name + ".w"]
        shapes[name + ".lora_a"] = (rows, streams.lora_rank)
        shapes[name + ".lora_b"] = (streams.lora_rank, columns)
    return shapes


def all_shapes(config, streams=None):
    """{name: shape} of a whole model; `streams` may be None (a plain transformer).

    Raises ValueError if the streams pass more layers than the model has.
    """
    shapes = base_shapes(config)
    if streams is not None:
        streams.check_model(config)
        shapes.update(stream_shapes(config, streams))
        shapes.update(adapter_shapes(config, streams))
    return shapes


def is_base(name):
    """True for a parameter of the base model (what lossless mode freezes)."""
    return not (name.startswith(("streams.", "prune.", "transitions."))
                or name.endswith((".lora_a", ".lora_b")))


def trainable_names(shapes, streams):
    """Names that training changes: everything, or without the base once adapters stand in for it.

    The base is frozen in lossless mode, and in shared mode with LoRA (lora_rank > 0).
    """
    frozen_base = streams is not None and (streams.mode == "lossless" or streams.lora_rank > 0)
    return [n for n in shapes if not (frozen_base and is_base(n))]


ZERO_START = (".bias", ".b", ".lora_b", "transitions.out")


def start_value(name, shape, config, rng):
    """The starting value of one parameter, float64 on the host.

    Matrices: normal with std 1/sqrt(width in), the projections that end a sublayer smaller by
    sqrt(2L) so that the residual sum keeps its size (GPT-2's rule). Adapters and conditional
    streams start as no-ops: their last matrix is zero.
    """
    if name.endswith(".gain"):
        return np.ones(shape)                             # shape
    if name.endswith(ZERO_START):
        return np.zeros(shape)                            # shape
    if name in ("embed.tokens", "embed.positions", "streams.embed"):
        return rng.normal(0.0, 0.02 if name != "streams.embed" else 0.2, shape)   # shape
    std = shape[-2] ** -0.5
    if name.endswith(("attn.out.w", "mlp.down.w")):
        std *= (2 * config.layers) ** -0.5
    return rng.normal(0.0, std, shape)                    # shape


def init_params(config, streams=None, seed=0, dtype="float32"):
    """Fresh parameters on the host: dict of arrays. Each name has a random stream of its own, so
    adding streams to a config leaves the base model's starting values as they were."""
    return start_params(all_shapes(config, streams), config, seed, dtype)


def init_stream_params(config, streams, seed=0, dtype="float32"):
    """The part of `init_params` that streams add to a base model that is there already."""
    shapes = {**stream_shapes(config, streams), **adapter_shapes(config, streams)}
    return start_params(shapes, config, seed, dtype)


def start_params(shapes, config, seed, dtype):
    """Starting values of some parameters, {name: shape} -> {name: array}."""
    params = {}
    for name, shape in shapes.items():
        rng = np.random.default_rng([seed, *name.encode()])
        params[name] = start_value(name, shape, config, rng).astype(dtype)    # shape
    return params
