"""The README is true where a program can tell: its commands run, its links and files exist.

Claims: every command of a bash block runs (in a short form named here; a new command must be
added), and so does the Python block; every flag and make target that it mentions exists; links lead
somewhere; every module is in the reading order, with tests that exist; no placeholder is left.
"""

import contextlib
import importlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from running import ROOT, SMALL, run

import minispec

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [path for path in (ROOT / "README.md", ROOT / "weights" / "README.md",
                           *sorted((ROOT / "docs").glob("*.md"))) if path.is_file()]
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minispec").rglob("*.py"))
# README command -> what runs here. `make` may not install anything from inside a test, so its
# targets are read with `make -n`, and the last line of the recipe is what counts.
COMMANDS = {
    "make decode": ["decode.py", "--per-task", "1", "--runs", "1", "--max-new-tokens", "8"],
    "python train.py": ["train.py", *SMALL, "--steps", "1", "--heldout", "0", "--out", "OUT"],
    "make test": ["-m", "pytest", "-n", "auto", "-m", "not slow"],
}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def recipe(target):
    """The last command that `make target` would run, as a list of words."""
    # under `make test` this make would be a child of that one, and say so in its output
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True,
                           env=clean)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.strip().splitlines()[-1].replace('"', "").split()


# --- commands -----------------------------------------------------------------------------------

def test_every_command_is_known_here():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert set(lines) == set(COMMANDS) and len(lines) == len(COMMANDS)


@needs_make
@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)`?$|`make ([a-z-]+)`",
                                                         TEXT, re.M))))
def test_every_make_target_exists(target):
    recipe("".join(target))


@needs_make
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_runs_what_is_run_here(command):
    """The recipe is the short form without the flags that make it short."""
    words = recipe(command.split()[1])
    assert words[0] == ".venv/bin/python"
    form = COMMANDS[command]
    if form[0] == "decode.py":
        assert words[1:] == form[:1]
    else:
        assert " ".join(words[1:]) == " ".join(form)


def test_make_decode(tmp_path):
    status, out, err = run(*COMMANDS["make decode"])
    assert status == 0, err
    assert "ids identical" in out and "[" in out


def test_python_train(tmp_path):
    words = [str(tmp_path) if word == "OUT" else word for word in COMMANDS["python train.py"]]
    status, out, err = run(*words)
    assert status == 0, err
    assert (tmp_path / "model.safetensors").is_file() and "decode with it" in out


def test_make_test_finds_the_tests():
    words = [sys.executable, *COMMANDS["make test"], "--collect-only", "tests/test_house.py"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0 and "tests/test_house.py" in shown.stdout, shown.stdout


def test_the_python_block_runs(monkeypatch):
    code, = blocks("python")
    monkeypatch.chdir(ROOT)                               # it names weights/tiny
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    model = minispec.load("weights/tiny")
    prompt = re.search(r'^prompt = "(.*)"$', code, re.M)[1].replace(r"\n", "\n")
    text = minispec.generate(model, prompt, drafter="streams").text
    assert out.getvalue().startswith(f"{text} ") and out.getvalue().endswith("\n" + text)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"(?<![\w-])--[a-z][\w-]+", TEXT))))
def test_every_flag_exists(flag):
    helps = "".join(run(script, "--help")[1] for script in ("decode.py", "train.py", "bench.py"))
    assert re.search(rf"(?<![\w-]){flag}(?![\w-])", helps)


# --- files --------------------------------------------------------------------------------------

@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if not re.match(r"https?://|#", link)]
    assert [link for link in files if not (page.parent / link).exists()] == []
    assert files or page != ROOT / "README.md"


def reading_order():
    """Rows of the table: (linked files, named tests)."""
    part = TEXT.partition("## Reading order")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| [")]
    return [(re.findall(r"\]\(([^)]+)\)", row), re.findall(r"tests/\w+\.py", row)) for row in rows]


def test_every_module_is_in_the_reading_order_once():
    linked = [file for files, _ in reading_order() for file in files]
    assert sorted(linked) == sorted([*MODULES, "decode.py", "train.py", "bench.py"])


def test_every_row_names_tests_that_exist_and_that_the_module_names():
    for files, tests in reading_order():
        assert tests and [test for test in tests if not (ROOT / test).is_file()] == []
        named = ""
        for file in files:
            if file in MODULES:
                module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                named += importlib.import_module(module).__doc__
        # the scripts and the model prove themselves in these
        others = [t for t in tests if t not in named and "cli" not in t and "tiny" not in t]
        assert others == [], files


def test_a_reader_meets_a_module_after_those_it_builds_on():
    """A module that says `Read first: x.py` comes after x.py, or in the same row."""
    place = {pathlib.PurePosixPath(file).as_posix(): n
             for n, (files, _) in enumerate(reading_order()) for file in files}
    early = []
    for file in MODULES:
        doc = (ROOT / file).read_text(encoding="utf-8")
        first = re.search(r"Read first: (.*?)\. ", " ".join(doc.split()) + " ")[1]
        for name in re.findall(r"[\w/]+\.py", first):
            folders = (os.path.dirname(file), "minispec", "")
            found = next((p for p in (os.path.join(f, name) for f in folders) if p in place), None)
            if found and place[found] > place[file]:
                early.append(f"{file} says to read {found} first, which comes later")
    assert early == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_placeholder_is_left(page):
    """The lead fills {NAMES} when the figures are there."""
    assert re.findall(r"\{[A-Z_]+\}", page.read_text(encoding="utf-8")) == []
