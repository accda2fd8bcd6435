"""Claim: the n-gram loss is the one of its definition, row by row and stream by stream.

Training's metrics are compared with the passes of decoding, text by text, so padding, packing and
targets are proved as well. Each stream is averaged over its own targets (H-10), and a batch with
nothing to learn does nothing (H-27).
"""

import math

import numpy as np
import pytest

from gradcheck import Problem
from minispec import loss, masks, objective
from minispec.data import Document, pad_batch
from minispec.loss import Metrics, head_loss
from minispec.pruning import exit_forward
from minispec.transformer import head_matrix
from test_model_grad import same, trainer


# --- the head -----------------------------------------------------------------------------------

def rows(n=13, width=5, vocab=7, seed=0):
    """params with both kinds of head in turn, normed rows, targets, weights."""
    rng = np.random.default_rng(seed)
    x, targets, weights = rng.normal(size=(n, width)), rng.integers(0, vocab, n), rng.random(n)
    return {"embed.tokens": rng.normal(size=(vocab, width))}, x, targets, weights


def test_head_loss_is_cross_entropy_row_by_row():
    params, x, targets, weights = rows()
    losses, hits, dx = head_loss(params, {}, x, targets, weights)
    for n in range(len(x)):
        logits = [float(x[n] @ params["embed.tokens"][v]) for v in range(7)]
        total = sum(math.exp(z) for z in logits)
        assert losses[n] == pytest.approx(math.log(total) - logits[targets[n]], rel=1e-12)
        assert hits[n] == (max(range(7), key=lambda v: logits[v]) == targets[n])
        dlogits = [math.exp(logits[v]) / total - (v == targets[n]) for v in range(7)]
        expected = sum(weights[n] * d * params["embed.tokens"][v] for v, d in enumerate(dlogits))
        assert dx[n] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cells", [1, 7, 20, 90, 91])
def test_chunks_equal_one_chunk(monkeypatch, cells, tied):
    """13 rows of 7 logits: chunks of 1, 1, 2, 12 and 13 rows."""
    params, x, targets, weights = rows()
    name = "embed.tokens"
    if not tied:
        name, params["head.w"] = "head.w", params["embed.tokens"].T.copy()
    results = []
    for size in (loss.CHUNK_CELLS, cells):
        monkeypatch.setattr(loss, "CHUNK_CELLS", size)
        monkeypatch.setattr(loss, "CHUNK_ROWS", 1)
        grads = {name: np.zeros_like(params[name])}
        results.append((*head_loss(params, grads, x, targets, weights), grads[name]))
    for whole, cut in zip(*results):
        assert np.abs(whole.astype(float) - cut).max() < 1e-14


def test_a_frozen_head_gets_nothing():
    params, x, targets, weights = rows()
    grads = {"streams.embed": np.zeros((2, 5))}
    head_loss(params, grads, x, targets, weights)
    assert list(grads) == ["streams.embed"] and not grads["streams.embed"].any()


def test_an_impossible_target_has_a_finite_loss():
    params = {"head.w": np.eye(3, dtype=np.float32)}
    x = np.array([[0.0, 0.0, 1e4]], dtype=np.float32)
    losses, hits, dx = head_loss(params, {}, x, np.array([0]), np.ones(1, np.float32))
    assert 80 < losses[0] < 90 and not hits[0] and np.isfinite(dx).all()


# --- averages -----------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_stream_is_averaged_over_its_own_targets(monkeypatch, layout):
    """The weights of a stream's rows sum to its alpha, however few rows it has."""
    problem, seen = Problem(layout=layout), []

    def spy(params, grads, x, targets, weights, columns=None):
        seen.append(weights)
        return head_loss(params, grads, x, targets, weights, columns)

    monkeypatch.setattr(objective, "head_loss", spy)
    problem.gradients()
    counts = problem.batch.counts
    assert len(set(counts)) == 4                          # no two streams have as many targets
    ngram, conditional = seen
    parts = np.split(ngram, np.cumsum(counts)[:-1])
    assert [p.sum() for p in parts] == pytest.approx([1.0, 0.3, 0.3, 0.3])
    assert all(np.ptp(p) == 0 for p in parts)
    parts = np.split(conditional, np.cumsum(counts[1:])[:-1])
    assert [p.sum() for p in parts] == pytest.approx([0.2, 0.2, 0.2])


def test_the_mean_over_a_step_is_no_mean_of_means():
    """H-10: nine targets of loss 1 and one of loss 10 are 1.9, not 5.5."""
    params = {"head.w": np.eye(2)}
    easy, hard = (-math.log(math.exp(nats) - 1) for nats in (1.0, 10.0))
    metrics = Metrics()
    for logit, count in ((easy, 9), (hard, 1)):
        x = np.tile([logit, 0.0], (count, 1))
        losses, hits, _ = head_loss(params, {}, x, np.zeros(count, int), np.ones(count))
        part = Metrics()
        part.add_rows(["main"], np.zeros(count, int), losses, hits)
        metrics.merge(part)
    assert metrics.mean_loss("main") == pytest.approx(1.9)
    assert metrics.count == {"main": 10} and metrics.accuracy("main") == 0.0


