"""AdamW equals a plain loop over single numbers; clipping, the schedule, and what decays.

The reference below works on Python floats, one number at a time, and shares nothing with optim.py.
"""

import math

import numpy as np
import pytest
from tiny_models import CONFIG, LAYERNORM, STREAMS

from minispec.config import TrainConfig
from minispec.optim import AdamW, clip, gradient_norm, learning_rate
from minispec.parameters import init_params

TRAIN = TrainConfig(steps=50, lr=0.01, min_lr=0.001, warmup=5, weight_decay=0.1, beta1=0.9,
                    beta2=0.98)


def reference(value, gradients, rates, train, decays):
    """Loshchilov and Hutter 2019, algorithm 2, for one number."""
    mean = square = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates), 1):
        mean = train.beta1 * mean + (1 - train.beta1) * g
        square = train.beta2 * square + (1 - train.beta2) * g * g
        mean_hat = mean / (1 - train.beta1 ** t)
        square_hat = square / (1 - train.beta2 ** t)
        step = mean_hat / (math.sqrt(square_hat) + 1e-8)
        value = value - lr * step - (lr * train.weight_decay * value if decays else 0.0)
    return value


def test_adamw_equals_a_loop_over_single_numbers():
    rng = np.random.default_rng(0)
    shapes = {"m.w": (3, 2), "m.b": (2,), "norm.gain": (4,), "streams.embed": (2, 3),
              "embed.tokens": (4, 2), "transitions.out": (2, 2, 3), "q.lora_a": (3, 1)}
    params = {n: rng.standard_normal(s) for n, s in shapes.items()}
    before = {n: p.copy() for n, p in params.items()}
    # gradients of very different size, with exact zeros, so that eps and zero moments count
    grads = [{n: rng.standard_normal(s) * 10.0 ** rng.integers(-9, 3, s) * (rng.random(s) < 0.8)
              for n, s in shapes.items()} for _ in range(12)]
    rates = [learning_rate(i, TRAIN) for i in range(12)]
    optimizer = AdamW(list(shapes), params, TRAIN)
    for g, lr in zip(grads, rates):
        optimizer.step(params, g, lr)
    assert optimizer.updates == 12
    for name, shape in shapes.items():
        decays = name in ("m.w", "embed.tokens", "transitions.out", "q.lora_a")
        for at in np.ndindex(*shape):
            want = reference(before[name][at], [g[name][at] for g in grads], rates, TRAIN, decays)
            assert params[name][at] == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("changes", [{}, LAYERNORM])
def test_only_matrices_decay(changes):
    """Without a gradient decay alone moves a parameter; gains, biases, stream embeddings stay."""
    params = init_params(CONFIG.replace(**changes), STREAMS.replace(lora_rank=2), dtype="float64")
    before = {n: p.copy() for n, p in params.items()}
    optimizer = AdamW(list(params), params, TRAIN)
    optimizer.step(params, {n: np.zeros_like(p) for n, p in params.items()}, 0.5)
    for name, value in params.items():
        still = name.endswith((".gain", ".bias", ".b")) or name == "streams.embed"
        factor = 1.0 if still else 1 - 0.5 * 0.1
        np.testing.assert_allclose(value, before[name] * factor, rtol=1e-12)


def test_a_frozen_parameter_has_no_moments_and_stays():
    params = {"a.w": np.ones((2, 2)), "b.w": np.ones((2, 2))}
    optimizer = AdamW(["a.w"], params, TRAIN)
    optimizer.step(params, {"a.w": np.ones((2, 2))}, 0.1)
    assert set(optimizer.state()) == {"mean.a.w", "square.a.w"}
    assert (params["b.w"] == 1).all() and (params["a.w"] < 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_and_parameters_keep_their_dtype(dtype):
    params = {"a.w": np.ones((3, 3), dtype), "a.b": np.ones(3, dtype)}
    array = params["a.w"]
    optimizer = AdamW(list(params), params, TRAIN)
    for _ in range(2):
        optimizer.step(params, {n: np.full_like(p, 0.5) for n, p in params.items()},
                       learning_rate(0, TRAIN))
    assert params["a.w"] is array                         # updated in place
    for value in (*params.values(), *optimizer.state().values()):
        assert value.dtype == dtype


# --- clipping -----------------------------------------------------------------------------------

def test_one_factor_for_all_gradients():
    grads = {"a": np.array([3.0, 0.0]), "b": np.array([[4.0]])}
    assert gradient_norm(grads) == 5.0
    assert clip(grads, 10.0) == 5.0 and grads["b"].tolist() == [[4.0]]    # short enough: untouched
    assert clip(grads, 2.5) == 5.0
    assert grads["a"].tolist() == [1.5, 0.0] and grads["b"].tolist() == [[2.0]]
    assert gradient_norm(grads) == pytest.approx(2.5)


def test_clipping_a_zero_gradient():
    grads = {"a": np.zeros(3)}
    assert clip(grads, 1.0) == 0.0 and grads["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_norm_shows_what_is_not_finite(bad):
    assert not math.isfinite(gradient_norm({"a": np.ones(2), "b": np.array([1.0, bad])}))


# --- schedule -----------------------------------------------------------------------------------

def test_the_ends_of_the_schedule():
    rates = [learning_rate(i, TRAIN) for i in range(50)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])     # never 0
    assert rates[5] == pytest.approx(0.01)                # the cosine starts at the top
    assert rates[27] == pytest.approx(0.0055, rel=0.05)   # halfway down
    assert all(a > b for a, b in zip(rates[5:], rates[6:]))
    assert rates[-1] == pytest.approx(0.001, rel=0.02) and rates[-1] >= 0.001
    assert learning_rate(50, TRAIN) == learning_rate(99, TRAIN) == 0.001


def test_a_schedule_without_warmup_or_longer_than_the_run():
    assert learning_rate(0, TRAIN.replace(warmup=0)) == pytest.approx(0.01)
    assert learning_rate(0, TRAIN.replace(steps=1, warmup=0)) == pytest.approx(0.01)
    late = TRAIN.replace(steps=3, warmup=10)
    assert [learning_rate(i, late) for i in range(3)] == pytest.approx([0.001, 0.002, 0.003])
