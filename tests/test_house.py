"""The house rules, as far as a program can check them.

Claims: files, functions and lines are short; imports point one way; only backend.py imports cupy
and random numbers have an owner (H-35); every module says what to read first and which tests prove
it, and those tests exist; what is public has a docstring.
"""

import ast
import pathlib
import re

import pytest

import minispec

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "minispec"
MODULES = sorted(PACKAGE.rglob("*.py"))
FILES = MODULES + sorted(ROOT.glob("*.py")) + sorted((ROOT / "tests").glob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def name_of(path):
    """minispec/drafters/streams.py -> "drafters.streams"; a package is its own name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def label(path):
    return str(path.relative_to(ROOT))


def functions(tree):
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


# --- size ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", FILES, ids=label)
def test_files_and_lines_are_short(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 350
    assert [n for n, line in enumerate(lines, 1) if len(line) > 100] == []
    assert [n for n, line in enumerate(lines, 1) if line != line.rstrip() or "\t" in line] == []


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_functions_are_short(path):
    long = [f"{f.name}: {f.end_lineno - f.lineno + 1} lines" for f in functions(TREES[path])
            if f.end_lineno - f.lineno >= 50]
    assert long == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=label)
def test_nothing_is_imported_for_nothing(path):
    nodes = list(ast.walk(TREES[path]))
    imported = {(a.asname or a.name).partition(".")[0] for n in nodes
                if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    assert imported - {n.id for n in nodes if isinstance(n, ast.Name)} == set()


# --- imports point one way ----------------------------------------------------------------------

# A module imports only what stands before it.
ORDER = ("config backend masks layers lora attention rope_scaling parameters transformer "
         "draft_vocab streams transitions loss pruning data objective optim cache model tree "
         "growing verify sampling text stopping stats drafters drafters.prompt_lookup "
         "drafters.streams generate compare report weights tensorfile families hf_config hf_names "
         "hf trunk adapter loading training presets fine_tune words task_sql task_dialogue "
         "task_sentence tasks found").split()
INDEPENDENT = "tree growing verify sampling stats text stopping report masks config".split()


def imports(path):
    """Modules of minispec that a module imports, anywhere in it."""
    here, found = name_of(path), set()
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("minispec")}
        elif isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".") if package else []
            base = ".".join([*parts[:len(parts) + 1 - node.level], *filter(None, [node.module])])
            found |= {f"{base}.{a.name}".strip(".") for a in node.names} | {base}
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("minispec"):
            base = node.module.removeprefix("minispec").strip(".")
            found |= {f"{base}.{a.name}".strip(".") for a in node.names} | {base}
    return (found & {name_of(p) for p in MODULES}) - {here, "__init__", ""}


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p) != "__init__"], ids=label)
def test_imports_point_one_way(path):
    name = name_of(path)
    assert name in ORDER, "a new module needs its place in ORDER"
    later = {n for n in imports(path) if ORDER.index(n) > ORDER.index(name)}
    assert later == set()


def test_what_never_knows_the_model():
    known = {name_of(p): imports(p) for p in MODULES}
    assert {"backend", "layers"} <= known["loss"] and known["objective"] > {"data", "streams"}

    def reach(name):
        return {name}.union(*(reach(n) for n in known[name]))

    for name in INDEPENDENT:
        assert not reach(name) & {"model", "transformer", "streams", "generate"}, name
    assert reach("layers") == {"layers", "backend"}
    assert "model" not in reach("objective") and "objective" not in reach("generate")


# --- one file imports cupy, and no random number without an owner (H-35) --------------------------

OWNED = "Generator|default_rng|SeedSequence|Philox|PCG64"  # a generator that is passed around


def violations(source, may_import_cupy=False):
    """Lines of a module that import cupy, or reach a random generator that nobody owns."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names, is_import = [], True
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names, is_import = [ast.unparse(node)], False
        for name in names:
            cupy = re.search(r"(^|\.)cupyx?(\.|$)", name) and is_import and not may_import_cupy
            device_random = re.match(r"(xp|cupy|cp)\.random\b", name)
            host_random = re.match(r"(np|numpy)\.random" + (r"($|\.)" if is_import else r"\.")
                                   + rf"(?!{OWNED})", name)
            python_random = re.match(r"random\.(?!Random\b)", name)
            if cupy or device_random or host_random or python_random:
                found.append((node.lineno, name))
    return found


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "tests"], ids=label)
def test_only_backend_imports_cupy_and_random_numbers_have_an_owner(path):
    assert violations(path.read_text(encoding="utf-8"), path == PACKAGE / "backend.py") == []


@pytest.mark.parametrize("line, bad", [
    ("import cupy", True), ("import cupy as cp", True), ("from cupy import add", True),
    ("import cupyx.scipy", True), ("from .backend import cupy", True),
    ("from numpy import random", True), ("import numpy.random as r", True),
    ("np.random.seed(0)", True), ("x = numpy.random.rand(3)", True),
    ("from numpy.random import rand", True), ("xp.random.default_rng(0)", True),
    ("random.random()", True), ("from random import choice", True), ("random.Random(3)", False),
    ("np.random.default_rng(0).random()", False), ("from numpy.random import Generator", False)])
def test_the_scan_sees_each_offence(line, bad):
    assert bool(violations(line)) == bad
    assert violations("import cupy", may_import_cupy=True) == []


# --- what modules say of themselves -------------------------------------------------------------

@pytest.mark.parametrize("path", MODULES, ids=label)
def test_a_module_says_what_to_read_first_and_what_proves_it(path):
    text = ast.get_docstring(TREES[path])
    assert re.search(r"^Read first: ", text, re.M), "what to read first"
    assert re.search(r"(^|\. )Proven by: tests/test_\w+\.py", text, re.M), "which test proves it"
    for test in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / test).is_file(), f"{test} does not exist"
    for other in re.findall(r"[\w/]+\.(?:py|md)\b", text[text.index("Read first"):]):
        assert any((base / other).is_file() for base in (path.parent, PACKAGE, ROOT)), other


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("*.py")), ids=label)
def test_a_test_file_says_what_it_proves(path):
    assert len(ast.get_docstring(TREES[path]) or "") > 40


# The scenes of the corpus are functions named after what the text is about.
@pytest.mark.parametrize("path", [p for p in MODULES if "task_" not in p.name], ids=label)
def test_what_is_public_has_a_docstring(path):
    """Functions, classes and methods of more than three lines; one class of a file may speak for
    the others that have the same method."""
    spoken, silent = set(), set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Module | ast.ClassDef) and not node_is_private(node):
            for child in node.body:
                if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                    (spoken if ast.get_docstring(child) else silent).add(
                        (child.name, child.end_lineno - child.lineno > 3))
    names = {name for name, _ in spoken}
    assert {n for n, long in silent if long and n not in names and not n.startswith("_")} == set()


def node_is_private(node):
    return getattr(node, "name", "").startswith("_")


def test_the_public_names_are_there():
    assert set(minispec.__all__) >= {"load", "generate", "stream", "TreeConfig", "Drafter"}
    for name in minispec.__all__:
        assert getattr(minispec, name).__doc__
    assert re.fullmatch(r"\d+\.\d+\.\d+", minispec.__version__)
    assert f'version = "{minispec.__version__}"' in (ROOT / "pyproject.toml").read_text()
