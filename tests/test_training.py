"""Training learns, and how a step is cut, stopped or resumed does not change what it computes.

Claims: a small batch is learned by heart and decoded back; accumulation and workers change
nothing but rounding (case H-10); a step without targets changes nothing and is no NaN (H-27);
gradients that are not finite stop the run, name a tensor and leave the checkpoint alone; tied
embeddings are one array with one pair of moments (H-24); the losses of a small run in float64 are
those stored here. Checkpoints are in test_resume.py.
"""

import numpy as np
import pytest
from tiny_models import CONFIG, LAYERNORM, STREAMS, FixedLoader, texts, tiny_model

from minispec.config import TrainConfig
from minispec.data import Document
from minispec.generate import generate
from minispec.loss import Metrics
from minispec.model import Model
from minispec.objective import Pass
from minispec.parameters import init_params
from minispec.training import Trainer

TRAIN = TrainConfig(steps=20, batch=4, workers=1, lr=0.02, min_lr=0.005, warmup=5,
                    stream_weight=0.3, transition_weight=0.3)


def fresh(dtype="float64", streams=STREAMS, **changes):
    config = CONFIG.replace(**changes)
    return Model(config, init_params(config, streams, 0, dtype), streams)


# --- it learns ----------------------------------------------------------------------------------

@pytest.mark.parametrize("changes", [{}, LAYERNORM], ids=["rms", "layernorm"])
def test_a_small_batch_is_learned_by_heart(changes):
    documents = [Document([8 + i, *d.ids, 1], d.start + 1) for i, d in enumerate(texts(4, seed=3))]
    trainer = Trainer(fresh("float32", **changes), FixedLoader([documents]),
                      TRAIN.replace(steps=100, batch=4))
    last = list(trainer.run())[-1].metrics
    for kind in ("main", "stream 1", "stream 2", "next 1", "next 2"):
        assert last.mean_loss(kind) < 0.05 and last.accuracy(kind) == 1.0
    for document in documents:
        for drafter in (None, "streams"):
            out = generate(trainer.model, document.ids[:document.start], 30, drafter)
            assert out.ids == document.ids[document.start:]
        assert out.stats.tokens_per_forward > 1.5         # and the streams have learned theirs


def test_the_early_exit_learns_without_touching_the_rest():
    """Its gradient goes to its own map alone, so the others' values do not depend on it."""
    train = TRAIN.replace(clip=1e9)                       # clipping looks at all gradients
    with_map, without = fresh(), fresh(streams=STREAMS.replace(prune_rank=0))
    losses = [r.metrics.mean_loss("exit")
              for r in Trainer(with_map, FixedLoader([texts(4)]), train).run()]
    list(Trainer(without, FixedLoader([texts(4)]), train).run())
    assert losses[-1] < losses[0] - 0.3
    for name, value in without.params.items():
        np.testing.assert_array_equal(value, with_map.params[name])


GOLDEN = [                                                # written by this very code
    (3.206689143, 3.215485193), (3.117221903, 3.084886037), (3.14018322, 3.180479897),
    (3.100063458, 3.106587846), (3.165232346, 3.140809657), (3.121920482, 3.067578378),
    (3.11343356, 3.075122912), (3.047155244, 3.119435815), (3.029121599, 3.116435251),
    (2.978856997, 2.940745951), (3.008656168, 2.971875259), (2.945221199, 2.964059009),
    (2.896210471, 2.93787107), (2.92606205, 2.925079165), (2.887754987, 2.868015281),
    (2.862240601, 2.720015666), (2.838157455, 2.805691364), (2.747379489, 2.841804517),
    (2.833446345, 2.771517131), (2.800060698, 2.764899185)]


def small_run(dtype):
    """Mean main and stream losses of 20 steps over 5 micro-batches of 4."""
    loader = FixedLoader([texts(4, seed=s) for s in range(5)])
    model = tiny_model(dtype=dtype, hot=0.05)
    return [(r.metrics.mean_loss("main"), r.metrics.mean_loss("next 2"))
            for r in Trainer(model, loader, TRAIN).run()]