def test_metrics_sort_rows_by_kind():
    metrics = Metrics()
    metrics.add_rows(["a", "b", "c"], np.array([0, 2, 2]), np.array([1.0, 2.0, 4.0]),
                     np.array([True, False, True]))
    assert metrics.loss == {"a": 1.0, "b": 0.0, "c": 6.0}
    assert metrics.hits == {"a": 1, "b": 0, "c": 1} and metrics.count == {"a": 1, "b": 0, "c": 2}
    assert metrics.mean_loss("c") == 3.0 and metrics.accuracy("c") == 0.5
    for kind in ("b", "never heard of"):
        assert metrics.mean_loss(kind) is None and metrics.accuracy(kind) is None


# --- training's losses are those of decoding ----------------------------------------------------

def nats(problem, state, target):
    """-log softmax(head(state))[target] for one normed row (C,)."""
    logits = state @ head_matrix(problem.params)
    return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target]


def decoded_losses(problem):
    """{kind: summed loss} text by text, from the pass that decoding uses."""
    model, count, sums = problem.model, problem.streams.count, {}
    for document in problem.documents:
        ids, first = document.ids, document.start - 1
        size = len(ids) - 1
        out = model.run(model.new_cache(), np.array(ids[:-1]), masks.causal(size),
                        bundles=size - first)             # exactly the rows that train
        early, _ = exit_forward(problem.params, problem.config, out.hidden)
        for t in range(first, size):
            logits = out.logits[t]
            main = np.log(np.exp(logits).sum()) - logits[ids[t + 1]]
            found = {"main": main, "exit": nats(problem, early[t], ids[t + 1])}
            for g in range(1, count + 1):
                if t + 1 + g < len(ids):
                    state = out.streams[t - first, g - 1]
                    found[f"stream {g}"] = nats(problem, state, ids[t + 1 + g])
            for kind, value in found.items():
                sums[kind] = sums.get(kind, 0.0) + value
    return sums


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("options", [
    dict(), dict(streams=dict(main_sees_streams=True)),
    dict(model=dict(positions="learned", norm="layer", tied=False), streams=dict(insertion_rank=3)),
    dict(streams=dict(kind="rotation", rotation_angle=0.3, positions="same")),
    dict(streams=dict(mode="lossless", lora_rank=3))])
def test_training_sees_the_losses_that_decoding_sees(options, layout):
    problem = Problem(**options, layout=layout)
    problem.weights["main"] = 1.0       # with 0 (lossless training) the main loss is left out
    _, metrics = problem.gradients()
    for kind, value in decoded_losses(problem).items():
        assert metrics.loss[kind] == pytest.approx(value, rel=1e-10), kind


# --- nothing to learn (H-27) --------------------------------------------------------------------

def prompt_only():
    """A batch without any target: both texts are prompts."""
    return pad_batch([Document([1, 2, 3, 4], 4), Document([5, 6], 2)], 3)


def test_a_micro_batch_with_nothing_to_learn_changes_nothing():
    problem = Problem()
    empty = prompt_only()
    assert empty.counts.tolist() == [0, 0, 0, 0] and empty.streams_from == empty.ids.shape[1]
    same(problem.gradients([empty, problem.batch]), problem.gradients())


def test_a_step_with_nothing_to_learn_updates_nothing_and_is_counted():
    problem = Problem()
    before = {n: a.copy() for n, a in problem.params.items()}
    job = trainer(problem, [prompt_only()] * 2 + [problem.batch], accumulate=1, workers=2)
    reports = [job.one_step(), job.one_step()]
    assert job.empty == 2 and job.step == 2 and job.optimizer.updates == 0
    assert all(np.array_equal(problem.params[n], a) for n, a in before.items())
    assert [r.metrics.mean_loss("main") for r in reports] == [None, None]
    assert reports[0].metrics.accuracy("stream 1") is None
    assert job.one_step().metrics.mean_loss("main") > 0 and job.empty == 2
    assert all(np.isfinite(a).all() for a in problem.params.values())


def test_a_text_shorter_than_the_streams_trains_those_that_fit():
    problem = Problem()
    short = pad_batch([Document([1, 2, 3], 1)], 3)
    problem.weights["counts"] = short.counts
    assert short.counts.tolist() == [2, 1, 0, 0]
    grads, metrics = problem.gradients([short])
    assert metrics.count == {"exit": 2, "main": 2, "stream 1": 1, "stream 2": 0, "stream 3": 0,
                             "next 1": 1, "next 2": 0, "next 3": 0}
    assert metrics.mean_loss("stream 3") is None
    assert not grads["transitions.out"][1:].any() and not grads["streams.embed"][1:].any()
    assert all(np.isfinite(g).all() for g in grads.values())
