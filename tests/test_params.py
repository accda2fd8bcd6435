"""Claim: a model has exactly the parameters of its table, each an array of its own.

What Speculative Streaming adds is as small as the paper says. Adding streams leaves the base
model's start as it was. What is frozen is the base and nothing else.
"""

import math

import numpy as np
import pytest

from minispec.config import ModelConfig, StreamConfig
from minispec.parameters import (adapter_shapes, all_shapes, base_shapes, init_params, is_base,
                                 stream_shapes, trainable_names)
from minispec.presets import PRESETS

GPT2 = dict(norm="layer", positions="learned", activation="gelu", gated=False, qkv_bias=True,
            out_bias=True, mlp_bias=True)
MODELS = [ModelConfig(), ModelConfig(**GPT2), ModelConfig(tied=False, heads=4, head_dim=10),
          ModelConfig(norm="layer", qkv_bias=True, layers=3)]
STREAMS = [None, StreamConfig(), StreamConfig(kind="rotation", insertion_rank=4, prune_rank=0),
           StreamConfig(mode="lossless", lora_rank=4, transition_rank=0),
           StreamConfig(lora_rank=2, lora_all_layers=True, lora_targets=("attn.v", "mlp.gate"))]


def size(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


# --- counts -------------------------------------------------------------------------------------

@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("width", [64, 192])
def test_streams_and_pruning_add_g_plus_16_vectors(count, width):
    """(G + 2*8) C with rank 8: the papers' tables, 20 h for G = 4."""
    config = ModelConfig(width=width)
    streams = StreamConfig(count=count, transition_rank=0)
    assert streams.prune_rank == 8
    assert size(stream_shapes(config, streams)) == (count + 2 * 8) * width
    added = set(all_shapes(config, streams)) - set(all_shapes(config))
    assert added == {"streams.embed", "prune.down", "prune.up"}


@pytest.mark.parametrize("count, rank", [(1, 5), (3, 96), (4, 128)])
def test_conditional_streams_add_3rc_each(count, rank):
    config = ModelConfig()
    with_, without = (StreamConfig(count=count, transition_rank=r) for r in (rank, 0))
    added = size(stream_shapes(config, with_)) - size(stream_shapes(config, without))
    assert added == count * 3 * rank * config.width


def test_an_insertion_map_and_value_rotation():
    config = ModelConfig()
    plain = StreamConfig(prune_rank=0, transition_rank=0)
    mapped, turned = plain.replace(insertion_rank=4), plain.replace(kind="rotation")
    assert size(stream_shapes(config, plain)) == plain.count * config.width
    assert size(stream_shapes(config, mapped)) == (plain.count + 2 * 4) * config.width
    assert stream_shapes(config, turned) == {}            # the angle is a setting, not trained


def test_adapters_add_r_times_in_plus_out():
    config = ModelConfig()
    streams = StreamConfig(lora_rank=4, lora_targets=("attn.k", "mlp.up"))
    c, narrow, f = config.width, config.kv_heads * config.head_dim, config.mlp_width
    assert size(adapter_shapes(config, streams)) == streams.layers * 4 * (c + narrow + c + f)


def test_the_base_has_the_size_that_its_formula_gives():
    c = ModelConfig()
    attention = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    block = attention + 3 * c.width * c.mlp_width + 2 * c.width
    assert size(base_shapes(c)) == c.vocab_size * c.width + c.layers * block + c.width
    assert size(base_shapes(c.replace(tied=False))) - size(base_shapes(c)) == c.vocab_size * c.width


# --- the table and the arrays -------------------------------------------------------------------

@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("config", MODELS)
def test_the_table_of_shapes_is_what_init_makes(config, streams):
    params = init_params(config, streams)
    assert {n: p.shape for n, p in params.items()} == all_shapes(config, streams)
    assert all(p.dtype == np.float32 and np.isfinite(p).all() for p in params.values())


def test_no_two_parameters_share_memory():
    for config in MODELS:
        params = list(init_params(config, STREAMS[-1]).values())
        spans = sorted((p.__array_interface__["data"][0], p.nbytes) for p in params)
        assert all(p.flags.c_contiguous and p.flags.writeable for p in params)
        assert all(at + length <= after for (at, length), (after, _) in zip(spans, spans[1:]))


def test_presets_have_a_table():
    for preset in PRESETS.values():
        assert size(all_shapes(preset.model or ModelConfig(), preset.streams)) > 1e5


# --- the start ----------------------------------------------------------------------------------

@pytest.mark.parametrize("streams", STREAMS[1:])
def test_adding_streams_leaves_the_start_of_the_base_alone(streams):
    base, more = init_params(MODELS[0], None, seed=5), init_params(MODELS[0], streams, seed=5)
    assert all(more[n].tobytes() == p.tobytes() for n, p in base.items())
    assert len(more) > len(base)


def test_no_start_depends_on_what_else_there_is():
    """Each name draws on its own: an option more or less changes no other parameter."""
    few = init_params(MODELS[0], STREAMS[1].replace(prune_rank=0))
    more = init_params(MODELS[0].replace(tied=False), STREAMS[1].replace(insertion_rank=4))
    assert set(few) < set(more)
    assert all(more[n].tobytes() == p.tobytes() for n, p in few.items())


def test_the_start_depends_on_the_seed_and_on_the_name():
    one, again, other = (init_params(MODELS[1], STREAMS[3], seed=s) for s in (0, 0, 1))
    random = [n for n in one if not n.endswith((".gain", ".bias", ".b", ".lora_b"))]
    assert all(np.array_equal(one[n], again[n]) for n in one)
    assert all(not np.array_equal(one[n], other[n]) for n in random)
    firsts = [float(one[n].flat[0]) / one[n].std() for n in random]
    assert len(set(firsts)) == len(random)                # no two start from the same draws


def test_gains_start_at_one_and_no_ops_at_zero():
    params = init_params(MODELS[1], StreamConfig(lora_rank=4, transition_rank=6))
    for name, value in params.items():
        if name.endswith(".gain"):
            assert (value == 1).all(), name
        elif name.endswith((".bias", ".b", ".lora_b")) or name == "transitions.out":
            assert not value.any(), name
        else:
            assert 0.01 < value.std() < 0.6, name


def test_the_projections_that_end_a_sublayer_start_smaller():
    config = ModelConfig(layers=8)
    params = init_params(config)
    for name, fan_in in (("attn.out", config.heads * config.head_dim),
                         ("mlp.down", config.mlp_width)):
        std = params[f"blocks.3.{name}.w"].std()
        assert std == pytest.approx(fan_in ** -0.5 / 4, rel=0.03)         # 4 = sqrt(2 L)
    assert params["blocks.3.attn.q.w"].std() == pytest.approx(config.width ** -0.5, rel=0.03)


# --- base and rest ------------------------------------------------------------------------------

@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("config", MODELS)
def test_is_base_knows_the_base(config, streams):
    base = set(base_shapes(config))
    for name in all_shapes(config, streams):
        assert is_base(name) == (name in base), name


def test_what_training_changes():
    config = ModelConfig(layers=3)
    names = set(all_shapes(config, StreamConfig()))
    assert set(trainable_names(names, None)) == names
    assert set(trainable_names(names, StreamConfig())) == names
    for streams in (StreamConfig(mode="lossless"), StreamConfig(mode="lossless", lora_rank=2),
                    StreamConfig(lora_rank=2)):           # adapters stand in for the base
        shapes = all_shapes(config, streams)
        assert set(trainable_names(shapes, streams)) == set(shapes) - set(base_shapes(config))
