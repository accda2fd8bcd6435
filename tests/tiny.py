"""Tiny random models in float64 for the tests: every architecture, any streams, hot parameters.

Hot: matrices of std 0.4 and gains off 1, adapters and conditional streams not at their zero start.
Then every rule matters to the output, and greedy decoding does not repeat one token for ever.
"""

import numpy as np

from minispec.config import ModelConfig, StreamConfig
from minispec.model import Model
from minispec.parameters import all_shapes
from minispec.tree import Tree

SMALL = dict(vocab_size=19, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, mlp_width=24,
             max_positions=64, eos_ids=())

ARCHITECTURES = {
    "llama": dict(norm="rms", positions="rope", activation="silu", gated=True, tied=True),
    "qwen": dict(norm="rms", positions="rope", qkv_bias=True, kv_heads=1, tied=False),
    "gpt2": dict(norm="layer", positions="learned", activation="gelu", gated=False, kv_heads=4,
                 qkv_bias=True, out_bias=True, mlp_bias=True, tied=True),
    "mixed": dict(norm="layer", positions="rope", activation="gelu", gated=True, head_dim=6,
                  mlp_bias=True, tied=False, rope_theta=100.0),
    "learned": dict(norm="rms", positions="learned", kv_heads=2, head_dim=5, tied=False),
}

# every option that changes what a stream is; `sees` and `lossless` exclude each other
STREAMS = {
    "paper": dict(transition_rank=0, prune_rank=0),
    "conditional": dict(transition_rank=5),
    "same": dict(positions="same", transition_rank=5),
    "rotation": dict(kind="rotation", rotation_angle=0.4, transition_rank=5),
    "insertion": dict(insertion_rank=4, transition_rank=0),
    "shared_lora": dict(lora_rank=2, lora_alpha=3.0, lora_all_layers=True, transition_rank=5),
    "lossless": dict(mode="lossless", lora_rank=2, lora_alpha=3.0, transition_rank=5),
    "one": dict(count=1, layers=1, transition_rank=5),
    "all_layers": dict(layers=3, count=2, transition_rank=5),
    "sees": dict(main_sees_streams=True, transition_rank=5),
    "sees_lora": dict(main_sees_streams=True, lora_rank=2, lora_alpha=3.0, transition_rank=0),
}


def stream_config(name="conditional", **changes):
    """StreamConfig with G = 3 in the top 2 layers unless said otherwise."""
    return StreamConfig(**{**dict(count=3, layers=2, prune_rank=3), **STREAMS[name], **changes})


def tiny_model(arch="llama", streams=None, seed=0, std=0.4, dtype="float64", **changes):
    """A random Model. streams: None, a name in STREAMS, or a StreamConfig.

    The base parameters depend on (arch, seed) alone, never on the streams.
    """
    config = ModelConfig(**{**SMALL, **ARCHITECTURES[arch], **changes})
    streams = stream_config(streams) if isinstance(streams, str) else streams
    return Model(config, hot_params(config, streams, seed, std, dtype), streams)


def hot_params(config, streams, seed, std=0.4, dtype="float64"):
    params = {}
    for name, shape in all_shapes(config, streams).items():
        rng = np.random.default_rng([seed, *name.encode()])
        scale = 1.0 if name.startswith("embed.") or name == "streams.embed" else std
        if name.endswith((".bias", ".b")):
            scale = 0.2                   # larger ones drown the text: one token for ever
        value = rng.normal(0.0, scale, shape)             # shape
        if name == "embed.tokens":        # rows of one length, so that no token always wins
            value *= (shape[1] ** 0.5) / np.linalg.norm(value, axis=1, keepdims=True)
        params[name] = (1 + value if name.endswith(".gain") else value).astype(dtype)
    return params


def random_ids(rng, count, vocab=SMALL["vocab_size"]):
    return [int(i) for i in rng.integers(0, vocab, count)]


def random_tree(rng, nodes, vocab=SMALL["vocab_size"], root=None):
    """A Tree of any shape: chains, stars and all between; the same tokens in several branches."""
    reach = int(rng.choice([1, 2, nodes]))        # how far back a parent may lie: 1 gives a chain
    few = int(rng.integers(3, vocab + 1))         # few different tokens repeat across branches
    token, parent = [int(rng.integers(vocab)) if root is None else root], [-1]
    for _ in range(3 * nodes):
        above, word = int(rng.integers(max(0, len(token) - reach), len(token))), rng.integers(few)
        if len(token) < nodes and (above, word) not in zip(parent, token):
            parent.append(above)
            token.append(int(word))
    return Tree(parent, token)
