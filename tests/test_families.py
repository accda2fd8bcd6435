"""Claim: every family computes what transformers computes, saved and reloaded to the bit, and fast.

tests/golden holds a tiny random checkpoint of each family with the logits and greedy ids that
transformers found (make_golden.py). Logits agree within 1e-4 in float32 at every position, cached
and uncached; 20 greedy ids are the same; what we save is what we loaded. A loaded model takes
streams like any other, and decodes losslessly with them.
"""

import sys
import types

import numpy as np
import pytest
import strict_cupy

import minispec
from golden_folders import GOLDEN, NAMES, NEW, START, expected, family_of, tensors_of
from minispec import backend
from minispec.config import PAPER_TREE, StreamConfig, TrainConfig, TreeConfig
from minispec.data import Document
from minispec.families import FAMILIES
from minispec.growing import chain
from minispec.hf import save_hf
from minispec.model import Model
from minispec.parameters import all_shapes, init_stream_params
from minispec.tensorfile import TensorFile
from minispec.training import Trainer
from minispec.weights import load_model, save_model
from tiny_models import FixedLoader

TOLERANCE = 1e-4


def test_every_family_has_a_golden_checkpoint_that_is_small():
    assert {family_of(name) for name in NAMES} == set(FAMILIES)
    for name in NAMES:
        assert sum(f.stat().st_size for f in (GOLDEN / name).iterdir()) < 150_000, name


# --- the same numbers ---------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids_equal_those_of_transformers(name):
    ids, logits, greedy = expected(name)
    model = minispec.load(GOLDEN / name)
    ours = model.logits(ids)
    assert ours.dtype == np.float32 and np.abs(ours - logits).max() < TOLERANCE
    endless = Model(model.config.replace(eos_ids=()), model.params)
    assert minispec.generate(endless, ids[:START], NEW).ids == greedy


@pytest.mark.parametrize("pieces", [[24], [1] * 24, [6, 1, 1, 9, 7]])
@pytest.mark.parametrize("name", NAMES)
def test_cached_logits_equal_those_of_transformers(name, pieces):
    """The text in pieces through the cache: the logits behind each piece, and of every node of a
    tree that is a chain."""
    ids, logits, _ = expected(name)
    model = minispec.load(GOLDEN / name)
    cache, at = model.new_cache(), 0
    for piece in pieces:
        out = model.prefill(cache, ids[at:at + piece].tolist())
        at += piece
        assert np.abs(out.logits[0] - logits[at - 1]).max() < TOLERANCE
    cache.rollback(9)
    tree = chain(int(ids[15]), ids[16:].tolist())
    assert np.abs(model.step(cache, tree).logits - logits[15:]).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_closer_still_to_float32(name):
    """The difference is rounding, not a rule."""
    ids, logits, _ = expected(name)
    exact = minispec.load(GOLDEN / name, dtype="float64")
    assert all(p.dtype == np.float64 for p in exact.params.values())
    assert np.abs(exact.logits(ids) - logits).max() < TOLERANCE / 2


# --- saved and reloaded -------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_saved_and_reloaded_is_equal_to_the_bit(name, tmp_path):
    model = minispec.load(GOLDEN / name)
    save_hf(tmp_path, model, family_of(name))
    back = minispec.load(tmp_path)
    assert back.config == model.config and back.params.keys() == model.params.keys()
    assert all(np.array_equal(back.params[n], p) for n, p in model.params.items())
    # and the file holds the tensors of the original, by the same names, in the same orientation
    theirs, ours = tensors_of(GOLDEN / name), tensors_of(tmp_path)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(ours[n], a) for n, a in theirs.items())


@pytest.mark.parametrize("name, dtype", [("llama3", "bfloat16"), ("qwen2", "float16")])
def test_a_half_precision_file_comes_back_in_its_own_dtype(name, dtype, tmp_path):
    model = minispec.load(GOLDEN / name)
    save_hf(tmp_path, model, family_of(name), dtype)
    kinds = {e.dtype for e in TensorFile(tmp_path / "model.safetensors").entries.values()}
    assert kinds == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    back = minispec.load(tmp_path)
    assert all(np.array_equal(back.params[n], p) for n, p in model.params.items())
    assert all(p.dtype == np.float32 for p in back.params.values())


@pytest.mark.parametrize("name", NAMES)
def test_our_own_format_holds_every_family(name, tmp_path):
    model = minispec.load(GOLDEN / name)
    save_model(tmp_path, model)
    back = load_model(tmp_path)
    assert back.config == model.config
    assert np.array_equal(back.logits([5, 3, 8]), model.logits([5, 3, 8]))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_arrays_of_their_own(name):
    """Split and transposed views become contiguous arrays that share no memory (H-01)."""
    model = minispec.load(GOLDEN / name)
    assert list(model.params) == list(all_shapes(model.config))
    spans = sorted((p.__array_interface__["data"][0], p.nbytes) for p in model.params.values())
    assert all(p.flags.c_contiguous and p.flags.writeable for p in model.params.values())
    assert all(at + length <= after for (at, length), (after, _) in zip(spans, spans[1:]))


