"""Claim: an adapter is what training added to a base, and fits this base alone.

Attached, it shares the base's arrays and starts as a no-op. Saved and loaded it is the same, bit
for bit, and nothing of the base is in its folder. Another base, or a broken folder, is refused in
one line. Merged adapters decode as separate ones do. Everything on a golden checkpoint.
"""

import json
import pathlib

import numpy as np
import pytest

import minispec
from minispec.adapter import (attach, base_hash, load_adapter, merged, save_adapter)
from minispec.config import StreamConfig
from minispec.generate import generate
from minispec.hf import load_hf
from minispec.model import Model
from minispec.parameters import is_base
from minispec.weights import read_tensors, save_model, write_tensors

GOLDEN = pathlib.Path(__file__).parent / "golden"
SHARED = StreamConfig(count=2, layers=1, lora_rank=2, lora_alpha=3.0, transition_rank=3,
                      prune_rank=2)
LOSSLESS = SHARED.replace(mode="lossless")
PROMPT = [3, 14, 15, 9, 2, 6]


def base(family="llama", dtype="float64"):
    return load_hf(GOLDEN / family, dtype=dtype)


def trained(model, streams=SHARED, draft_ids=None):
    """An adapter that looks trained: every value is noise that float16 holds exactly."""
    model = attach(model, streams, 0, draft_ids)
    for name in model.params:
        if not is_base(name):
            rng = np.random.default_rng([5, *name.encode()])
            noise = rng.normal(0, 0.3, model.params[name].shape)
            model.params[name] = noise.astype("float16").astype(model.dtype)
    return Model(model.config, model.params, model.streams, model.tokenizer, draft_ids)


