"""The same lines on the strict stand-in for CuPy: same ids, same gradients, few transfers (H-42).

A model moved by `model.to` decodes the very ids that it decodes on NumPy, in every form of
drafting, and trains to the same gradients. What the stand-in refuses, a GPU would refuse: host and
device arrays in one formula, NumPy functions on device arrays, names that CuPy lacks.
"""

import numpy as np
import pytest
from strict_cupy import transfers
from tiny_models import CONFIG, LAYERNORM, STREAMS, FixedLoader, texts, tiny_model

from minispec.backend import to_host
from minispec.config import PAPER_TREE, TrainConfig, TreeConfig
from minispec.generate import generate, stream
from minispec.training import Trainer
from minispec.weights import load_model, save_model

NEVER_ENDS = CONFIG.replace(eos_ids=())


# --- decoding -----------------------------------------------------------------------------------

DECODING = {
    "plain": dict(), "plain, sampled": dict(temperature=0.9, top_k=9, top_p=0.9, seed=3),
    "deferred": dict(drafter="streams"),
    "fused": dict(drafter="streams", tree=TreeConfig(fused=True)),
    "paper": dict(drafter="streams", tree=PAPER_TREE.replace(fused=True)),
    "unconditional": dict(drafter="streams", tree=TreeConfig(conditional=False)),
    "pruned": dict(drafter="streams", tree=TreeConfig(prune_budget=3)),
    "pruned and fused": dict(drafter="streams", tree=TreeConfig(prune_threshold=0.05, fused=True)),
    "prompt lookup": dict(drafter="prompt_lookup"),
    "sampled": dict(drafter="streams", temperature=0.8, top_p=0.95, seed=1),
    "typical": dict(drafter="streams", temperature=0.5, tree=TreeConfig(acceptance="typical"))}
MODELS = {
    "rms": (NEVER_ENDS, STREAMS),
    "layernorm": (NEVER_ENDS.replace(**LAYERNORM), STREAMS.replace(insertion_rank=2)),
    "lossless": (NEVER_ENDS, STREAMS.replace(mode="lossless", lora_rank=2, kind="rotation")),
    "main sees streams": (NEVER_ENDS, STREAMS.replace(main_sees_streams=True))}
PROMPT = [3, 4, 5, 3, 4]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", DECODING)
def test_decoding_gives_the_same_ids(cp, name, form):
    host = tiny_model(*MODELS[name])
    device = host.to(cp)
    assert device.xp is cp and all(isinstance(p, cp.ndarray) for p in device.params.values())
    want = generate(host, PROMPT, 16, **DECODING[form])
    got = generate(device, PROMPT, 16, **DECODING[form])
    assert got.ids == want.ids and all(type(i) is int for i in got.ids)
    assert got.stats.forwards == want.stats.forwards      # and so the same trees were drafted
    assert [len(s.path) for s in got.steps] == [len(s.path) for s in want.steps]


@pytest.mark.parametrize("form", DECODING)
def test_few_transfers_per_decode_step(cp, form):
    """A read-back stalls a GPU: one for the choices; one for the guesses, or one a depth if they
    are conditional; one to prune; two for typical acceptance. Never one per node."""
    device = tiny_model(*MODELS["rms"]).to(cp)
    run = stream(device, PROMPT, 16, **DECODING[form])
    next(run)
    tree, reads = DECODING[form].get("tree", TreeConfig()), 1
    if DECODING[form].get("drafter") == "streams":
        reads += STREAMS.count if tree.conditional else 1
    reads += tree.prunes + 2 * (tree.acceptance == "typical")
    transfers.reset()
    for _ in run:
        assert transfers.to_host <= reads
        assert transfers.syncs == 0                       # no hidden wait: no mask, no float()
        assert transfers.to_device <= 20                  # small arrays of ids, positions, masks
        transfers.reset()


def test_logits_and_cache_agree(cp):
    host = tiny_model(*MODELS["layernorm"])
    device = host.to(cp)
    ids = [3, 9, 4, 7, 3, 8]
    np.testing.assert_allclose(to_host(device.logits(ids)), host.logits(ids), rtol=1e-11)
    caches = [m.new_cache(3) for m in (host, device)]
    for model, cache in zip((host, device), caches):
        model.prefill(cache, np.array(ids[:4]))
        model.prefill(cache, np.array(ids[4:]))           # the cache has to grow
        cache.rollback(1)
    assert len(caches[0]) == len(caches[1]) == 5
    np.testing.assert_allclose(to_host(caches[1].keys)[:, :, :, :5], caches[0].keys[:, :, :, :5],
                               rtol=1e-11)


