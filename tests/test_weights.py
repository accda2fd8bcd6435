"""What is saved is what is loaded, every tensor is accounted for, and no file is half-written.

Claims: arrays come back to the bit whatever their memory layout (case H-01); a missing, unknown or
misshapen tensor is named, all in one error (H-15); a broken config.json names file and field; a
crash or a full disk leaves the old file and no litter. Broken tensor files: test_weights_broken.py.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tiny_models import CONFIG, LAYERNORM, STREAMS, tiny_model

from minispec.model import Model
from minispec.text import Tokenizer
from minispec.weights import load_model, read_tensors, save_model, write_atomically, write_tensors


@pytest.fixture
def folder(tmp_path):
    """A saved model."""
    save_model(tmp_path, tiny_model(dtype="float32"))
    return tmp_path


# --- to the bit ---------------------------------------------------------------------------------

def test_transposed_and_strided_arrays_come_back_as_they_were(tmp_path):
    """H-01: the safetensors writer alone returns [[0,1],[2,3],[4,5]] for the first."""
    block = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"t": block.T, "s": block[:, ::2], "f": np.asfortranarray(block), "r": block[::-1],
              "wide": np.broadcast_to(block[0], (2, 3)), "scalar": np.array(2.5),
              "none": np.zeros((0, 3)), "int": np.arange(4)[::2], "half": block.astype("f2").T}
    assert (arrays["t"] == [[0, 3], [1, 4], [2, 5]]).all()
    write_tensors(tmp_path / "a.safetensors", arrays)
    back = read_tensors(tmp_path / "a.safetensors")
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape and back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("changes", [{}, LAYERNORM], ids=["rms", "layernorm"])
@pytest.mark.parametrize("streams", [
    None, STREAMS, STREAMS.replace(mode="lossless", lora_rank=2, kind="rotation"),
    STREAMS.replace(lora_rank=3, insertion_rank=2, main_sees_streams=True)])
def test_a_model_comes_back_to_the_bit(tmp_path, changes, streams):
    model = tiny_model(CONFIG.replace(**changes), streams, "float32")
    save_model(tmp_path, model)
    back = load_model(tmp_path)
    assert back.config == model.config and back.streams == model.streams
    assert list(back.params) and set(back.params) == set(model.params)
    for name, value in model.params.items():
        assert back.params[name].dtype == np.float32
        np.testing.assert_array_equal(back.params[name], value)
    ids = [3, 4, 5, 6]
    np.testing.assert_array_equal(back.logits(ids), load_model(tmp_path).logits(ids))
    np.testing.assert_allclose(back.logits(ids), model.logits(ids), rtol=1e-4, atol=1e-4)


def test_parameters_that_are_views_of_other_arrays(tmp_path):
    """H-01 again: GPT-2's matrices arrive transposed, as views."""
    model = tiny_model(dtype="float32")
    views = {n: np.ascontiguousarray(p.T).T for n, p in model.params.items()}
    assert not views["embed.tokens"].flags.c_contiguous
    save_model(tmp_path, Model(model.config, views, model.streams))
    for name, value in load_model(tmp_path).params.items():
        np.testing.assert_array_equal(value, model.params[name])


def test_float16_on_disk_is_that_of_the_model_rounded_once(tmp_path):
    model = tiny_model(dtype="float32")
    save_model(tmp_path, model, "float16")
    size = os.path.getsize(tmp_path / "model.safetensors")
    assert size < 2.2 * sum(p.size for p in model.params.values()) + 8000
    for name, value in load_model(tmp_path).params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, model.params[name].astype("float16"))


def test_the_dtype_of_computation_is_the_callers(folder):
    double = load_model(folder, dtype="float64")
    assert {p.dtype for p in double.params.values()} == {np.dtype("float64")}
    assert double.logits([3, 4]).dtype == np.float64


def test_the_tokenizer_comes_along(tmp_path):
    tokenizer = Tokenizer.train(["select name from town"] * 3, 280)
    config = CONFIG.replace(vocab_size=tokenizer.vocab_size)
    model = tiny_model(config, dtype="float32")
    save_model(tmp_path, Model(config, model.params, model.streams, tokenizer))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    text = "select ü from 🙂"
    assert load_model(tmp_path).tokenizer.encode(text) == tokenizer.encode(text)


# --- every tensor is accounted for --------------------------------------------------------------

def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = dict(read_tensors(path))
    edit(tensors)
    write_tensors(path, tensors)
    return path


def test_all_that_is_wrong_is_named_in_one_error(folder):
    def edit(tensors):
        del tensors["norm.gain"], tensors["blocks.0.attn.q.w"]
        tensors["blocks.0.attn.qq.w"] = tensors["extra"] = np.ones(2, np.float32)
        tensors["streams.embed"] = tensors["streams.embed"].T
        tensors["prune.up"] = tensors["prune.up"][:, :3]
    path = change(folder, edit)
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert message.startswith(f"{path}: missing: blocks.0.attn.q.w, norm.gain; unknown: ")
    assert "unknown: blocks.0.attn.qq.w, extra; wrong shape: prune.up is (3, 3), " in message
    assert "expected (3, 16), streams.embed is (16, 2), expected (2, 16)" in message


