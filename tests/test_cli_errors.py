"""Whatever a user gets wrong, the scripts answer with one clear line and a status that is not 0.

Claims: bad flags, prompts, files and model folders never show a traceback, and the line names the
flag, file or value at fault; the same errors reach a caller of the library as ValueError.
"""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from running import SMALL, jsonl, run
from tiny import stream_config, tiny_model

import minispec
from minispec.compare import Difference
from minispec.model import Model
from minispec.text import Tokenizer
from minispec.weights import save_model

TOKENIZER = Tokenizer.train(["the cat sat on the mat"] * 9, 270)
LONG = "hello world " * 300


def with_tokenizer(streams):
    model = tiny_model("llama", streams, vocab_size=TOKENIZER.vocab_size, dtype="float32")
    return Model(model.config, model.params, model.streams, TOKENIZER)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small model without a pruning map."""
    path = tmp_path_factory.mktemp("models") / "small"
    save_model(path, with_tokenizer(stream_config("conditional", prune_rank=0)))
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of that folder, to be broken."""
    return shutil.copytree(folder, tmp_path / "copy")


def check_error(script, args, *words):
    """The script ends with a status that is not 0 and one line that holds these words."""
    status, out, err = run(script, *args)
    lines = err.strip("\n").split("\n")
    if lines[0].startswith("usage:"):
        lines = [line for line in lines if line.startswith(script)]
    assert status in (1, 2) and len(lines) == 1, (status, err)
    assert lines[0].startswith(f"{script}: ") and "Traceback" not in out + err
    for word in words:
        assert str(word) in lines[0], lines[0]


# --- flags --------------------------------------------------------------------------------------

@pytest.mark.parametrize("args, words", [
    ("--temperature -1", "temperature is -1.0"), ("--temperature nan", "temperature is nan"),
    ("--temperature warm", "--temperature"), ("--top-k -1", "top_k is -1"),
    ("--top-p 0", "top_p is 0.0"), ("--seed -1", "seed is -1"), ("--seed 1.5", "--seed"),
    ("--k 0", "k is 0, expected 1 or more"), ("--budget -1", "budget is -1"),
    ("--depth -2", "depth is -2"), ("--prune-threshold 2", "prune_threshold is 2.0"),
    ("--max-new-tokens -1", "max_new_tokens is -1"), ("--runs 0", "--runs is 0"),
    ("--per-task 0", "--per-task is 0"), ("--shape round", "--shape"), ("--nope", "--nope"),
    ("--drafter nope", "unknown drafter 'nope'"), ("--drafter nope --json", "unknown drafter")])
def test_flags_of_decode(folder, args, words):
    check_error("decode.py", ["--model", folder, "--prompt", "a", *args.split()], words)


def test_an_empty_stop_string(folder):
    check_error("decode.py", ["--model", folder, "--prompt", "a", "--stop", ""], "stop string")


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr("minispec.backend.gpu_problem", lambda: "cupy is not installed")
    check_error("decode.py", ["--device", "gpu"], "'gpu'", "cupy is not installed")


@pytest.mark.parametrize("args, words", [
    ("--steps 0", "steps is 0"), ("--batch 0", "batch is 0"), ("--lr nan", "lr is nan"),
    ("--lr 0", "lr is 0.0"), ("--width 0", "width is 0"), ("--width wide", "--width"),
    ("--heads 3 --kv-heads 2", "heads is 3, expected a multiple of kv_heads, 2"),
    ("--head-dim 7", "head_dim is 7, expected an even number"), ("--streams 0", "count is 0"),
    ("--vocab-size 10", "vocab_size is 10"), ("--stream-layers 9", "layers is 9"),
    ("--stream-kind nope", "--stream-kind"), ("--lora-targets x", "['x']"),
    ("--lora-rank 4", "with --model"), ("--mode lossless", "with --model"),
    ("--mode lossless --main-sees-streams", "main_sees_streams is True"),
    ("--seed -1", "seed is -1"), ("--preset nope", "--preset"), ("--examples 0", "--examples is 0"),
    ("--heldout -1", "--heldout is -1"), ("--tasks nope", "unknown task 'nope'"),
    ("--tasks sql,nope", "unknown task 'nope': expected one of sql, dialogue, sentence"),
    ("--tasks sql,", "unknown task ''")])