def test_the_losses_of_a_small_run_are_those_stored_here():
    losses = small_run("float64")
    np.testing.assert_allclose(losses, GOLDEN, rtol=1e-8)
    assert losses[-1][0] < losses[0][0]


def test_float32_follows_the_stored_losses():
    np.testing.assert_allclose(small_run("float32"), GOLDEN, rtol=1e-3)


# --- a step may be cut in any way (H-10) --------------------------------------------------------

def after(model, groups, steps=2, **changes):
    """Parameters and the metrics of the last step."""
    train = TRAIN.replace(steps=steps, accumulate=len(groups), **changes)
    trainer = Trainer(model, FixedLoader(groups), train)
    return model.params, list(trainer.run())[-1].metrics


@pytest.mark.parametrize("sizes, workers, segments", [
    ((5, 3), 1, 1), ((1, 1, 1, 5), 1, 1), ((2, 2, 2, 2), 2, 1), ((8,), 2, 1), ((8,), 3, 1),
    ((8,), 16, 1), ((8,), 1, 3), ((3, 5), 2, 2)])
@pytest.mark.parametrize("sees", [False, True], ids=["v1", "pmlr"])
def test_accumulation_workers_and_segments_change_nothing(sizes, workers, segments, sees):
    """Documents of unequal length: a mean of the micro-batches' means would show at once."""
    documents = texts(8, shortest=3, longest=14)
    groups = [documents[sum(sizes[:i]):sum(sizes[:i + 1])] for i in range(len(sizes))]
    streams = STREAMS.replace(main_sees_streams=sees)
    want, want_metrics = after(fresh(streams=streams), [documents])
    got, metrics = after(fresh(streams=streams), groups, workers=workers, segments=segments)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11, err_msg=name)
    assert metrics.count == want_metrics.count
    for kind in want_metrics.count:
        assert metrics.mean_loss(kind) == pytest.approx(want_metrics.mean_loss(kind), rel=1e-10)


def test_a_mean_loss_counts_tokens_and_not_micro_batches():
    """9 tokens of loss 1 and 1 token of loss 10: 1.9, where the mean of means would be 5.5."""
    a, b = Metrics(), Metrics()
    a.add("main", 9.0, 9, 9)
    b.add("main", 10.0, 0, 1)
    a.merge(b)
    assert a.mean_loss("main") == 1.9 and a.accuracy("main") == 0.9
    assert a.mean_loss("stream 1") is a.accuracy("stream 1") is None


def test_each_stream_is_averaged_over_its_own_targets():
    """The gradient is that of main + 0.3 * (sum of the streams' own means), by differences."""
    model = tiny_model(streams=STREAMS.replace(transition_rank=0, prune_rank=0))
    batch = FixedLoader([texts(3, shortest=4, longest=6)])[0]
    assert batch.counts[2] < batch.counts[1] < batch.counts[0]
    weights = {"main": 1.0, "stream": 0.3, "next": 0.0, "counts": batch.counts}
    table, way = model.params["streams.embed"], np.random.default_rng(1).normal(size=(2, 16))

    def total(step):
        model.params["streams.embed"] = table + step * way
        metrics = Pass(model, batch, {}, weights).run()
        return sum(alpha * metrics.mean_loss(kind) for kind, alpha in
                   (("main", 1.0), ("stream 1", 0.3), ("stream 2", 0.3)))

    slope = (total(1e-5) - total(-1e-5)) / 2e-5
    grads = {"streams.embed": np.zeros_like(table)}
    model.params["streams.embed"] = table
    Pass(model, batch, grads, weights).run()
    assert (grads["streams.embed"] * way).sum() == pytest.approx(slope, rel=1e-6)


