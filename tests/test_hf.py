"""Claim: an HF-style folder in one file or in shards, with what a download can do to it.

The index decides which files are read (H-30); a missing one is named before anything is computed.
Loading shows its progress, keeps little besides the model in memory, and drops nothing. stories260K
(../shared/models) tells its story; parity with transformers on it is live, in `make parity`.
"""

import json
import pathlib

import numpy as np
import pytest
import tokenizers

import minispec
from golden_folders import GOLDEN, changed, expected, tensors_of
from minispec import hf
from minispec.hf import INDEX, Shards, save_hf
from minispec.model import Model
from minispec.parameters import init_params
from minispec.tensorfile import TensorFile, write_tensor_file
from test_families import with_streams

STORIES = pathlib.Path(__file__).parents[1] / ".." / "shared" / "models" / "stories260K"


def refused(folder, error=ValueError):
    with pytest.raises(error) as caught:
        minispec.load(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


# --- shards -------------------------------------------------------------------------------------

SHARD = "model-0000{}-of-00002.safetensors"


def sharded(folder, name="llama", shard=SHARD, **index):
    """A golden folder cut in two files, by tensor in turn, with their index."""
    tensors = tensors_of(changed(folder, name))
    (folder / "model.safetensors").unlink()
    home = {n: shard.format(1 + i % 2) for i, n in enumerate(tensors)}
    for file in set(home.values()):
        write_tensor_file(folder / file, {n: a for n, a in tensors.items() if home[n] == file})
    home.update(index)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


def test_h30_shards_give_the_same_model_and_the_index_decides(tmp_path):
    ids, logits, _ = expected("llama")
    whole = minispec.load(GOLDEN / "llama").logits(ids)
    assert np.array_equal(minispec.load(sharded(tmp_path / "a")).logits(ids), whole)
    odd = sharded(tmp_path / "b", shard="model.safetensors-0000{}-of-00002.safetensors")
    assert np.array_equal(minispec.load(odd).logits(ids), whole)
    # an unrelated model beside the shards is not looked at
    write_tensor_file(tmp_path / "a" / "model.safetensors", {"other": np.ones(3)})
    (tmp_path / "a" / "consolidated.safetensors").write_bytes(b"broken")
    assert np.array_equal(minispec.load(tmp_path / "a").logits(ids), whole)


def test_h30_a_missing_shard_is_named_before_any_compute(tmp_path, monkeypatch):
    folder = sharded(tmp_path)
    (folder / SHARD.format(2)).unlink()
    monkeypatch.setattr(TensorFile, "read", lambda *args: pytest.fail("something was read"))
    message = refused(folder, FileNotFoundError)
    assert SHARD.format(2) in message and SHARD.format(1) not in message
    (folder / SHARD.format(1)).unlink()
    message = refused(folder, FileNotFoundError)
    assert SHARD.format(2) in message and SHARD.format(1) in message


def test_h30_no_weights_at_all(tmp_path):
    folder = changed(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(folder, FileNotFoundError)


def test_an_index_that_its_files_do_not_fit(tmp_path):
    message = refused(sharded(tmp_path, **{"model.norm.weight": SHARD.format(1)}))
    assert "disagree on model.norm.weight" in message or "norm" in message
    assert "ghost" in refused(sharded(tmp_path, ghost=SHARD.format(1)))
    for wrong in ({"weight_map": {}}, {}, {"weight_map": {"a": 3}}, {"weight_map": ["a"]},
                  {"weight_map": {"a": "../../etc/passwd"}}, {"weight_map": {"a": ""}}):
        (tmp_path / INDEX).write_text(json.dumps(wrong))
        assert INDEX in refused(tmp_path)
    (tmp_path / INDEX).write_text("{")
    assert "not JSON" in refused(tmp_path)


# --- broken and odd -----------------------------------------------------------------------------

def test_h34_a_broken_weight_file_is_named(tmp_path):
    folder = changed(tmp_path, "llama")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for broken in (data[:-4], data[:100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(broken)
        assert str(path) in refused(folder)


def test_h33_weights_of_an_unsupported_dtype_are_named_before_any_is_read(tmp_path, monkeypatch):
    folder = changed(tmp_path, "llama")
    path, name = folder / "model.safetensors", "model.norm.weight"
    head = path.read_bytes()
    length = int.from_bytes(head[:8], "little")
    header = json.loads(head[8:8 + length])
    header[name].update(dtype="I32")
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + head[8 + length:])
    monkeypatch.setattr(TensorFile, "read", lambda *args: pytest.fail("something was read"))
    assert f"unsupported dtype of {name} (I32)" in refused(folder)


def test_every_number_of_the_file_is_used(tmp_path):
    """Changing any tensor of any family changes the logits or is a position that the text lacks."""
    ids = np.arange(60)
    for name in ("gpt2", "gpt_neox", "opt_350m", "phi", "qwen3"):
        model = minispec.load(GOLDEN / name)
        before = model.unpack().logits(ids)
        for label, value in model.params.items():
            old = value.copy()
            value += 0.5 * np.random.default_rng(0).normal(size=value.shape).astype("float32")
            moved = np.abs(model.logits(ids) - before).max()
            value[...] = old
            # a key bias moves all scores of a row alike; softmax does not see it (without rope)
            assert moved > 1e-3 or label.endswith("attn.k.b"), (name, label)


def test_loading_shows_progress_in_bytes(monkeypatch):
    bars = []

    class Bar(hf.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "disable": False, "leave": True})
            bars.append(self)

    monkeypatch.setattr(hf, "tqdm", Bar)
    minispec.load(GOLDEN / "gpt2")
    size = sum(a.nbytes for a in tensors_of(GOLDEN / "gpt2").values())
    assert [(bar.n, bar.total, bar.desc) for bar in bars] == [(size, size, "loading")]


def test_a_model_with_streams_or_of_another_shape_is_not_saved(tmp_path):
    model = minispec.load(GOLDEN / "llama")
    with pytest.raises(ValueError, match="has streams"):
        save_hf(tmp_path, with_streams(model), "llama")
    with pytest.raises(ValueError, match="family gpt2 cannot express"):
        save_hf(tmp_path, model, "gpt2")
    assert list(tmp_path.iterdir()) == []


def test_our_shipped_model_without_its_streams_becomes_a_llama_folder(tmp_path):
    shipped = minispec.load(pathlib.Path(__file__).parents[1] / "weights" / "tiny")
    plain = Model(shipped.config, {n: shipped.params[n] for n in init_params(shipped.config)},
                  None, shipped.tokenizer).pack()
    save_hf(tmp_path, plain, "llama")
    back = minispec.load(tmp_path)
    assert back.config == plain.config and back.tokenizer.encode("SELECT") == \
        plain.tokenizer.encode("SELECT")
    prompt = "Attributes: name[The Quiet Anchor], eatType[pub]\nDescription:\n"
    assert minispec.generate(back, prompt, 20).text == minispec.generate(plain, prompt, 20).text


def test_a_shards_object_closes_its_files():
    with Shards(GOLDEN / "llama") as shards:
        assert shards.read("model.norm.weight", "float32").shape == (16,)
    with pytest.raises(ValueError):
        shards.read("model.norm.weight", "float32")


# --- the tokenizer beside the weights -----------------------------------------------------------

def with_tokenizer(folder, template, **settings):
    """A golden folder with a byte-level tokenizer; `template`: does it put <s> (id 60) in front?"""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[10:70]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    if template:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    changed(folder, "llama", **settings)
    inner.save(str(folder / "tokenizer.json"))
    return minispec.load(folder)


def test_h22_bos_follows_the_tokenizer_and_not_config_json(tmp_path):
    model = with_tokenizer(tmp_path / "a", template=True, bos_token_id=None)
    assert model.config.bos_id == model.tokenizer.bos_id == 60
    for text in ("<s>12", "12"):
        ids = model.tokenizer.encode(text)
        assert ids[0] == 60 and ids.count(60) == 1 and len(ids) == 3
    plain = with_tokenizer(tmp_path / "b", template=False, bos_token_id=60)
    assert plain.config.bos_id == -1 and 60 not in plain.tokenizer.encode("12")
    assert minispec.generate(model, "12", 5).ids == \
        minispec.generate(plain, [60, *plain.tokenizer.encode("12")], 5).ids


# --- a real model -------------------------------------------------------------------------------

@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not there")
def test_stories260k_tells_a_story():
    model = minispec.load(STORIES)
    assert (model.config.eos_ids, model.config.bos_id, model.tokenizer.bos_id) == ((2,), 1, 1)
    out = minispec.generate(model, "Once upon a time, there was a little girl who", 40)
    assert out.text.startswith("loved to play with her toys. One day, she went to the park")
    fast = with_streams(model, transition_rank=0)
    fast.config = model.config
    assert minispec.generate(fast, "Once upon a time", 40, drafter="streams").ids == \
        minispec.generate(model, "Once upon a time", 40).ids
    lookup = minispec.generate(model, "Once upon a time", 40, drafter="prompt_lookup")
    assert lookup.ids == minispec.generate(model, "Once upon a time", 40).ids
