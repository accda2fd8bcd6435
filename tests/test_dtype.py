"""A float32 model computes in float32 everywhere, a float64 model in float64 (case H-03).

Every function of the model's modules is wrapped: all floating arrays that go in or come out, also
inside caches, must have the model's dtype, in decoding and in training. Under NumPy 2 one NumPy
scalar in a formula is enough to double memory and time; the controls at the end plant such.
"""

import dataclasses
import importlib
import types

import numpy as np
import pytest
import strict_cupy
import strict_cupy_array
from tiny_models import CONFIG, LAYERNORM, STREAMS, FixedLoader, texts, tiny_model

from minispec import attention, layers
from minispec.config import PAPER_TREE, TrainConfig, TreeConfig
from minispec.generate import generate
from minispec.model import Model
from minispec.training import Trainer

WATCHED = [importlib.import_module(f"minispec.{name}") for name in (
    "layers", "attention", "lora", "transformer", "streams", "transitions", "loss", "pruning",
    "objective", "model")]
# These take or give float64 on the host by design: angles of positions, and early-exit scores.
ONLY_RESULTS, UNWATCHED = {"rope_table"}, {"exit_scores", "survivors"}


def floats(value):
    """All floating arrays and NumPy scalars in a value, also inside containers and dataclasses."""
    if isinstance(value, (np.ndarray, np.generic)):
        return [value] if value.dtype.kind == "f" else []
    if isinstance(value, dict):
        return [a for v in value.values() for a in floats(v)]
    if isinstance(value, (list, tuple)):
        return [a for v in value for a in floats(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [a for f in dataclasses.fields(value) for a in floats(getattr(value, f.name))]
    return []


def watch(monkeypatch, dtype):
    """Wrap every function of WATCHED wherever it is imported -> {name of function: calls}."""
    calls, wrapped = {}, {}

    def wrapper(function):
        def checked(*args, **kwargs):
            result = function(*args, **kwargs)
            seen = floats(result)
            if function.__name__ not in ONLY_RESULTS:
                seen += floats(args) + floats(kwargs)
            odd = [a for a in seen if a.dtype != dtype]
            assert not odd, f"{function.__name__}: {odd[0].dtype} {odd[0].shape}"
            calls[function.__name__] = calls.get(function.__name__, 0) + 1
            return result
        return checked

    for module in WATCHED:
        for name, function in list(vars(module).items()):
            if isinstance(function, types.FunctionType) and name not in UNWATCHED and (
                    function.__module__ in [m.__name__ for m in WATCHED]):
                wrapped.setdefault(function, wrapper(function))
                monkeypatch.setattr(module, name, wrapped[function])
    for name, pair in layers.ACTIVATIONS.items():
        monkeypatch.setitem(layers.ACTIVATIONS, name, tuple(map(wrapped.get, pair, pair)))
    monkeypatch.setattr(Model, "run", wrapper(Model.run))
    monkeypatch.setattr(Model, "deferred_streams", wrapper(Model.deferred_streams))
    return calls


CASES = {
    "rms, rope, silu": ({}, {}),
    "layernorm, learned, gelu, biases, untied": (LAYERNORM, {}),
    "layernorm and rope": ({"norm": "layer", "qkv_bias": True}, {"positions": "same"}),
    "rotation": ({}, {"kind": "rotation", "insertion_rank": 2}),
    "lossless": ({}, {"mode": "lossless", "lora_rank": 2}),
    "lora everywhere": (LAYERNORM, {"lora_rank": 3, "lora_all_layers": True}),
    "main sees streams": ({}, {"main_sees_streams": True}),
    "plain streams": ({"kv_heads": 4}, {"transition_rank": 0, "prune_rank": 0})}


def case(name, dtype):
    changes, streams = CASES[name]
    return tiny_model(CONFIG.replace(eos_ids=(), **changes), STREAMS.replace(**streams), dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_keeps_the_dtype(monkeypatch, name, dtype):
    model = case(name, dtype)
    calls = watch(monkeypatch, dtype)
    trainer = Trainer(model, FixedLoader([texts(3)]),
                      TrainConfig(steps=2, batch=3, workers=1, segments=2, warmup=1))
    list(trainer.run())
    assert calls["block_backward"] and calls["head_loss"] and calls["top_backward"]
    arrays = [*model.params.values(), *trainer.optimizer.state().values(),
              *(g for grads in trainer.grads for g in grads.values())]
    assert {a.dtype for a in arrays} == {np.dtype(dtype)}


TREES = {"deferred": TreeConfig(), "fused": TreeConfig(fused=True), "paper": PAPER_TREE,
         "pruned": TreeConfig(prune_budget=4)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_decoding_keeps_the_dtype(monkeypatch, name, dtype):
    model = case(name, dtype)
    calls = watch(monkeypatch, dtype)
    generate(model, [3, 4, 5], 4, temperature=0.8, top_k=5, top_p=0.9)
    for kind, tree in TREES.items():
        if tree.prunes and "prune.down" not in model.params:
            continue
        out = generate(model, [3, 4, 5], 8, "streams", tree=tree,
                       temperature=0.0 if kind == "paper" else 0.7)
        assert out.stats.forwards
    assert calls["block_forward"] and calls["run"] and calls["head_matrix"]
    assert model.logits([3, 4]).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_cache_keeps_the_dtype_when_it_grows(dtype):
    model = tiny_model(dtype=dtype)
    cache = model.new_cache(4)
    model.prefill(cache, np.array([3, 4, 5]))
    cache.grow(50)
    assert cache.keys.dtype == cache.values.dtype == dtype and cache.capacity >= 50


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_dtypes_compute_the_same(dtype):
    """float32 is the same model, rounded: not another one."""
    want = tiny_model(dtype="float64").logits([3, 9, 4, 7])
    np.testing.assert_allclose(tiny_model(dtype=dtype).logits([3, 9, 4, 7]), want, atol=1e-4)


# --- what becomes of no argument and no result --------------------------------------------------

@pytest.mark.parametrize("name", CASES)
def test_no_double_is_ever_made_on_the_device(monkeypatch, name):
    """The stand-in for CuPy sees each single operation, also those that end in a float32 array."""
    cp = strict_cupy.install(monkeypatch)
    device, made, original = case(name, "float32").to(cp), set(), strict_cupy_array.box

    def box(host):
        made.add(host.dtype.name)
        return original(host)

    for module in (strict_cupy, strict_cupy_array):
        monkeypatch.setattr(module, "box", box)
    list(Trainer(device, FixedLoader([texts(3)]), TrainConfig(steps=2, batch=3)).run())
    for tree in TREES.values():
        if not tree.prunes or "prune.down" in device.params:
            generate(device, [3, 4, 5], 6, "streams", tree=tree)
    assert "float32" in made and not made & {"float64", "float16"}


# --- the watch sees each of these ---------------------------------------------------------------

PLANTS = {
    "scalar in an activation": (layers, "GELU_SCALE", np.float64(0.797), LAYERNORM),
    "scalar in a mask": (attention, "MASKED", np.float64(-1e30), {}),
    "double angles": (attention, "rope_table", None, {})}


@pytest.mark.parametrize("plant", PLANTS)
def test_the_watch_sees_a_planted_double(monkeypatch, plant):
    module, name, value, changes = PLANTS[plant]
    if value is None:
        from minispec import streams
        original = attention.rope_table
        monkeypatch.setattr(streams, "rope_table", lambda *args: original(*args[:4], "float64"))
    else:
        monkeypatch.setattr(module, name, value)
    model = tiny_model(CONFIG.replace(**changes), dtype="float32")
    watch(monkeypatch, "float32")
    with pytest.raises(AssertionError, match="float64"):
        generate(model, [3, 4, 5], 4, "streams")
