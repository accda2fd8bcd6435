"""Claim: every tensor of a family's files lands where it belongs, the right way round, or is named.

Names with and without prefix, buffers, tied heads; fused and transposed matrices; q/k/v biases.
Missing, unknown, misshapen and doubled tensors are one error that names them all.
"""

import numpy as np
import pytest

import minispec
from golden_folders import GOLDEN, NAMES, changed, expected, family_of, tensors_of
from minispec.config import ModelConfig, TrainConfig
from minispec.data import Document
from minispec.families import FAMILIES, GPT2, GPT_NEOX
from minispec.hf import save_hf
from minispec.hf_names import join, sources, split, their_name, transposed
from minispec.model import Model
from minispec.parameters import base_shapes
from minispec.training import Trainer
from minispec.transformer import head_matrix
from test_families import with_streams
from tiny_models import FixedLoader


def logits(folder):
    return minispec.load(folder).logits(np.arange(12))


def refused(folder):
    with pytest.raises(ValueError) as caught:
        minispec.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# --- fused and transposed -----------------------------------------------------------------------

def test_h16_query_key_value_is_fused_head_by_head():
    """Hidden 8, heads 2: rows 0-3 and 12-15 are Q, not 0-7."""
    config = ModelConfig(vocab_size=9, width=8, layers=1, heads=2, kv_heads=2, head_dim=4)
    rows = np.arange(24.0)[:, None].repeat(8, axis=1)     # (24, 8)
    names = ["blocks.0.attn.q.w", "blocks.0.attn.k.w", "blocks.0.attn.v.w"]
    q, k, v = split(GPT_NEOX, config, names, rows)
    assert q.shape == (8, 8) and q[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert k[0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert v[0].tolist() == [8, 9, 10, 11, 20, 21, 22, 23]
    assert np.array_equal(join(GPT_NEOX, config, names, [q, k, v]), rows)
    biases = [n.replace(".w", ".b") for n in names]
    assert split(GPT_NEOX, config, biases, rows[:, 0])[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    # GPT-2: one after the other, in columns
    q, k, v = split(GPT2, config, names, rows.T)
    assert (q[0].tolist(), v[0, 0]) == (list(range(8)), 16)
    assert np.array_equal(join(GPT2, config, names, [q, k, v]), rows.T)


def test_h16_parallel_and_chained_residuals_differ(tmp_path):
    ids, theirs, _ = expected("gpt_neox")
    chained = minispec.load(changed(tmp_path, "gpt_neox", use_parallel_residual=False))
    assert np.abs(chained.logits(ids) - theirs).max() > 0.1
    assert chained.params.keys() == minispec.load(GOLDEN / "gpt_neox").params.keys()


def test_h16_only_the_rotary_share_turns():
    """head_dim 8, share 0.25: channels 0 and 1 turn together, the others stay to the bit."""
    from minispec.attention import rotate_forward
    model = minispec.load(GOLDEN / "gpt_neox")
    assert (model.config.head_dim, model.config.rotary_dim) == (8, 2)
    x = np.random.default_rng(0).normal(size=(1, 2, 5, 8)).astype("float32")
    cos, sin = (t[:5][None, None] for t in model.angles.table)
    y, _ = rotate_forward(x, cos, sin)
    assert np.array_equal(y[..., 2:], x[..., 2:]) and not np.allclose(y[:, :, 1:, :2],
                                                                      x[:, :, 1:, :2])
    assert np.allclose(y[0, 0, 1, 0], x[0, 0, 1, 0] * np.cos(1) - x[0, 0, 1, 1] * np.sin(1))


def test_h41_gpt2_matrices_are_stored_input_by_output(tmp_path):
    """The square c_proj would pass any shape check the wrong way round."""
    stored, model = tensors_of(GOLDEN / "gpt2"), minispec.load(GOLDEN / "gpt2")
    for ours, theirs in (("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"),
                         ("mlp.down", "mlp.c_proj")):
        assert np.array_equal(model.params[f"blocks.1.{ours}.w"],
                              stored[f"transformer.h.1.{theirs}.weight"])
    assert np.array_equal(model.params["blocks.1.attn.k.w"],
                          stored["transformer.h.1.attn.c_attn.weight"][:, 16:32])
    assert (model.config.activation, model.config.norm_eps) == ("gelu", 1e-5)

    def turned(tensors):
        return {n: a.T if a.ndim == 2 and ".h." in n else a for n, a in tensors.items()}

    message = refused(changed(tmp_path, "gpt2", tensors=turned))
    for part in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj"):    # the square one cannot be told apart
        assert f"transformer.h.0.{part}.weight is (" in message


@pytest.mark.parametrize("name", NAMES)
def test_split_and_join_are_inverse_in_every_family(name):
    family, model = FAMILIES[family_of(name)], minispec.load(GOLDEN / name)
    for source in sources(family, model.config).values():
        array = np.random.default_rng(0).normal(size=source.shape)
        parts = split(family, model.config, source.ours, array)
        assert [p.shape for p in parts] == [base_shapes(model.config)[n] for n in source.ours]
        assert np.array_equal(join(family, model.config, source.ours, parts), array)


def test_only_gpt2_stores_input_by_output_and_never_its_head():
    assert [n for n, f in FAMILIES.items() if not f.out_in] == ["gpt2"]
    assert transposed(GPT2, "head.w") and not transposed(GPT2, "blocks.0.mlp.up.w")
    assert not transposed(FAMILIES["llama"], "embed.tokens")
    assert their_name(GPT2, "blocks.11.attn.v.b") == "h.11.attn.c_attn.bias"


# --- names --------------------------------------------------------------------------------------

PREFIX = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "opt": "model.decoder."}
BUFFERS = {
    "gpt2": {"h.0.attn.bias": np.tri(64)[None, None], "h.1.attn.masked_bias": np.float32(-1e4)},
    "gpt_neox": {"layers.0.attention.bias": np.tri(64)[None, None],
                 "layers.0.attention.masked_bias": np.float32(-1e9),
                 "layers.1.attention.rotary_emb.inv_freq": np.ones(1)},
    "llama": {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2),
              "rotary_emb.inv_freq": np.ones(2)},
    "phi": {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}}


@pytest.mark.parametrize("name", NAMES)
def test_h26_with_and_without_prefix_and_buffers(name, tmp_path):
    prefix = PREFIX.get(family_of(name), "model.")
    extra = {prefix + n: np.asarray(a, "float32") for n, a in
             BUFFERS.get(family_of(name), {}).items()}
    stored = tensors_of(GOLDEN / name)
    assert any(n.startswith(prefix) for n in stored)
    for tensors in (stored, {**extra, **stored}):
        bare = {n.removeprefix(prefix): a for n, a in tensors.items()}
        for variant in (tensors, bare):
            folder = changed(tmp_path, name, tensors=variant)
            assert np.array_equal(logits(folder), logits(GOLDEN / name))


def test_h26_the_mask_buffer_is_never_the_projection_bias(tmp_path):
    """h.0.attn.bias is the causal mask, h.0.attn.c_attn.bias the bias."""
    folder = changed(tmp_path, "gpt2", tensors=lambda t: {
        **{n: a for n, a in t.items() if n != "transformer.h.0.attn.c_attn.bias"},
        "transformer.h.0.attn.bias": np.zeros(48, "float32")})
    assert "missing: transformer.h.0.attn.c_attn.bias" in refused(folder)


@pytest.mark.parametrize("name", NAMES)
def test_h26_every_fault_is_named_in_one_error(name, tmp_path):
    stored = tensors_of(GOLDEN / name)
    first, second, *_ = (n for n in stored if stored[n].ndim == 2)
    norm = next(n for n in stored if stored[n].ndim == 1)
    faulty = {**{n: a for n, a in stored.items() if n != second}, first: stored[first][:-1],
              "extra.one": np.ones(2), f"{norm}.lora": np.ones((2, 2))}
    message = refused(changed(tmp_path, name, tensors=faulty))
    assert f"missing: {second}" in message and f"unknown: extra.one, {norm}.lora" in message
    assert f"wrong shape: {first} is {faulty[first].shape}, expected {stored[first].shape}" \
        in message
    bare = {n.removeprefix(PREFIX.get(family_of(name), "model.")): a for n, a in stored.items()}
    both = next(n for n in stored if n not in bare)
    message = refused(changed(tmp_path, name, tensors={**bare, both: stored[both]}))
    assert "twice: " in message and both in message


def test_one_missing_layer_is_named_tensor_by_tensor(tmp_path):
    message = refused(changed(tmp_path, "llama", num_hidden_layers=3))
    assert message.count("model.layers.2.") == 9 and "unknown: " not in message
    message = refused(changed(tmp_path, "llama", num_hidden_layers=1))
    assert message.count("model.layers.1.") == 9 and "missing: " not in message


# --- tied heads ---------------------------------------------------------------------------------

def test_h15_tied_and_missing_heads(tmp_path):
    ids = np.arange(12)
    tied = minispec.load(GOLDEN / "llama")                # (a) tied, no lm_head: the embedding
    assert "head.w" not in tied.params
    assert np.array_equal(head_matrix(tied.params), tied.params["embed.tokens"].T)
    folder = changed(tmp_path, "llama", tie_word_embeddings=False)
    assert "missing: lm_head.weight" in refused(folder)   # (b) untied, no lm_head
    folder = changed(tmp_path, "llama", drop=["tie_word_embeddings"])
    assert "missing: lm_head.weight" in refused(folder)   # (c) llama's own default: untied
    folder = changed(tmp_path, "gpt2", drop=["tie_word_embeddings"])
    assert np.array_equal(logits(folder), minispec.load(GOLDEN / "gpt2").logits(ids))
    folder = changed(tmp_path, "opt", drop=["tie_word_embeddings"])
    assert np.array_equal(logits(folder), minispec.load(GOLDEN / "opt").logits(ids))


def test_h15_a_tied_head_that_is_stored_all_the_same(tmp_path):
    """Older files hold it twice. It must be the embedding: another one would be ignored."""
    def with_head(change):
        return lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + change}

    folder = changed(tmp_path, "gpt2", tensors=with_head(np.float32(0)))
    assert np.array_equal(logits(folder), logits(GOLDEN / "gpt2"))
    assert "lm_head.weight differs" in refused(changed(tmp_path, "gpt2",
                                                       tensors=with_head(np.float32(1e-3))))
    untied = minispec.load(changed(tmp_path, "gpt2", tensors=with_head(np.float32(1e-3)),
                                   tie_word_embeddings=False))
    assert np.allclose(untied.params["head.w"], untied.params["embed.tokens"].T + 1e-3)