def test_there_and_back(cp, tmp_path):
    host = tiny_model(dtype="float32")
    device = host.to(cp)
    device.params["norm.gain"] += 1.0                     # a copy: the host's stays
    back = device.to(np)
    assert back.xp is np
    np.testing.assert_array_equal(back.params["norm.gain"], host.params["norm.gain"] + 1)
    save_model(tmp_path, device)
    again = load_model(tmp_path, xp=cp)
    assert all(isinstance(p, cp.ndarray) for p in again.params.values())
    for name, value in back.params.items():
        np.testing.assert_array_equal(to_host(again.params[name]), value)
    for xp in (np, cp):
        model = load_model(tmp_path, xp=xp)
        assert generate(model, PROMPT, 5, "streams").ids == generate(model, PROMPT, 5).ids


def test_ids_are_checked_before_the_device_wraps_them(cp):
    device = tiny_model().to(cp)
    for bad in ([3, 23], [-1, 3]):
        with pytest.raises(ValueError, match="outside the vocabulary of 23"):
            generate(device, bad, 4)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            device.logits(bad)


# --- training -----------------------------------------------------------------------------------

TRAINING = {
    "shared": ({}, {}, {}),
    "segments": ({}, {}, {"segments": 2}),
    "accumulation": ({}, {}, {"accumulate": 2, "workers": 3}),
    "layernorm": (LAYERNORM, {"insertion_rank": 2}, {}),
    "lossless": ({}, {"mode": "lossless", "lora_rank": 2}, {}),
    "rotation": ({}, {"kind": "rotation", "lora_rank": 2, "lora_all_layers": True}, {}),
    "main sees streams": ({}, {"main_sees_streams": True}, {"segments": 2}),
    "plain": (LAYERNORM, {"prune_rank": 0, "transition_rank": 0}, {})}


@pytest.mark.parametrize("name", TRAINING)
def test_training_gives_the_same_gradients(cp, name):
    changes, streams, train = TRAINING[name]
    host = tiny_model(CONFIG.replace(**changes), STREAMS.replace(**streams))
    train = TrainConfig(steps=3, batch=3, lr=0.01, warmup=1, **{"workers": 1, **train})
    loader = FixedLoader([texts(3), texts(2, seed=1)])
    trainers = [Trainer(model, loader, train) for model in (host, host.to(cp))]
    for _ in range(train.steps):
        want, got = (trainer.one_step() for trainer in trainers)
        for kind in (k for k, count in want.metrics.count.items() if count):
            assert got.metrics.mean_loss(kind) == pytest.approx(want.metrics.mean_loss(kind),
                                                                rel=1e-10)
        assert got.metrics.hits == want.metrics.hits
        assert got.norm == pytest.approx(want.norm, rel=1e-10) and type(got.norm) is float
        for key, grad in trainers[0].grads[0].items():
            device = trainers[1].grads[0][key]
            assert isinstance(device, cp.ndarray)
            np.testing.assert_allclose(to_host(device), grad, rtol=1e-8, atol=1e-11, err_msg=key)
        if train.workers > 1:
            break                                         # the host's first worker holds the sum
    for key, value in trainers[0].model.params.items():
        np.testing.assert_allclose(to_host(trainers[1].model.params[key]), value, rtol=1e-8,
                                   atol=1e-9)


def test_a_checkpoint_moves_between_the_libraries(cp, tmp_path):
    train = TrainConfig(steps=4, batch=3, workers=1, warmup=1, checkpoint_every=2)
    host = tiny_model()
    loader = FixedLoader([texts(3)])
    first = Trainer(host.to(cp), loader, train, tmp_path)
    run = first.run()
    next(run), next(run)
    run.close()
    for xp in (cp, np):
        trainer = Trainer(host.to(xp), loader, train, tmp_path)
        assert trainer.resume() and trainer.step == 2
        for name, value in first.model.params.items():
            assert isinstance(trainer.model.params[name], xp.ndarray)
            np.testing.assert_array_equal(to_host(trainer.model.params[name]), to_host(value))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_gradient_that_is_not_finite_is_named_there_too(cp):
    device = tiny_model().to(cp)
    device.params["blocks.0.mlp.up.w"][0, 0] = np.nan
    trainer = Trainer(device, FixedLoader([texts(3)]), TrainConfig(steps=1, batch=3))
    with pytest.raises(FloatingPointError, match="the gradient of .* is not finite"):
        trainer.one_step()


def test_one_array_left_on_the_host_is_seen(cp):
    """The control: the tests above fail as soon as any formula mixes the two."""
    device = tiny_model().to(cp)
    device.params["blocks.2.norm2.gain"] = np.ones(CONFIG.width)
    with pytest.raises(TypeError):
        generate(device, PROMPT, 4, "streams")
    with pytest.raises(TypeError):
        Trainer(device, FixedLoader([texts(3)]), TrainConfig(steps=1, batch=3)).one_step()