# --- nothing to learn (H-27) --------------------------------------------------------------------

EMPTY = [Document([5, 6, 7, 8], 4), Document([5, 6], 2)]  # prompts without a completion


def test_a_micro_batch_without_targets_is_as_if_it_were_not_there():
    documents = texts(4)
    want, _ = after(fresh(), [documents], steps=3)
    got, metrics = after(fresh(), [EMPTY, documents], steps=3)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])
    assert np.isfinite(metrics.mean_loss("main"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_without_targets_updates_nothing(workers):
    model = fresh()
    before = {n: p.copy() for n, p in model.params.items()}
    trainer = Trainer(model, FixedLoader([EMPTY, EMPTY]),
                      TRAIN.replace(steps=2, accumulate=2, workers=workers, weight_decay=0.1))
    reports = list(trainer.run())
    assert [r.metrics.mean_loss("main") for r in reports] == [None, None]
    assert trainer.empty == 2 and trainer.optimizer.updates == 0 and trainer.step == 2
    assert all(r.norm == 0.0 for r in reports)
    for name, value in model.params.items():
        np.testing.assert_array_equal(value, before[name])


def test_a_text_shorter_than_the_streams_trains_what_it_can():
    streams = STREAMS.replace(count=6)
    trainer = Trainer(fresh(streams=streams), FixedLoader([[Document([5, 6, 7], 1)]], 6),
                      TRAIN.replace(steps=3))
    metrics = list(trainer.run())[-1].metrics
    assert {k: v for k, v in metrics.count.items() if k.startswith(("main", "stream")) and v} == {
        "main": 2, "stream 1": 1}
    assert metrics.mean_loss("stream 4") is None
    assert all(np.isfinite(p).all() for p in trainer.model.params.values())


# --- what is not finite -------------------------------------------------------------------------

@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_stops_and_saves_nothing(bad, tmp_path):
    trainer = Trainer(fresh(), FixedLoader([texts(4)]), TRAIN.replace(checkpoint_every=2), tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    run = trainer.run()
    for _ in range(3):
        next(run)
    saved, params = path.read_bytes(), {n: p.copy() for n, p in trainer.model.params.items()}
    trainer.model.params["blocks.1.mlp.up.w"][0, 0] = bad
    with pytest.raises(FloatingPointError, match=r"step 4: the gradient of \S+\.\S+ is not fin"):
        next(run)
    assert path.read_bytes() == saved                     # of step 2, and step 3 is not added
    for name, value in params.items():
        if name != "blocks.1.mlp.up.w":
            np.testing.assert_array_equal(trainer.model.params[name], value)


# --- tied embeddings (H-24) ---------------------------------------------------------------------

def test_a_tied_embedding_is_one_array_with_one_pair_of_moments():
    model = fresh()
    table, start = model.params["embed.tokens"], model.params["embed.tokens"].copy()
    trainer = Trainer(model, FixedLoader([texts(4)]), TRAIN.replace(steps=3))
    list(trainer.run())
    assert "head.w" not in model.params and model.params["embed.tokens"] is table
    assert [n for n in trainer.optimizer.state() if "embed.tokens" in n] == [
        "mean.embed.tokens", "square.embed.tokens"]
    assert not np.array_equal(table, start)


def test_what_is_frozen_stays_to_the_bit():
    for streams in (STREAMS.replace(mode="lossless", lora_rank=2),
                    STREAMS.replace(lora_rank=2, lora_all_layers=True)):
        model = tiny_model(streams=streams)
        before = {n: p.copy() for n, p in model.params.items()}
        list(Trainer(model, FixedLoader([texts(4)]), TRAIN.replace(steps=2)).run())
        moved = {n for n, p in model.params.items() if not np.array_equal(p, before[n])}
        assert moved == {n for n in model.params if n.endswith((".lora_a", ".lora_b"))
                         or n.startswith(("streams.", "prune.", "transitions."))}