# --- speculation --------------------------------------------------------------------------------

def with_streams(model, seed=0, **settings):
    """The loaded model with fresh random streams that guess something."""
    streams = StreamConfig(**{**dict(count=3, layers=1, prune_rank=3, transition_rank=5),
                              **settings})
    rng = np.random.default_rng(seed)
    fresh = init_stream_params(model.config, streams, dtype=str(model.dtype))
    fresh = {n: p + 0.3 * rng.standard_normal(p.shape).astype(p.dtype) for n, p in fresh.items()}
    return Model(model.config.replace(eos_ids=()), {**model.params, **fresh}, streams,
                 model.tokenizer)


TREES = {
    "conditional": TreeConfig(budget=7), "paper": PAPER_TREE,
    "fused": TreeConfig(shape="full", conditional=False, k=2, fused=True),
    "pruned": TreeConfig(prune_budget=4, budget=9),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", NAMES)
def test_speculative_ids_equal_plain_ids(name, tree):
    model = with_streams(minispec.load(GOLDEN / name, dtype="float64"))
    prompt = expected(name)[0][:START]
    for temperature in (0.0, 0.9):
        settings = dict(max_new_tokens=30, temperature=temperature, seed=3)
        plain = minispec.generate(model, prompt, **settings)
        fast = minispec.generate(model, prompt, drafter="streams", tree=TREES[tree], **settings)
        assert fast.ids == plain.ids and len(plain.ids) == 30
        assert fast.stats.drafted > 30, "nothing was drafted"


@pytest.mark.parametrize("name", ["llama", "mistral", "opt_350m", "gpt_neox"])
def test_fused_and_deferred_streams_are_the_same(name):
    """Also where a window cuts what a stream sees, and where embeddings are projected."""
    model = with_streams(minispec.load(GOLDEN / name, dtype="float64"))
    ids = expected(name)[0]
    fused, deferred = model.new_cache(), model.new_cache()
    states = model.prefill(fused, ids[:12].tolist(), streams=True).streams[0]
    hidden = model.prefill(deferred, ids[:12].tolist()).hidden[0]
    assert np.abs(states - model.deferred_streams(deferred, hidden)).max() < 1e-10


@pytest.fixture
def cp(monkeypatch):
    """The stand-in for CuPy, with the one function of cupyx that is used."""
    cp = strict_cupy.install(monkeypatch)
    special = types.ModuleType("cupyx.scipy.special")
    special.erf = lambda x: cp.asarray(backend.erf(backend.to_host(x)))
    monkeypatch.setitem(sys.modules, "cupyx", types.ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy", types.ModuleType("cupyx.scipy"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
    return cp


@pytest.mark.parametrize("name", NAMES)
def test_the_same_lines_run_on_device_arrays(cp, name):
    """Loaded onto the device, decoded with streams, trained: what the stand-in refuses, a GPU would
    refuse."""
    ids, logits, _ = expected(name)
    device = minispec.load(GOLDEN / name, xp=cp)
    assert device.xp is cp and all(isinstance(p, cp.ndarray) for p in device.params.values())
    assert np.abs(backend.to_host(device.logits(ids)) - logits).max() < TOLERANCE
    host = with_streams(minispec.load(GOLDEN / name, dtype="float64"))
    device, settings = host.to(cp), dict(max_new_tokens=12, drafter="streams")
    want = minispec.generate(host, ids[:START], **settings)
    assert minispec.generate(device, ids[:START], **settings).ids == want.ids
    loader = FixedLoader([[Document(ids[:12].tolist(), 3), Document(ids[9:].tolist(), 2)]], 3)
    for model in (host, device):
        Trainer(model, loader, TrainConfig(steps=2, warmup=0, batch=2, workers=1)).one_step()
    for n, p in host.params.items():
        assert np.abs(backend.to_host(device.params[n]) - p).max() < 1e-9, n


@pytest.mark.parametrize("settings", [dict(), dict(mode="lossless", lora_rank=2)])
def test_streams_leave_the_loaded_model_alone(settings):
    model = minispec.load(GOLDEN / "llama", dtype="float64")
    ids, logits, _ = expected("llama")
    ours = with_streams(model, **settings)
    assert all(ours.params[n] is p for n, p in model.params.items())
    assert np.array_equal(ours.pack().logits(ids), model.logits(ids))
    assert np.abs(ours.logits(ids) - logits).max() < TOLERANCE
