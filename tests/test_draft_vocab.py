"""Claim: streams over a draft vocabulary are streams over a part of the head, and nothing else.

Losses and gradients equal those of a head that has only these columns. Targets outside are left
out and counted out. Drafts are real ids of the subset, and the output does not depend on it.
(Gradients of the whole model: test_model_grad.py.)
"""

import numpy as np
import pytest

from minispec.config import TreeConfig
from minispec.data import NO_TARGET, Document, pad_batch
from minispec.draft_vocab import choose_draft_ids, column_logits, draft_index, head_columns
from minispec.generate import generate
from minispec.loss import head_loss
from minispec.model import Model, StreamStates
from minispec.pruning import exit_scores
from minispec.transformer import head_logits
from minispec.tree import Tree
from minispec.weights import load_model, read_tensors, save_model, write_tensors
from tiny import random_ids, stream_config, tiny_model

IDS = np.array([1, 2, 5, 11, 18], np.int32)


def subset(name="conditional", ids=IDS, arch="llama", seed=0, **changes):
    """A tiny model with a draft vocabulary."""
    streams = stream_config(name, draft_vocab=len(ids), **changes)
    whole = tiny_model(arch, streams.replace(draft_vocab=0), seed=seed)
    return Model(whole.config, whole.params, streams, draft_ids=ids)


# --- the choice ---------------------------------------------------------------------------------

def test_the_most_frequent_ids_of_completions_and_the_end():
    texts = [Document([9, 9, 9, 4, 5, 5], 3), Document([9, 7, 5, 4, 3], 2)]
    assert choose_draft_ids(texts, 3, (2,)).tolist() == [2, 4, 5]         # 9 and 7 are prompts
    assert choose_draft_ids(texts, 4, (2,)).tolist() == [2, 3, 4, 5]
    assert choose_draft_ids(texts, 50, (2,)).tolist() == [2, 3, 4, 5]     # no more are used
    assert choose_draft_ids(texts, 2, (8, 1)).tolist() == [1, 8]
    assert choose_draft_ids(texts, 3, (2,)).dtype == np.int32


@pytest.mark.parametrize("ids", [[], [3, 2], [3, 3], [-1, 2], [1, 19], [0, 1, 2, 3, 4, 5], [0.5],
                                 [[1, 2]]])
def test_ids_that_do_not_fit_are_refused(ids):
    with pytest.raises(ValueError, match="draft ids must be 1 to 5 ascending ids below 19"):
        subset(ids=IDS)
        draft_index(np.array(ids), stream_config(draft_vocab=5), 19)


def test_ids_and_settings_go_together():
    with pytest.raises(ValueError, match="draft_vocab is 5, but draft ids are missing"):
        draft_index(None, stream_config(draft_vocab=5), 19)
    for streams in (None, stream_config()):
        assert draft_index(None, streams, 19) is None
        with pytest.raises(ValueError, match="draft_vocab is 0, but draft ids are there"):
            draft_index(IDS, streams, 19)


# --- losses -------------------------------------------------------------------------------------

@pytest.mark.parametrize("form", ["tied", "untied", "bias", "projected"])
def test_loss_and_gradient_are_those_of_a_smaller_head(form):
    rng, n = np.random.default_rng(0), 9
    params = {"embed.tokens": rng.normal(size=(19, 6))}
    if form != "tied":
        params["head.w"] = rng.normal(size=(4 if form == "projected" else 6, 19))
    if form == "bias":
        params["head.b"] = rng.normal(size=19)
    if form == "projected":
        params["head.project.w"] = rng.normal(size=(6, 4))
    small = {name: a[:, IDS] if name == "head.w" else a[IDS] for name, a in params.items()
             if name != "head.project.w"}
    small.update({name: a for name, a in params.items() if name == "head.project.w"})
    x, weights, targets = rng.normal(size=(n, 6)), rng.random(n), rng.integers(0, len(IDS), n)
    grads, less = ({k: np.zeros_like(a) for k, a in p.items()} for p in (params, small))
    columns = head_columns(params, IDS)
    got = head_loss(params, grads, x, targets, weights, columns)
    for one, other in zip(got, head_loss(small, less, x, targets, weights)):
        assert np.abs(one.astype(float) - other).max() < 1e-14
    assert np.abs(column_logits(params, x, columns) - head_logits(params, x)[:, IDS]).max() < 1e-14
    for name, g in less.items():
        at = (slice(None), IDS) if name == "head.w" else IDS
        at = ... if name == "head.project.w" else at
        assert np.abs(grads[name][at] - g).max() < 1e-14
        grads[name][at] = 0
        assert not grads[name].any()                      # other columns get nothing