def test_a_missing_head_is_never_tied_in_silence(tmp_path):
    """H-15 (a) and (b); (c), other families' defaults, belongs to their loaders."""
    tied = tiny_model(dtype="float32")
    save_model(tmp_path / "tied", tied)
    assert "head.w" not in read_tensors(tmp_path / "tied" / "model.safetensors")
    untied = tiny_model(CONFIG.replace(tied=False), dtype="float32")
    save_model(tmp_path / "untied", untied)
    assert not np.array_equal(untied.params["head.w"], untied.params["embed.tokens"].T)
    assert load_model(tmp_path / "untied").logits([3]).shape == (1, CONFIG.vocab_size)
    change(tmp_path / "untied", lambda tensors: tensors.pop("head.w"))
    with pytest.raises(ValueError, match="model.safetensors: missing: head.w$"):
        load_model(tmp_path / "untied")


# --- the folder and config.json -----------------------------------------------------------------

def test_what_is_not_there_is_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nosuch is not a folder"):
        load_model(tmp_path / "nosuch")
    for name in ("model.safetensors", "config.json"):
        os.unlink(folder / name)
        with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
            load_model(folder)


BROKEN = {
    "no JSON": ("{", "not JSON"), "empty": ("", "not JSON"), "no UTF-8": (b"\xff{}", "not JSON"),
    "deep": ("[" * 100000, "not JSON"), "long number": ('{"format": ' + "9" * 5000 + "}", "JSON"),
    "list": ("[]", "expected a JSON object, got list"), "null": ("null", "JSON object"),
    "no format": ("{}", '"format" is None'), "format": ('{"format": "gpt"}', "'minispec-1'")}


@pytest.mark.parametrize("case", BROKEN)
def test_a_config_file_that_is_none(folder, case):
    text, words = BROKEN[case]
    path = folder / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part, key, value, words", [
    ("model", "width", "abc", "ModelConfig.width is 'abc', expected an integer"),
    ("model", "width", None, "ModelConfig.width is None"),
    ("model", "width", 16.0, "ModelConfig.width is 16.0"),
    ("model", "width", True, "ModelConfig.width is True"),
    ("model", "tied", 1, "ModelConfig.tied is 1, expected true or false"),
    ("model", "norm", "batch", "ModelConfig.norm is 'batch', expected one of 'rms', 'layer'"),
    ("model", "eos_ids", 1, "ModelConfig.eos_ids is 1, expected a list"),
    ("model", "eos_ids", ["1"], "ModelConfig.eos_ids"),
    ("model", "norm_eps", "1e-5", "ModelConfig.norm_eps is '1e-5', expected a finite number"),
    ("model", "norm_eps", float("nan"), "ModelConfig.norm_eps is nan"),
    ("model", "widht", 3, "ModelConfig has no field widht"),
    ("model", None, None, "ModelConfig is None, expected an object"),
    ("model", None, [], "ModelConfig is [], expected an object"),
    ("streams", None, 0, "StreamConfig is 0, expected an object"),
    ("streams", None, {"mode": "lossless", "main_sees_streams": True}, "lossless"),
    ("streams", "layers", 9, "StreamConfig.layers is 9, the model has only 3"),
    ("streams", "lora_targets", ["attn.z"], "StreamConfig.lora_targets has ['attn.z']")])
def test_a_bad_value_in_the_config_names_file_and_field(folder, part, key, value, words):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    if key is None:
        settings[part] = value
    else:
        settings[part][key] = value
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)


@pytest.mark.parametrize("key", ["model", "streams"])
def test_a_config_without_its_parts(folder, key):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    del settings[key]
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f'config.json: "{key}" is missing'):
        load_model(folder)


# --- never half-written -------------------------------------------------------------------------

@pytest.mark.parametrize("call", ["write", "fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_while_writing_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, call,
                                                                  error):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*args):
        raise error

    if call == "write":
        opened = os.fdopen

        def fdopen(*args):
            file = opened(*args)
            return type("Full", (), {"__enter__": lambda self: self, "write": fail,
                                     "__exit__": lambda self, *a: file.close()})()
        monkeypatch.setattr(os, "fdopen", fdopen)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(type(error)):
        write_atomically(path, b"new" * 1000)
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_crash_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    program = ("import os, sys; from minispec.weights import write_atomically\n"
               "os.replace = lambda *a: os._exit(9)\n"
               "write_atomically(sys.argv[1], b'new')")
    root = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", program, str(path)],
                          env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 9 and path.read_bytes() == b"old"
    write_atomically(path, b"newer")                      # a leftover is in nobody's way
    assert path.read_bytes() == b"newer"


def test_missing_folders_are_made_and_others_may_read(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"x")
    assert path.stat().st_mode & 0o777 == 0o644
