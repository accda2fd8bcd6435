"""The scripts do what their help says, and answer bad input with one line and a status.

Claims: decode.py has no escape code outside a terminal or with NO_COLOR, and --json is one object;
it ends with 1 if an id differs; train.py writes a model that decodes, resumes where Ctrl-C stopped
it, and starts over only if told to; bench.py writes its table. Bad input: test_cli_errors.py.

Most runs happen in this process, as `python SCRIPT` would run them, but in float64, where no two
logits tie by rounding. Terminals, pipes and Ctrl-C need a process of their own.
"""

import contextlib
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from running import ROOT, SMALL, jsonl, run

import minispec
from minispec.compare import compare
from minispec.training import Trainer
from minispec.weights import load_model, read_tensors

SHORT = "--per-task 1 --runs 1 --max-new-tokens 16".split()


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Scripts load models in float64, and compare 16 tokens where they would compare 64."""
    def short(*args, **settings):
        limit = min(settings.pop("max_new_tokens"), 16)
        return compare(*args, max_new_tokens=limit, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minispec, "load", functools.partial(minispec.load, dtype="float64"))
        patch.setattr("minispec.compare.compare", short)
        yield


@pytest.fixture(scope="module")
def trained(quick, tmp_path_factory):
    """(folder, stdout, stderr) of train.py with two steps of a very small model."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    status, out, err = run("train.py", *SMALL, "--steps", 2, "--out", folder)
    assert status == 0, err
    return folder, out, err


# --- decode.py ----------------------------------------------------------------------------------