def test_targets_outside_are_no_targets_of_streams():
    index = draft_index(IDS, stream_config(draft_vocab=5), 19)
    text = Document([3, 4, 5, 6, 11, 1, 2], 2)
    batch, whole = pad_batch([text], 3, index), pad_batch([text], 3)
    assert np.array_equal(batch.targets[..., 0], whole.targets[..., 0])   # the main row knows all
    kept = np.where(np.isin(whole.targets, IDS), whole.targets, NO_TARGET)
    assert np.array_equal(batch.targets[..., 1:], kept[..., 1:])
    assert batch.counts.tolist() == [5, 3, 3, 2] and whole.counts.tolist() == [5, 4, 3, 2]


# --- drafting -----------------------------------------------------------------------------------

def test_guesses_are_the_best_ids_of_the_subset():
    model = subset(seed=2)
    states = np.random.default_rng(2).normal(size=(3, 16))
    logits = head_logits(model.params, states)[:, IDS]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    tokens, given = StreamStates(model, states).guesses(2)
    for g in range(3):
        best = np.argsort(-logits[g])[:2]
        assert tokens[g].tolist() == IDS[best].tolist()
        assert given[g] == pytest.approx(probs[g][best])
    assert np.isin(StreamStates(model, states).children(1, np.array([3, 4]), 9)[0], IDS).all()


@pytest.mark.parametrize("tree", [TreeConfig(), TreeConfig(conditional=False, shape="full"),
                                  TreeConfig(fused=True, prune_threshold=0.02)])
@pytest.mark.parametrize("name", ["conditional", "lossless", "sees"])
def test_the_output_does_not_depend_on_it(name, tree):
    for seed in range(4):
        model, prompt = subset(name, seed=seed), random_ids(np.random.default_rng(seed), 5)
        whole = Model(model.config, model.params, model.streams.replace(draft_vocab=0))
        expected = generate(whole, prompt, 20).ids if name != "sees" else None
        plain = generate(model, prompt, 20, tree=tree)
        out = generate(model, prompt, 20, drafter="streams", tree=tree)
        assert out.ids == plain.ids and expected in (None, out.ids)
        drafts = [t for s in out.steps if s.tree is not None for t in s.tree.token[1:].tolist()]
        assert drafts and set(drafts) <= set(IDS.tolist())


def test_the_whole_vocabulary_as_a_subset_changes_nothing():
    model = subset(ids=np.arange(19), seed=3)
    whole = Model(model.config, model.params, model.streams.replace(draft_vocab=0))
    prompt = random_ids(np.random.default_rng(3), 5)
    a, b = (generate(m, prompt, 20, drafter="streams") for m in (model, whole))
    assert a.ids == b.ids and a.stats == b.stats or a.stats.accepted == b.stats.accepted


def test_the_early_exit_judges_only_what_it_knows():
    model, h = subset(seed=4), np.random.default_rng(4).normal(size=(4, 16))
    tree = Tree([-1, 0, 0, 1], [7, 5, 6, 11])             # 6 is another drafter's
    scores = exit_scores(model.params, model.config, h, tree,
                         (model.draft_index, model.draft_columns))
    assert scores[0] == scores[2] == 1 and (scores[[1, 3]] < 1).all()
    whole = exit_scores(model.params, model.config, h, tree)
    assert (scores[[1, 3]] > whole[[1, 3]]).all()         # fewer ids share the probability


def test_columns_follow_the_parameters_after_unpack():
    model = subset(seed=5)
    before = model.draft_columns.head.copy()
    model.params["embed.tokens"] += 1.0
    assert np.array_equal(model.draft_columns.head, before)
    assert np.array_equal(model.unpack().draft_columns.head, before + 1.0)


# --- files --------------------------------------------------------------------------------------

def test_saved_and_loaded(tmp_path):
    model = subset(seed=6)
    save_model(tmp_path, model, "float64")
    again = load_model(tmp_path, dtype="float64")
    assert again.draft_ids.tolist() == IDS.tolist() and again.draft_ids.dtype == np.int32
    prompt = random_ids(np.random.default_rng(6), 5)
    assert (generate(again, prompt, 12, drafter="streams").stats.accepted
            == generate(model, prompt, 12, drafter="streams").stats.accepted)
    path = tmp_path / "model.safetensors"
    tensors = read_tensors(path)
    for value, words in ((None, "missing: draft.ids"), (IDS[::-1].copy(), "ascending")):
        broken = {n: a for n, a in tensors.items() if n != "draft.ids"}
        write_tensors(path, broken if value is None else {**broken, "draft.ids": value})
        with pytest.raises(ValueError, match=words) as caught:
            load_model(tmp_path)
        assert str(path) in str(caught.value)