# --- widths and biases --------------------------------------------------------------------------

def test_h28_head_dim_is_not_hidden_by_heads():
    """Hidden 24, heads 4, kv heads 2, head_dim 8: q 24 -> 32, o 32 -> 24, and key head 0 serves
    query heads 0 and 1 (the logits agree with transformers: test_families.py)."""
    model = minispec.load(GOLDEN / "qwen3")
    assert (model.config.width, model.config.head_dim) == (24, 8)
    shapes = {n: p.shape for n, p in model.params.items()}
    assert shapes["blocks.0.attn.q.w"] == (24, 32) and shapes["blocks.0.attn.out.w"] == (32, 24)
    assert shapes["blocks.0.attn.k.w"] == shapes["blocks.0.attn.v.w"] == (24, 16)
    # silencing key head 0's values changes query heads 0 and 1 only
    from minispec.attention import attention_forward
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, h, 3, 8)) for h in (4, 2, 2))
    y, _ = attention_forward(q, k, v, np.tri(3, dtype=bool)[None])
    v[:, 0] = 0
    silent, _ = attention_forward(q, k, v, np.tri(3, dtype=bool)[None])
    assert not silent[:, :2].any() and np.array_equal(silent[:, 2:], y[:, 2:])


def test_h28_gradients_of_a_loaded_model():
    """One training step of qwen3 with streams changes every parameter."""
    model = with_streams(minispec.load(GOLDEN / "qwen3", dtype="float64"))
    before = {n: p.copy() for n, p in model.params.items()}
    train_one_step(model)
    assert all(not np.array_equal(model.params[n], p) for n, p in before.items())