def test_flags_of_train(tmp_path, args, words):
    check_error("train.py", [*SMALL, "--out", tmp_path / "out", *args.split()], words)
    assert not (tmp_path / "out").exists()


def test_flags_of_bench(folder, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks here")
    model = ["--model", folder]
    check_error("bench.py", ["nope"], "nope")
    check_error("bench.py", ["trees", *model, "--runs", 0], "--runs is 0")
    check_error("bench.py", ["trees", *model, "--write", page], page, "two <!-- table --> marks")
    check_error("bench.py", ["trees", *model, "--write", tmp_path / "no.md"], "no.md")
    check_error("bench.py", ["tasks", *model, "--per-task", 1], "the prompt alone fills")


def test_bench_writes_no_figure_if_ids_differ(monkeypatch, folder, tmp_path):
    monkeypatch.setattr("minispec.compare.first_difference", lambda *_: Difference(0, 1, 2, 0.1))
    monkeypatch.setattr("minispec.tasks.examples", lambda *_, **__: [{"prompt": "a"}])
    page = tmp_path / "page.md"
    page.write_text("<!-- table -->old<!-- table -->")
    for what in ("trees", "pruning"):
        check_error("bench.py", [what, "--model", folder, "--threshold", 0, "--write", page],
                    "ids differ from plain decoding")
    assert page.read_text() == "<!-- table -->old<!-- table -->"


# --- prompts and data ---------------------------------------------------------------------------

def test_prompts_that_cannot_be_decoded(folder):
    model = ["--model", folder]
    check_error("decode.py", [*model, "--prompt", "a", "--prompt", LONG], "the prompt has",
                "the model's context is 64")
    check_error("decode.py", [*model, "--prompt", "a\udcff"], "whole characters")


BROKEN_LINES = [
    (["{"], "line 1: not JSON"), ([{"prompt": "a", "completion": "b"}, "nonsense\n"], "line 2"),
    ([{"completion": "b"}], 'line 1: no text under "prompt"'), (["[1]\n"], "line 1"),
    ([{"prompt": 7, "completion": "b"}], 'line 1: no text under "prompt"'), ([], "no examples")]


@pytest.mark.parametrize("lines, words", BROKEN_LINES)
def test_broken_files_of_prompts(folder, tmp_path, lines, words):
    file = jsonl(tmp_path / "p.jsonl", *lines)
    check_error("decode.py", ["--model", folder, "--prompts", file], file, words)


@pytest.mark.parametrize("lines, words", [
    *BROKEN_LINES, ([{"prompt": "a"}], 'line 1: no text under "completion"'),
    ([{"prompt": LONG, "completion": "b"}] * 3,
     "in all 3 examples the prompt alone fills the context of 400 tokens")])
def test_broken_training_data(tmp_path, lines, words):
    file = jsonl(tmp_path / "d.jsonl", *lines)
    check_error("train.py", [*SMALL, "--heldout", 0, "--data", file, "--out", tmp_path / "out"],
                words)


def test_files_that_are_not_there(folder, tmp_path):
    for name in ("nope.jsonl", ""):                       # "": a folder
        check_error("decode.py", ["--model", folder, "--prompts", tmp_path / name], tmp_path)
        check_error("train.py", [*SMALL, "--data", tmp_path / name], tmp_path)
    check_error("decode.py", ["--prompts", ""], "No such file")
    check_error("train.py", [*SMALL, "--data", ""], "No such file")


def test_an_output_folder_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    check_error("train.py", [*SMALL, "--heldout", 0, "--steps", 1, "--out", file], file)


# --- model folders ------------------------------------------------------------------------------

def test_model_folders_that_are_not_there(tmp_path):
    check_error("decode.py", ["--model", tmp_path / "no"], tmp_path / "no", "is not a folder")
    check_error("decode.py", ["--model", tmp_path], tmp_path / "config.json", "is missing")
    check_error("bench.py", ["trees", "--model", tmp_path], tmp_path / "config.json")


@pytest.mark.parametrize("name, content, words", [
    ("config.json", b"{", "not JSON"), ("config.json", b"[]", "expected a JSON object"),
    ("config.json", b"{}", '"format" is None'), ("model.safetensors", None, "is missing"),
    ("model.safetensors", b"", "not a readable safetensors file"),
    ("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "git-lfs pointer"),
    ("tokenizer.json", b"{}", "not a usable tokenizer.json")])
def test_broken_model_folders(copy, name, content, words):
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_bytes(content)
    check_error("decode.py", ["--model", copy, "--prompt", "a"], copy / name, words)


def test_a_safetensors_file_cut_anywhere(copy):
    data = (copy / "model.safetensors").read_bytes()
    for size in (5, 100, len(data) // 2, len(data) - 1):
        (copy / "model.safetensors").write_bytes(data[:size])
        check_error("decode.py", ["--model", copy, "--prompt", "a"], copy / "model.safetensors")


@pytest.mark.parametrize("part, key, value, words", [
    ("model", "width", 17, "wrong shape"), ("model", "heads", "4", "heads is '4'"),
    ("model", "colour", 1, "no field colour"), ("model", "layers", 4, "missing: blocks.3"),
    ("streams", "count", 0, "count is 0"), ("streams", "layers", 7, "layers is 7"),
    ("streams", "prune_rank", 2, "missing: prune.down")])
def test_a_config_that_does_not_fit(copy, part, key, value, words):
    settings = json.loads((copy / "config.json").read_text())
    settings[part][key] = value
    (copy / "config.json").write_text(json.dumps(settings))
    check_error("decode.py", ["--model", copy, "--prompt", "a"], copy, words)


def test_what_a_model_lacks(folder, tmp_path, copy):
    check_error("decode.py", ["--model", folder, "--prompt", "a", "--prune-budget", 3],
                "no pruning map")
    save_model(tmp_path / "plain", with_tokenizer(None))
    check_error("decode.py", ["--model", tmp_path / "plain", "--prompt", "a"], "has none")
    (copy / "tokenizer.json").unlink()
    check_error("decode.py", ["--model", copy, "--prompt", "a"], "has no tokenizer")


def test_a_checkpoint_of_another_run(tmp_path):
    small = [*SMALL, "--heldout", 0, "--out", tmp_path]
    assert run("train.py", *small, "--steps", 1)[0] == 0
    checkpoint = tmp_path / "checkpoint.safetensors"
    check_error("train.py", [*small, "--steps", 2], checkpoint, "train.steps: 1 there, 2 here")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-9])
    check_error("train.py", [*small, "--steps", 1], checkpoint)


# --- the library --------------------------------------------------------------------------------

def test_an_empty_prompt_needs_a_bos():
    """With a BOS it is a prompt of one token; without, there is nothing to continue."""
    model = with_tokenizer("conditional")
    assert minispec.generate(model, "", 3).ids == minispec.generate(model, [0], 3).ids
    bare = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    without = Model(model.config, model.params, model.streams, Tokenizer(bare))
    for prompt in ("", [], np.array([], dtype=int)):
        with pytest.raises(ValueError, match="empty .* no BOS"):
            minispec.generate(without, prompt)


def test_errors_come_before_the_first_step():
    model = with_tokenizer("conditional")
    for bad in (dict(prompt=LONG), dict(prompt="a", drafter="nope"), dict(prompt="a", seed=-1),
                dict(prompt=[0, 10 ** 6]), dict(prompt="a", temperature=-1.0)):
        with pytest.raises(ValueError):
            minispec.stream(model, **bad)
