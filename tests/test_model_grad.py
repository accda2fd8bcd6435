"""Claim: the gradient of a whole training pass is right, in every configuration, however it is cut.

Each configuration is checked along one random direction per parameter and three over all of them,
to 1e-6 of the derivative (correct code: 2e-8). What the design holds constant is held
constant in the numbers as well (gradcheck.Problem.loss). Then: segments, micro-batches and
threads change nothing; a frozen base stays what it was to the bit; a tied matrix gets both uses.
"""

import numpy as np
import pytest

from gradcheck import Problem
from minispec import objective
from minispec.config import TrainConfig
from minispec.data import Document, pad_batch
from minispec.parameters import is_base
from minispec.training import Trainer

GPT2 = dict(norm="layer", positions="learned", activation="gelu", gated=False, qkv_bias=True,
            out_bias=True, mlp_bias=True, kv_heads=4)
NEOX = dict(norm="layer", activation="gelu_exact", gated=False, qkv_bias=True, out_bias=True,
            mlp_bias=True, kv_heads=4)
PAPER = dict(transition_rank=0)         # no conditional streams
LORA = dict(lora_rank=3)

CONFIGS = {
    "default: rms, rope, gated, tied, grouped heads, conditional": {},
    "plain transformer": dict(streams=None),
    "plain transformer, packed, untied": dict(streams=None, model=dict(tied=False),
                                              layout="packed"),
    "paper's streams": dict(streams=PAPER),
    "no pruning map": dict(streams=dict(prune_rank=0)),
    "packed": dict(layout="packed"),
    "detached conditional streams": dict(detach=True),
    "detached, untied": dict(detach=True, model=dict(tied=False)),
    "gpt2": dict(model=GPT2),
    "gpt2, untied, packed": dict(model=dict(GPT2, tied=False), layout="packed"),
    "layer norm, gated gelu": dict(model=dict(norm="layer", activation="gelu")),
    "learned positions, same": dict(model=dict(positions="learned"),
                                    streams=dict(positions="same")),
    "rope, same": dict(streams=dict(positions="same")),
    "all biases with rope": dict(model=dict(qkv_bias=True, out_bias=True, mlp_bias=True)),
    "one head, one stream": dict(model=dict(heads=1, kv_heads=1), streams=dict(count=1)),
    "streams in every layer": dict(streams=dict(PAPER, layers=3)),
    "streams in one layer": dict(streams=dict(layers=1)),
    "rotation": dict(streams=dict(kind="rotation", rotation_angle=0.3)),
    "rotation, low-rank insertion, seen": dict(
        streams=dict(kind="rotation", rotation_angle=0.3, insertion_rank=3,
                     main_sees_streams=True)),
    "low-rank insertion": dict(streams=dict(insertion_rank=3)),
    "main sees streams": dict(streams=dict(PAPER, main_sees_streams=True)),
    "main sees streams, packed, gpt2": dict(streams=dict(main_sees_streams=True), model=GPT2,
                                            layout="packed"),
    "lora": dict(streams=LORA),
    "lora, all layers, seen": dict(streams=dict(LORA, lora_all_layers=True,
                                                main_sees_streams=True)),
    "lora, two targets": dict(streams=dict(LORA, lora_targets=("attn.q", "mlp.up"))),
    "lossless": dict(streams=dict(LORA, mode="lossless")),
    "lossless, gpt2, packed, rotation": dict(
        streams=dict(LORA, mode="lossless", kind="rotation", insertion_rank=2), model=GPT2,
        layout="packed"),
    "gpt-neox": dict(model=dict(NEOX, residual="parallel", rotary_dim=4, tied=False)),
    "phi": dict(model=dict(NEOX, residual="shared", rotary_dim=2, tied=False, head_bias=True)),
    "opt, norms after, projected": dict(model=dict(
        GPT2, activation="relu", residual="post", final_norm=False, embed_width=5,
        position_offset=2)),
    "query and key norms, window, packed": dict(
        model=dict(qk_norm=True, sliding_window=3, kv_heads=4), layout="packed"),
    "lossless without adapters": dict(streams=dict(mode="lossless")),
    "draft vocabulary": dict(streams=dict(draft_vocab=6)),
    "draft vocabulary, untied, scaled": dict(streams=dict(draft_vocab=6, embed_scale=3.0),
                                             model=dict(tied=False, head_bias=True)),
    "draft vocabulary, lossless, packed": dict(
        streams=dict(LORA, mode="lossless", draft_vocab=6), layout="packed"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_equals_directional_derivatives(name):
    Problem(**CONFIGS[name]).check()


@pytest.mark.parametrize("name", ["default: rms, rope, gated, tied, grouped heads, conditional",
                                  "all biases with rope", "low-rank insertion", "lossless",
                                  "lora, all layers, seen"])
def test_every_trained_parameter_gets_a_gradient(name):
    problem = Problem(**CONFIGS[name])
    grads, _ = problem.gradients()
    assert all(np.abs(g).max() > 1e-6 for g in grads.values())
    # every stream on its own, too: a forgotten one would hide in a stacked array
    for name in ("streams.embed", "transitions.state", "transitions.token", "transitions.out"):
        if name in grads:
            assert all(np.abs(g).max() > 1e-6 for g in grads[name])


# --- cut in pieces ------------------------------------------------------------------------------

def same(got, expected):
    """Gradients and metrics are equal, but for the order of sums."""
    (grads, metrics), (grads_, metrics_) = got, expected
    assert grads.keys() == grads_.keys()
    for name, g in grads_.items():
        scale = max(1.0, float(np.abs(g).max()))
        assert np.abs(grads[name] - g).max() <= 1e-12 * scale, name
    assert metrics.count == metrics_.count and metrics.hits == metrics_.hits
    assert metrics.loss == pytest.approx(metrics_.loss, rel=1e-12)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("options", [
    dict(), dict(layout="packed"), dict(model=GPT2, streams=dict(insertion_rank=2)),
    dict(streams=dict(kind="rotation", rotation_angle=0.3, layers=3)),
    dict(model=dict(sliding_window=3, qk_norm=True), streams=dict(draft_vocab=6)),
    dict(model=dict(NEOX, residual="parallel", rotary_dim=4))])
def test_frozen_main_rows_run_apart_from_their_streams(monkeypatch, options, segments):
    """Lossless mode: main rows forward only, then the streams alone, against all rows at once."""
    options = {**options, "streams": dict(LORA, mode="lossless", **options.get("streams", {}))}
    problem = Problem(**options)
    problem.weights["main"] = 1.0                         # main losses as a metric
    together = objective.Pass.top
    apart = problem.gradients(segments=segments)
    monkeypatch.setattr(objective.Pass, "top_of_streams", together)
    same(apart, problem.gradients())
    problem.weights["main"] = 0.0
    monkeypatch.undo()
    monkeypatch.setattr(objective.Pass, "top", None)      # not run at all
    grads, metrics = problem.gradients()
    assert not metrics.count["main"]
    assert all(np.abs(grads[n] - g).max() < 1e-12 for n, g in apart[0].items())


CUTS = {
    "default": {},
    "packed, main sees streams": dict(streams=dict(main_sees_streams=True), layout="packed"),
    "gpt2": dict(model=GPT2, streams=dict(insertion_rank=3)),
    "rotation": dict(streams=dict(PAPER, kind="rotation", rotation_angle=0.3)),
    "lora": dict(streams=dict(LORA, lora_all_layers=True)),
    "lossless": dict(streams=dict(LORA, mode="lossless"), layout="packed"),
}


@pytest.mark.parametrize("segments", [2, 4, 50])
@pytest.mark.parametrize("name", CUTS)
def test_segments_change_nothing(name, segments):
    problem = Problem(**CUTS[name])
    assert len(problem.batch.ids[0]) > 4
    same(problem.gradients(segments=segments), problem.gradients())


@pytest.mark.parametrize("parts", [2, 3, 50])
@pytest.mark.parametrize("name", CUTS)
def test_splitting_a_batch_by_examples_changes_nothing(name, parts):
    problem = Problem(**CUTS[name])
    pieces = problem.batch.split(parts)
    assert len(pieces) == min(parts, len(problem.batch.ids))
    same(problem.gradients(pieces), problem.gradients())


def ten_targets():
    """Texts with 9, 1, 3, 3, 3 and 1 trained tokens (case H-10: unequal micro-batches)."""
    rng = np.random.default_rng(3)
    return [Document(rng.integers(0, 11, 3 + n).tolist(), 3) for n in (9, 1, 3, 3, 3, 1)]


@pytest.mark.parametrize("cut", [[(0, 1), (1, 6)], [(0, 2), (2, 4), (4, 6)],
                                 [(i, i + 1) for i in range(6)], [(0, 5), (5, 6)]])
def test_micro_batches_of_unequal_weight_add_up(cut):
    """Each loss is a mean over the targets of the whole step, not a mean of means (H-10)."""
    problem, texts = Problem(), ten_targets()
    whole = pad_batch(texts, 3)
    problem.weights["counts"] = whole.counts
    assert whole.counts.tolist() == [20, 14, 10, 6]
    same(problem.gradients([pad_batch(texts[a:b], 3) for a, b in cut]),
         problem.gradients([whole]))


def trainer(problem, batches, **changes):
    """A Trainer over a list of batches."""
    train = TrainConfig(**{**dict(workers=1, steps=20, warmup=0, lr=1e-2, stream_weight=0.3,
                                  transition_weight=0.2), **changes})
    return Trainer(problem.model, batches, train)


def test_threads_and_segments_of_the_trainer_change_nothing():
    problem, results = Problem(), []
    for workers, segments in ((1, 1), (2, 1), (3, 2)):
        job = trainer(problem, [], workers=workers, segments=segments)
        metrics, grads = job.gradients([problem.batch], problem.weights)
        results.append((grads, metrics))
    same(results[1], results[0])
    same(results[2], results[0])
    same(problem.gradients(), results[0])


def test_a_step_of_two_micro_batches_is_a_step_of_their_union():
    texts, ends = ten_targets(), []
    for batches, accumulate in (([pad_batch(texts, 3)], 1),
                                ([pad_batch(texts[:1], 3), pad_batch(texts[1:], 3)], 2)):
        problem = Problem()
        job = trainer(problem, batches, accumulate=accumulate)
        report = job.one_step()
        ends.append((problem.params, report))
    for name, value in ends[0][0].items():
        assert np.abs(ends[1][0][name] - value).max() < 1e-9, name
    assert ends[0][1].norm == pytest.approx(ends[1][1].norm, rel=1e-12)


# --- frozen and tied ----------------------------------------------------------------------------

def check_frozen_base(**streams):
    """Train a few steps; the base must stay what it was, to the bit, and have no gradient."""
    problem = Problem(streams=streams)
    before = {n: a.copy() for n, a in problem.params.items()}
    job = trainer(problem, [problem.batch] * 3, weight_decay=0.1)
    reports = [job.one_step() for _ in range(3)]
    assert all(r.norm > 0 for r in reports)
    for name, old in before.items():
        if is_base(name):
            assert name not in job.grads[0] and name not in job.optimizer.mean, name
            assert problem.params[name].tobytes() == old.tobytes(), name
        else:
            assert not np.array_equal(problem.params[name], old), f"{name} was not trained"


def test_lossless_training_leaves_the_base_alone():
    check_frozen_base(mode="lossless", lora_rank=3, lora_alpha=1.5)


def test_adapters_stand_in_for_the_base_in_shared_mode():
    check_frozen_base(lora_rank=3, lora_all_layers=True)


def test_a_pass_adds_to_the_gradients_that_it_was_given_and_to_no_others():
    problem = Problem()
    one, _ = problem.gradients()
    wanted = ("streams.embed", "blocks.1.attn.k.w")
    grads = {n: np.full_like(problem.params[n], 7.0) for n in wanted}
    names, problem.names = problem.names, list(wanted)
    problem.zeros = lambda: grads
    got, _ = problem.gradients()
    assert set(got) == set(wanted) < set(names)
    for name in wanted:
        assert np.abs(got[name] - 7.0 - one[name]).max() < 1e-12


def test_the_tied_matrix_gets_the_sum_of_both_uses():
    """H-24, against the same model with a head of its own that holds the same numbers."""
    tied, untied = Problem(), Problem(model=dict(tied=False))
    for name, value in untied.params.items():
        value[...] = (tied.params["embed.tokens"].T if name == "head.w" else tied.params[name])
    one, (two, _) = tied.gradients()[0]["embed.tokens"], untied.gradients()
    assert np.abs(two["embed.tokens"]).max() > 0.01 and np.abs(two["head.w"]).max() > 0.01
    assert np.abs(one - two["embed.tokens"] - two["head.w"].T).max() < 1e-12


def test_the_tied_matrix_stays_one_array_with_one_pair_of_moments():
    """H-24: three steps later there is still one matrix, updated in place."""
    problem = Problem()
    table = problem.params["embed.tokens"]
    job = trainer(problem, [problem.batch] * 3)
    for _ in range(3):
        job.one_step()
    assert problem.params["embed.tokens"] is table and "head.w" not in problem.params
    assert [n for n in job.optimizer.mean if "embed" in n or "head" in n] == [
        "embed.tokens", "streams.embed"]