def train_one_step(model):
    """A step of AdamW on one small batch."""
    rng = np.random.default_rng(0)
    group = [Document(rng.integers(0, 67, 12).tolist(), 3) for _ in range(3)]
    loader = FixedLoader([group], model.streams.count if model.streams else 0)
    Trainer(model, loader, TrainConfig(steps=2, warmup=0, batch=3, workers=1)).one_step()


def test_h40_qwen2_biases_are_used_and_kept_and_none_invented(tmp_path):
    model = minispec.load(GOLDEN / "qwen2")
    biases = {n for n in model.params if n.endswith(".b")}
    assert biases == {f"blocks.{i}.attn.{p}.b" for i in (0, 1) for p in "qkv"}
    assert not any(n.endswith(".b") for n in minispec.load(GOLDEN / "llama").params)
    save_hf(tmp_path / "saved", model, "qwen2")
    kept = {n for n in tensors_of(tmp_path / "saved") if n.endswith("bias")}
    assert len(kept) == 6 and kept < set(tensors_of(GOLDEN / "qwen2"))
    silent = Model(model.config, {n: p * 0 if n in biases else p for n, p in model.params.items()})
    assert np.abs(silent.logits([3, 4, 5]) - model.logits([3, 4, 5])).max() > 0.1
    before = {n: model.params[n].copy() for n in biases}
    train_one_step(model)
    assert all(not np.array_equal(model.params[n], b) for n, b in before.items())
    # a bias that nothing would read
    folder = changed(tmp_path / "odd", "qwen2", tensors=lambda t: {
        **t, "model.layers.0.self_attn.o_proj.bias": np.ones(16, "float32")})
    assert "unknown: model.layers.0.self_attn.o_proj.bias" in refused(folder)
    folder = changed(tmp_path / "odd", "qwen2", model_type="llama", tie_word_embeddings=True)
    assert refused(folder).count("_proj.bias") == 6
