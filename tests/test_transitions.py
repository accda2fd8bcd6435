"""Claim: a conditional stream is the paper's stream plus what the token before it says.

At the start it is the paper's stream to the bit. It is trained with the token that stands right
before its target (teacher forcing), and drafting computes what training computed. The token
embedding is a constant to it. (Its gradient: test_ops_grad.py, test_model_grad.py.)
"""

import numpy as np
import pytest

from gradcheck import Problem
from minispec import masks
from minispec.model import StreamStates
from minispec.parameters import init_params
from minispec.transformer import head_matrix
from minispec.transitions import conditional_states, transition_forward

MAPS = ("transitions.state", "transitions.token", "transitions.out")


def silu(x):
    return x / (1 + np.exp(-x))


def stream_states(problem, ids):
    """Normed stream states (T, G, C) beside every row of a text."""
    model = problem.model
    return model.run(model.new_cache(), ids, masks.causal(len(ids)), bundles=len(ids)).streams


# --- the map ------------------------------------------------------------------------------------

def test_the_map_is_that_of_its_docstring():
    problem = Problem()
    state, token, out = (problem.params[n][1] for n in MAPS)
    n, before = np.random.default_rng(0).normal(size=(2, 12))
    z, _ = transition_forward(n[None], before[None], state, token, out)
    expected = [n[c] + sum(silu(n @ state[:, r] + before @ token[:, r]) * out[r, c]
                           for r in range(5)) for c in range(12)]
    assert z[0] == pytest.approx(expected, rel=1e-12)


def test_drafting_computes_what_training_computes():
    """conditional_states of one state and many tokens equals transition_forward row by row."""
    problem, tokens = Problem(), np.array([4, 0, 22, 4])
    states = stream_states(problem, np.arange(6))[-1]
    for g in range(3):
        z = conditional_states(problem.params, states[g], g, tokens)
        maps = [problem.params[n][g] for n in MAPS]
        for row, token in zip(z, tokens):
            before = problem.params["embed.tokens"][token][None]
            one, _ = transition_forward(states[g][None], before, *maps)
            assert np.abs(row - one[0]).max() < 1e-13
        assert np.array_equal(z[0], z[3]) and np.abs(z[0] - z[1]).max() > 0.01


def test_each_stream_has_a_map_of_its_own():
    problem = Problem()
    state, tokens = stream_states(problem, np.arange(6))[-1, 0], np.array([4])
    z = [conditional_states(problem.params, state, g, tokens) for g in range(3)]
    assert min(np.abs(z[a] - z[b]).max() for a, b in ((0, 1), (0, 2), (1, 2))) > 0.01


# --- the start ----------------------------------------------------------------------------------

def test_at_the_start_it_is_the_papers_stream():
    """To the bit: the last matrix is zero. The other two are not, or nothing could ever train."""
    problem = Problem()
    params = init_params(problem.config, problem.streams, seed=3, dtype="float64")
    for name, value in params.items():
        problem.params[name][...] = value                 # the model reads these arrays
    assert params["transitions.state"].any() and params["transitions.token"].any()
    states = stream_states(problem, np.array([5, 3, 1]))[-1]
    for g in range(3):
        z = conditional_states(params, states[g], g, np.arange(23))
        assert np.array_equal(z, np.repeat(states[g][None], 23, axis=0))
    drafter = StreamStates(problem.model, states)
    tokens, probs = drafter.guesses(4)
    for depth in (1, 2, 3):
        told, told_probs = drafter.children(depth, np.array([7, 8]), 4)
        assert (told == tokens[depth - 1]).all()
        assert np.abs(told_probs - probs[depth - 1]).max() < 1e-12


def test_at_the_start_training_sees_the_same_loss():
    problem = Problem()
    problem.params["transitions.out"][...] = 0.0
    _, metrics = problem.gradients()
    for g in (1, 2, 3):
        assert metrics.loss[f"next {g}"] == pytest.approx(metrics.loss[f"stream {g}"], rel=1e-14)
        assert metrics.hits[f"next {g}"] == metrics.hits[f"stream {g}"]


# --- teacher forcing ----------------------------------------------------------------------------

def summed_losses(problem, offset):
    """Loss of each conditional stream over all texts, told the token `offset` places before its
    target; one text at a time, through the pass that decoding uses."""
    sums = [0.0, 0.0, 0.0]
    for document in problem.documents:
        ids = np.array(document.ids)
        states = stream_states(problem, ids[:-1])
        for t in range(document.start - 1, len(ids) - 1):
            for g in range(1, 4):
                if t + 1 + g < len(ids):
                    told = ids[t + 1 + g - offset:][:1]
                    z = conditional_states(problem.params, states[t, g - 1], g - 1, told)[0]
                    logits = z @ head_matrix(problem.params)
                    sums[g - 1] += np.log(np.exp(logits).sum()) - logits[ids[t + 1 + g]]
    return sums


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_stream_is_told_the_token_right_before_its_target(layout, tied):
    problem = Problem(layout=layout, model=dict(tied=tied))
    _, metrics = problem.gradients()
    trained = [metrics.loss[f"next {g}"] for g in (1, 2, 3)]
    assert trained == pytest.approx(summed_losses(problem, 1), rel=1e-10)
    for wrong in (0, 2):                                  # the control: its target, or one earlier
        for a, b in zip(trained, summed_losses(problem, wrong)):
            assert abs(a - b) > 1e-3


@pytest.mark.parametrize("segments", [1, 3])
def test_the_told_token_may_lie_outside_the_segment(segments):
    problem = Problem()
    _, metrics = problem.gradients(segments=segments)
    assert [metrics.loss[f"next {g}"] for g in (1, 2, 3)] == pytest.approx(
        summed_losses(problem, 1), rel=1e-10)


# --- constants ----------------------------------------------------------------------------------

def test_the_embedding_is_a_constant_and_detached_streams_feel_nothing():
    """Only this loss, a head of its own, detach: maps and head train, and nothing else."""
    problem = Problem(model=dict(tied=False), streams=dict(prune_rank=0), detach=True)
    problem.weights.update(main=0.0, stream=0.0)
    grads, _ = problem.gradients()
    moved = {n for n, g in grads.items() if g.any()}
    assert moved == {*MAPS, "head.w"}
    problem.weights["detach"] = False                     # the control: now the streams feel it
    grads, _ = problem.gradients()
    assert grads["streams.embed"].any() and grads["blocks.0.attn.q.w"].any()