def refused(call, *words):
    """`call` raises a ValueError of one line with these words."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(str(w) in message for w in words), message


# --- attached -----------------------------------------------------------------------------------

def test_the_base_is_shared_and_left_alone():
    plain = base()
    before = base_hash(plain)
    model = attach(plain, SHARED)
    assert all(model.params[n] is a for n, a in plain.params.items())
    added = {n: a for n, a in model.params.items() if n not in plain.params}
    assert added and not any(is_base(n) for n in added)
    assert {a.dtype.name for a in added.values()} == {"float64"}
    again, other = attach(plain, SHARED), attach(plain, SHARED, seed=1)
    assert all(np.array_equal(again.params[n], a) for n, a in added.items())
    assert not np.array_equal(other.params["streams.embed"], added["streams.embed"])
    assert base_hash(model) == before == base_hash(plain)


@pytest.mark.parametrize("streams", [SHARED, LOSSLESS])
def test_it_starts_as_a_no_op(streams):
    plain = base()
    assert np.array_equal(attach(plain, streams).logits(PROMPT), plain.logits(PROMPT))


def test_lossless_adapters_never_touch_the_output():
    plain = base()
    model = trained(plain, LOSSLESS)
    assert np.abs(model.logits(PROMPT) - plain.logits(PROMPT)).max() < 1e-12
    want = generate(plain, PROMPT, 20).ids
    assert generate(model, PROMPT, 20, drafter="streams").ids == want
    assert np.abs(trained(plain, SHARED).logits(PROMPT) - plain.logits(PROMPT)).max() > 0.01


def test_what_cannot_be_attached():
    refused(lambda: attach(attach(base(), SHARED), SHARED), "has streams already")
    refused(lambda: attach(base(), SHARED.replace(layers=99)), "layers is 99")
    refused(lambda: attach(base(), SHARED.replace(draft_vocab=4)), "draft ids are missing")


def test_scaled_embeddings_are_larger_embeddings():
    plain = base()
    model, scaled = trained(plain), trained(plain, SHARED.replace(embed_scale=4.0))
    params = {**model.params, "streams.embed": 4.0 * model.params["streams.embed"]}
    same = Model(model.config, params, model.streams)
    states = [m.deferred_streams(c, m.prefill(c, PROMPT).hidden[-1])
              for m in (scaled, same, model) for c in [m.new_cache()]]
    assert np.abs(states[0] - states[1]).max() < 1e-12 < np.abs(states[0] - states[2]).max()


# --- saved and loaded ---------------------------------------------------------------------------

@pytest.mark.parametrize("draft_ids", [None, np.array([0, 3, 7], np.int32)])
@pytest.mark.parametrize("streams", [SHARED, LOSSLESS])
def test_loaded_is_what_was_saved(tmp_path, streams, draft_ids):
    streams = streams.replace(draft_vocab=0 if draft_ids is None else 4, embed_scale=2.5)
    model = trained(base(), streams, draft_ids)
    save_adapter(tmp_path, model, "some/base")
    again = load_adapter(tmp_path, base())
    assert again.streams == streams and set(again.params) == set(model.params)
    assert all(np.array_equal(again.params[n], a) for n, a in model.params.items())
    assert (again.draft_ids is None) == (draft_ids is None)
    assert again.draft_ids is None or np.array_equal(again.draft_ids, draft_ids)
    tensors = read_tensors(tmp_path / "adapter.safetensors")
    assert not any(is_base(n) for n in tensors if n != "draft.ids")
    assert {a.dtype.name for n, a in tensors.items() if n != "draft.ids"} == {"float16"}
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["base"] == "some/base" and settings["base_hash"] == base_hash(model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter.safetensors", "config.json"]


def test_the_hash_is_of_names_shapes_and_float32_values():
    assert base_hash(base()) == base_hash(base(dtype="float32")) != base_hash(base("mistral"))
    plain, known = base(), base_hash(base())
    name = "blocks.0.mlp.up.w"
    plain.params[name] = plain.params[name].copy()
    plain.params[name][2, 1] += 1e-3
    assert base_hash(plain) != known
    plain.params[name][2, 1] -= 1e-3
    assert base_hash(plain) == known
    plain.params[name] = plain.params[name].reshape(plain.params[name].shape[::-1])
    assert base_hash(plain) != known


def test_another_base_is_refused(tmp_path):
    model, other = trained(base()), base()
    save_adapter(tmp_path, model, "some/base")
    other.params["norm.gain"] = other.params["norm.gain"] * 2
    refused(lambda: load_adapter(tmp_path, other), tmp_path, "another base", "some/base",
            base_hash(model)[:12], base_hash(other)[:12])
    refused(lambda: load_adapter(tmp_path, model), "has streams already")


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("streams.embed"), ["missing: streams.embed"]),
    (lambda t: t.pop("draft.ids"), ["missing: draft.ids"]),
    (lambda t: t.update(extra=np.ones(2)), ["unknown: extra"]),
    (lambda t: t.update({"prune.up": np.ones((2, 3))}), ["wrong shape: prune.up is (2, 3)"]),
    (lambda t: t.update({"draft.ids": np.array([5, 1])}), ["ascending"]),
    (lambda t: t.update({"draft.ids": np.arange(99)}), ["draft ids must be 1 to 4"]),
    (lambda t: (t.pop("prune.up"), t.update(extra=np.ones(2))), ["missing", "unknown: extra"])])
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, words):
    model = trained(base(), SHARED.replace(draft_vocab=4), np.array([0, 3, 7]))
    save_adapter(tmp_path, model, "some/base")
    path = tmp_path / "adapter.safetensors"
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)
    refused(lambda: load_adapter(tmp_path, base()), path, *words)
    path.write_bytes(b"short")
    refused(lambda: load_adapter(tmp_path, base()), path, "not a readable safetensors file")


@pytest.mark.parametrize("key, value, words", [
    ("format", "minispec-1", ['"format" is', "minispec-adapter-1"]), ("base", None, ['"base"']),
    ("base_hash", 3, ['"base_hash"']), ("model", [], ['"model"']), ("streams", None, ['"streams"']),
    ("streams", {"count": 0}, ["count is 0"]), ("model", {"colour": 1}, ["no field colour"])])
def test_settings_that_do_not_fit_are_refused(tmp_path, key, value, words):
    save_adapter(tmp_path, trained(base()), "some/base")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    refused(lambda: load_adapter(tmp_path, base()), path, *words)


def test_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_adapter(tmp_path / "none", base())
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        load_adapter(tmp_path, base())
    save_adapter(tmp_path, trained(base()), "some/base")
    (tmp_path / "adapter.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter.safetensors is missing"):
        load_adapter(tmp_path, base())


def test_what_cannot_be_saved(tmp_path):
    refused(lambda: save_adapter(tmp_path, base(), "b"), "no streams")
    model = trained(base())
    model.params["streams.embed"][0, 0] = 1e6
    refused(lambda: save_adapter(tmp_path, model, "b"), "not finite in float16", "streams.embed")
    assert not list(tmp_path.iterdir())


# --- merged, and loaded by the public function --------------------------------------------------

@pytest.mark.parametrize("streams", [SHARED, SHARED.replace(lora_all_layers=True)])
def test_merged_adapters_decode_as_separate_ones(streams):
    model = trained(base(), streams)
    once = merged(model)
    assert not any(n.endswith((".lora_a", ".lora_b")) for n in once.params)
    assert np.abs(once.logits(PROMPT) - model.logits(PROMPT)).max() < 1e-11
    outs = [generate(m, PROMPT, 20, drafter="streams") for m in (once, model)]
    assert outs[0].ids == outs[1].ids and outs[0].stats.accepted == outs[1].stats.accepted
    lossless = trained(base(), LOSSLESS)
    assert merged(lossless) is lossless and merged(base()).streams is None


@pytest.mark.parametrize("streams", [SHARED, LOSSLESS])
@pytest.mark.parametrize("kind", ["hf", "ours"])
def test_load_with_an_adapter(tmp_path, streams, kind):
    folder = GOLDEN / "llama"
    if kind == "ours":
        folder = tmp_path / "base"
        save_model(folder, base())
    plain = minispec.load(folder)
    model = trained(plain, streams)
    save_adapter(tmp_path / "adapter", model, str(folder))
    loaded = minispec.load(folder, adapter=tmp_path / "adapter")
    assert (loaded.streams.lora_rank == 0) == (streams is SHARED)
    assert loaded.packed_head is not None
    assert np.abs(loaded.logits(PROMPT) - model.logits(PROMPT)).max() < 1e-3
    out = minispec.generate(loaded, PROMPT, 20, drafter="streams")
    assert out.ids == minispec.generate(loaded, PROMPT, 20).ids
    if streams is LOSSLESS:
        assert out.ids == minispec.generate(plain, PROMPT, 20).ids
    refused(lambda: minispec.load(GOLDEN / "mistral", adapter=tmp_path / "adapter"), "another base")
