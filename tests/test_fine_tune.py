"""Claim: fine-tuning trains the adapter alone, resumes to the bit, and its folder decodes.

On a small llama with a tokenizer: the base stays as it was, checkpoints hold no base,
a run on another base is not resumed, texts that are too long are counted. Then as a user types it:
train.py --model, stopped and resumed, decode.py --adapter, ids identical.
"""

import contextlib
import io
import json
import pathlib
import runpy

import numpy as np
import pytest

import minispec
from minispec.adapter import base_hash
from minispec.config import ModelConfig, StreamConfig, TrainConfig
from minispec.fine_tune import EMBED_SCALE, prepare
from minispec.hf import save_hf
from minispec.model import Model
from minispec.parameters import init_params, init_stream_params, is_base
from minispec.text import Tokenizer
from minispec.training import CHECKPOINT
from minispec.weights import read_tensors

ROOT = pathlib.Path(__file__).parents[1]
STREAMS = StreamConfig(count=2, layers=1, lora_rank=2, transition_rank=3, prune_rank=2,
                       draft_vocab=40)
TRAIN = TrainConfig(epochs=2, batch=4, lr=0.01, warmup=2, workers=2, checkpoint_every=3)
EXAMPLES = [{"prompt": f"{a} and {b}:", "completion": f" {b} then {a} then {b}"}
            for a in ("red", "blue", "green") for b in ("cat", "dog", "cow", "hen")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An HF-style folder of a small llama that knows nothing, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    tokenizer = Tokenizer.train([e["prompt"] + e["completion"] for e in EXAMPLES], 280)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, width=16, layers=2, heads=4, kv_heads=2,
                         head_dim=4, mlp_width=24, max_positions=64, bos_id=tokenizer.bos_id,
                         eos_ids=(tokenizer.eos_id,))
    params = init_params(config, seed=3)
    params["embed.tokens"] *= 30                          # as large as a trained model's states
    save_hf(folder, Model(config, params, None, tokenizer), "llama")
    return folder


def tuning(folder, out, streams=STREAMS, train=TRAIN, examples=EXAMPLES, **options):
    return prepare(minispec.load(folder), examples, streams, train, out, **options)


# --- prepare and train --------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [dict(), dict(mode="lossless"), dict(lora_all_layers=True)])
def test_only_the_adapter_learns(folder, tmp_path, changes):
    trainer = tuning(folder, tmp_path, STREAMS.replace(**changes), TRAIN.replace(epochs=12)).trainer
    model, origin = trainer.model, base_hash(trainer.model)
    assert (trainer.loader.trunk is None) == bool(changes.get("lora_all_layers"))
    assert 0 < len(model.draft_ids) <= 40 and model.config.eos_ids[0] in model.draft_ids
    reports = list(trainer.run())
    assert len(reports) == 12 * 3                         # epochs: 12 examples in batches of 4
    assert base_hash(model) == origin == trainer.base
    first, last = (r.metrics.mean_loss("next 1") for r in (reports[0], reports[-1]))
    assert last < 0.7 * first
    tensors = read_tensors(tmp_path / CHECKPOINT)
    held = {n[len("param."):] for n in tensors if n.startswith("param.")}
    assert held == {n for n in model.params if not is_base(n)}


def test_the_size_of_hidden_states_is_measured(folder, tmp_path):
    made = tuning(folder, tmp_path)
    states = np.concatenate([made.trainer.loader.trunk[i] for i in range(8)]).astype("f8")
    size = np.median((states ** 2).mean(axis=1) ** 0.5)
    model = made.trainer.model
    assert model.streams.embed_scale == pytest.approx(EMBED_SCALE * size, rel=1e-2)
    start = init_stream_params(model.config, STREAMS, TRAIN.seed)["streams.embed"]
    assert np.allclose(model.params["streams.embed"] * EMBED_SCALE, start)


def test_a_resumed_run_ends_with_the_same_bits(folder, tmp_path):
    straight = tuning(folder, tmp_path / "straight").trainer
    list(straight.run())
    trainer = tuning(folder, tmp_path / "cut").trainer
    run = trainer.run()
    next(run), next(run)
    run.close()
    trainer = tuning(folder, tmp_path / "cut").trainer
    assert trainer.resume() and trainer.step == 2
    list(trainer.run())
    for name, value in straight.model.params.items():
        assert np.array_equal(trainer.model.params[name], value), name


def test_a_run_on_another_base_is_not_resumed(folder, tmp_path):
    list(tuning(folder, tmp_path).trainer.run())
    base = minispec.load(folder)
    base.params["norm.gain"] = base.params["norm.gain"] * 2
    trainer = prepare(base, EXAMPLES, STREAMS, TRAIN, tmp_path).trainer
    with pytest.raises(ValueError, match="base model: [0-9a-f]{64} there, [0-9a-f]{64} here"):
        trainer.resume()


def test_long_texts_are_counted(folder, tmp_path):
    long = [{"prompt": "red " * 40, "completion": "cat"},
            {"prompt": "a", "completion": "cow " * 30}]
    made = tuning(folder, tmp_path, examples=EXAMPLES + long, max_tokens=16)
    lengths = [len(d.ids) - 1 for d in made.trainer.loader.documents]
    assert made.skipped == 1 and max(lengths) == 16
    assert made.cut == sum(n == 16 for n in lengths) > 0
    with pytest.raises(ValueError, match="prompt alone fills the context of 3 tokens"):
        tuning(folder, tmp_path, examples=long[:1], max_tokens=3)


def test_a_base_without_a_tokenizer(tmp_path):
    base = minispec.load(ROOT / "tests" / "golden" / "llama")
    with pytest.raises(ValueError, match="no tokenizer.json"):
        prepare(base, EXAMPLES, STREAMS, TRAIN, tmp_path)


# --- as a user types it -------------------------------------------------------------------------

def run(script, *args):
    """(status, stdout) of a script's main in this process."""
    module = runpy.run_path(str(ROOT / script))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = module["main"]([str(a) for a in args])
        except SystemExit as error:
            status = error.code
    return status, out.getvalue()


@pytest.mark.parametrize("mode", ["shared", "lossless"])
def test_train_and_decode(folder, tmp_path, mode):
    data, out = tmp_path / "data.jsonl", tmp_path / "adapter"
    data.write_text("".join(json.dumps(e) + "\n" for e in EXAMPLES))
    command = ["--model", folder, "--data", data, "--mode", mode, "--out", out, "--lines", 12,
               "--streams", 2, "--stream-layers", 1, "--epochs", 2, "--batch", 4, "--lora-rank", 2,
               "--transition-rank", 3, "--heldout", 2, "--checkpoint-every", 2]
    status, text = run("train.py", *command)
    assert status == 0 and "after training: 2 held-out prompts" in text and "DIFFER" not in text
    assert "before training" not in text and f"--model {folder} --adapter {out}" in text
    assert json.loads((out / "config.json").read_text())["streams"]["mode"] == mode
    status, text = run("train.py", *command, "--heldout", 2)
    assert status == 0 and "finished before, at step" in text
    decode = ["--model", folder, "--adapter", out, "--prompt", "red and cat:", "--max-new-tokens",
              16, "--runs", 1]
    status, text = run("decode.py", *decode)
    assert status == 0 and "ids identical to plain decoding: all" in text
    assert run("train.py", *command, "--preset", "tiny")[0] == 2
    assert run("train.py", "--preset", "adapter")[0] == 2
