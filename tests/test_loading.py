"""Claim: `minispec.load` takes our folders, HF-style folders and hub ids, and says what is wrong.

No test goes to the network: huggingface_hub is replaced, or told that it is offline.
"""

import json
import pathlib

import huggingface_hub
import numpy as np
import pytest

import minispec
from golden_folders import GOLDEN, changed, expected
from minispec.loading import HUB_ID, fetch

TINY = pathlib.Path(__file__).parents[1] / "weights" / "tiny"


def test_both_formats_are_recognised():
    assert minispec.load(str(TINY)).streams is not None
    assert minispec.load(GOLDEN / "gpt2").config.positions == "learned"
    assert minispec.load(GOLDEN / "gpt2", dtype="float64").dtype == np.float64


@pytest.mark.parametrize("settings, message", [
    ({}, '"format" is None'), ({"format": "minispec-9"}, "minispec-9"),
    ({"architectures": ["LlamaForCausalLM"]}, '"format" is None'),
    ({"model_type": "bert"}, "model_type 'bert'")])
def test_a_folder_of_neither_kind(settings, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        minispec.load(tmp_path)


def test_a_folder_that_is_missing_or_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        minispec.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        minispec.load(tmp_path / "nosuch")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match="not JSON"):
        minispec.load(tmp_path)


# --- hub ids ------------------------------------------------------------------------------------

def test_what_looks_like_a_hub_id():
    for name in ("HuggingFaceTB/SmolLM2-135M", "EleutherAI/pythia-70m", "a/b.c_d"):
        assert HUB_ID.fullmatch(name)
    for name in ("gpt2", "/work/x", "./a/b", "../a", "a/b/c", "a/", "/a", "", "a//b", "a/.."):
        assert not HUB_ID.fullmatch(name) and fetch(name) == name


def test_a_hub_id_is_fetched_and_loaded(tmp_path, monkeypatch):
    asked, folder = [], changed(tmp_path, "llama")

    def snapshot_download(name, allow_patterns=None, **options):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    ids, logits, _ = expected("llama")
    assert np.abs(minispec.load("someone/small-llama").logits(ids) - logits).max() < 1e-4
    (name, patterns), = asked
    assert name == "someone/small-llama" and "config.json" in patterns
    assert not any("bin" in p or p == "*" for p in patterns)      # no pickles, no second copy


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
    changed(tmp_path / "someone" / "llama", "llama")
    monkeypatch.chdir(tmp_path)
    assert minispec.load("someone/llama").config.layers == 2


@pytest.mark.parametrize("why", [ConnectionError("no route\nto host"), OSError("404"),
                                 ValueError("bad"), RuntimeError("")])
def test_without_a_network_the_error_says_what_to_put_where(why, monkeypatch):
    def fails(*args, **options):
        raise why

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(FileNotFoundError) as caught:
        minispec.load("someone/small-llama")
    message = str(caught.value)
    for part in ("someone/small-llama", "config.json", "model.safetensors", "tokenizer.json",
                 "model.safetensors.index.json", "path"):
        assert part in message
    assert "\n" not in message


def test_offline_the_real_hub_package_gives_the_same_error(monkeypatch, tmp_path):
    """Nothing in its cache, and told to stay offline: at once, without a traceback of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no/such-model-anywhere is no folder"):
        minispec.load("no/such-model-anywhere")