def in_terminal(*args, **environment):
    """Everything a terminal shows of a script."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, env={**env, **environment},
                               stdout=follower, stderr=follower, stdin=subprocess.DEVNULL)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):                    # Linux: the other end is closed
        while piece := os.read(leader, 4096):
            shown += piece
    os.close(leader)
    assert process.wait() == 0
    return shown.decode()


def test_colours_on_a_terminal_and_none_with_no_color():
    coloured = in_terminal("decode.py", *SHORT)
    assert "\033[4;38;5;208m" in coloured and "\033[1;38;5;39m" in coloured
    assert "decoding" in coloured                         # and a bar, gone at the end
    plain = in_terminal("decode.py", *SHORT, NO_COLOR="1")
    assert "\033" not in plain and "[accepted draft]" in plain
    assert "ids identical to plain decoding: all" in plain


def test_a_pipe_that_closes_early_is_no_error():
    process = subprocess.run(f"{sys.executable} decode.py {' '.join(SHORT)} | head -1", cwd=ROOT,
                             shell=True, capture_output=True, text=True)
    assert process.stdout == "[1/3]\n" and process.stderr == ""


def test_decode_shows_texts_and_the_four_figures():
    status, out, err = run("decode.py", *SHORT)
    assert status == 0 and err == "" and "\033" not in out
    assert re.findall(r"^\[\d/3\]$", out, re.M) == ["[1/3]", "[2/3]", "[3/3]"]
    for line in ("tokens per forward", "cost ratio", "predicted speedup", "measured speedup"):
        assert re.search(rf"^{line} +\d+\.\d\d ", out, re.M)
    count = re.search("ids identical to plain decoding: all (.*) tokens of 3 prompts", out)[1]
    assert int(count) == sum(map(int, re.findall(r"^(\d+) tokens, \d\.\d\d per forward$", out,
                                                 re.M)))
    assert re.search(r"^accept rate +depth 1: [01]\.\d\d  depth 2", out, re.M)


def as_json(*args, status=0):
    code, out, err = run("decode.py", "--json", "--runs", 1, "--max-new-tokens", 12, *args)
    assert (code, err) == (status, ""), err
    return json.loads(out)                                # fails if there were anything else


def test_json_is_one_object(trained):
    facts = as_json("--per-task", 1)
    assert facts["identical"] is True and 1 <= facts["tokens_per_forward"] <= 4
    assert all(0 <= rate <= 1 for rate in facts["accept_rate"]) and len(facts["accept_rate"]) == 3
    for name in ("cost_ratio", "predicted_speedup", "measured_speedup",
                 "plain_tokens_per_second", "speculative_tokens_per_second"):
        assert facts[name] > 0
    assert [set(p) for p in facts["prompts"]] == [{"prompt", "text", "ids", "identical",
                                                   "finish_reason", "tokens_per_forward"}] * 3
    assert all(0 < len(p["ids"]) <= 12 and p["text"] for p in facts["prompts"])


def test_prompts_come_from_flags_and_files(trained, tmp_path):
    file = jsonl(tmp_path / "p.jsonl", {"prompt": "c d"}, "\n", {"prompt": "e", "more": 1})
    facts = as_json("--model", trained[0], "--prompt", "a b", "--prompt", "x", "--prompts", file)
    assert [p["prompt"] for p in facts["prompts"]] == ["a b", "x", "c d", "e"]
    assert [p["prompt"] for p in as_json("--prompt", "")["prompts"]] == [""]  # BOS alone


@pytest.mark.parametrize("args", [
    "--temperature 0.9 --top-k 20 --top-p 0.9 --seed 4", "--drafter prompt_lookup",
    "--shape full --no-conditional --fused", "--shape full --k 2 --depth 2", "--budget 3",
    "--prune-threshold 0.02 --prune-budget 4", "--stop e --stop xyz", "--max-new-tokens 0"])
def test_no_setting_changes_an_id(trained, args):
    for model in ([], ["--model", trained[0]]):
        facts = as_json(*SHORT, *model, *args.split())
        assert facts["identical"] is True and len(facts["prompts"]) == 3
        for p in facts["prompts"]:
            assert "--stop" not in args or "e" not in p["text"]
            assert len(p["ids"]) == 0 if "tokens 0" in args else p["ids"]


def test_seed_and_temperature_reach_the_model(trained):
    model = ["--model", trained[0], "--prompt", "The"]
    texts = [as_json(*model, *args.split())["prompts"][0]["text"] for args in
             ("", "--temperature 1.5", "--temperature 1.5 --seed 1", "--temperature 1.5 --top-k 1")]
    assert texts[0] == texts[3] and texts[1] not in (texts[0], texts[2])


def test_a_lossy_rule_ends_with_status_1_and_no_speed(trained):
    lossy = ["--model", trained[0], "--acceptance", "typical", "--temperature", 1.5]
    facts = as_json(*lossy, status=1)
    assert facts["identical"] is False and facts["measured_speedup"] is None
    assert facts["speculative_tokens_per_second"] is None
    status, out, _ = run("decode.py", *SHORT, *lossy)
    assert status == 1 and "IDS DIFFER from plain decoding; no speed is reported" in out
    assert re.search(r"^prompt \d: ids differ at new token \d+: plain \d+, speculative \d+", out,
                     re.M)
    assert re.search(r"^measured speedup +- ", out, re.M) and "plain -, speculative -" in out


# --- train.py -----------------------------------------------------------------------------------

def test_train_writes_a_model_that_decodes(trained):
    folder, out, err = trained
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "checkpoint.safetensors"}
    model = load_model(folder)
    assert model.config.width == 16 and model.streams.layers == 1
    assert "before training: 1 held-out prompts" in out and "after training: 1 held-out" in out
    assert out.count("ids identical") + out.count("ids DIFFER") == 4
    assert f"python decode.py --model {folder}" in out
    status, out, _ = run("decode.py", *SHORT, "--model", folder)
    assert status == 0 and "ids identical" in out


def test_train_output_is_readable_without_a_terminal(trained):
    assert "\033" not in trained[1] + trained[2] and trained[2].count("\r") <= 3
    assert "2/2" in trained[2] and "\r" not in trained[1]


def test_the_same_command_again(trained):
    folder, first, _ = trained
    again = [*SMALL, "--steps", 2, "--out", folder]
    before = (folder / "model.safetensors").read_bytes()
    status, out, _ = run("train.py", *again)
    assert status == 0 and "finished before, at step 2" in out and "before training" not in out
    assert (folder / "model.safetensors").read_bytes() == before
    status, out, _ = run("train.py", *again, "--fresh", "--heldout", 0, "--float16")
    assert status == 0 and "finished" not in out and "training:" not in out
    assert len((folder / "model.safetensors").read_bytes()) < 0.7 * len(before)


def test_ctrl_c_saves_and_the_same_command_goes_on(monkeypatch, tmp_path):
    command = ["train.py", *SMALL, "--heldout", 0, "--steps", 5, "--out", tmp_path]
    step, presses = Trainer.one_step, [1]

    def interrupted(trainer):
        report = step(trainer)
        for _ in range(presses[0] if trainer.step == 3 else 0):
            signal.raise_signal(signal.SIGINT)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "one_step", interrupted)
        status, out, err = run(*command)
        assert status == 130 and "stopped at step 3, which is saved" in out
        assert "Traceback" not in out + err and not (tmp_path / "config.json").exists()
        presses[0] = 2                                    # the second one does not wait
        status, _, err = run(*command, "--fresh")
        assert status == 130 and "stopped; the same command goes on" in err
    status, out, _ = run(*command)
    assert status == 0 and "going on from step 3" in out and (tmp_path / "config.json").exists()


def test_ctrl_c_in_a_process_of_its_own(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "train.py", *SMALL, "--heldout", "0", "--steps", "100000",
         "--checkpoint-every", "2", "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "checkpoint.safetensors").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in out + err
    step = int(re.search(r"stopped at step (\d+), which is saved", out)[1])
    assert step >= 2 and read_tensors(tmp_path / "checkpoint.safetensors")["step"][0] == step


def test_ctrl_c_before_the_first_step(monkeypatch, tmp_path):
    go = Trainer.run

    def stopped(trainer):
        signal.raise_signal(signal.SIGINT)
        return go(trainer)

    monkeypatch.setattr(Trainer, "run", stopped)
    status, out, _ = run("train.py", *SMALL, "--heldout", 0, "--steps", 5, "--out", tmp_path)
    assert status == 130 and "stopped before the first step" in out
    assert list(tmp_path.iterdir()) == []


def test_train_on_your_own_lines(tmp_path):
    data = jsonl(tmp_path / "mine.jsonl", *({"prompt": f"say {n}: ", "completion": f"it is {n}!"}
                                            for n in range(20)))
    status, out, _ = run("train.py", *SMALL, "--data", data, "--steps", 2, "--out",
                         tmp_path / "out")
    assert status == 0 and "19 examples, 2 steps" in out and "1 held-out prompts" in out
    facts = as_json("--model", tmp_path / "out", "--prompt", "say 7: ")
    assert facts["identical"] and facts["prompts"][0]["ids"]


# --- bench.py and found.py ----------------------------------------------------------------------

@pytest.mark.parametrize("what, rows", [("trees", 9), ("tasks", 3), ("pruning --max-k 2", 2)])
def test_bench_writes_its_table(trained, tmp_path, what, rows):
    page = tmp_path / "page.md"
    page.write_text("# Head\n<!-- table -->old<!-- table -->\ntail\n")
    status, out, err = run("bench.py", *what.split(), "--per-task", 1, "--runs", 1, "--model",
                           trained[0], "--write", page)
    assert status == 0, err
    table = [line.count("|") for line in out.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + rows and len(set(table)) == 1
    assert page.read_text() == f"# Head\n<!-- table -->\n{out}<!-- table -->\ntail\n"


def test_found_says_what_there_is():
    process = subprocess.run([sys.executable, "-m", "minispec.found"], cwd=ROOT, text=True,
                             capture_output=True)
    first, second = process.stdout.splitlines()
    assert process.stderr == "" and re.match(r"  found: Python 3\.\d+.*NumPy \d", first)
    assert re.match(r"  found: (no GPU: \S|GPU \S)", second)
