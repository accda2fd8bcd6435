"""Gradient checks by finite differences in float64, for one pair and for a whole model.

check_pair       every element of every float input of a forward/backward pair
check_direction  a whole model along unit directions, with differences that are extrapolated
Problem          a tiny hot model, a batch and its loss as a function of the parameters

"Hot" means parameters of std 0.4 and gains around 1: at the usual start (std 0.02) many wrong
gradients are too small to be seen. Both checks raise GradientError, so that the mutation test can
tell a found bug from a crash. Imports nothing that it checks except to build a Problem.
"""

from unittest import mock

import numpy as np

from minispec import objective
from minispec.config import ModelConfig, StreamConfig
from minispec.data import Document, pack_batch, pad_batch
from minispec.draft_vocab import head_columns
from minispec.model import Model
from minispec.parameters import init_params, trainable_names


class GradientError(AssertionError):
    """An analytic gradient that differs from the numeric one."""


def need(condition, text):
    if not condition:
        raise GradientError(text)


# --- one pair -----------------------------------------------------------------------------------

def check_pair(forward, backward, inputs, constants=(), eps=1e-5, seed=0):
    """Compare backward(dy, cache) with central differences of sum(y * dy), element by element.

    forward(*inputs) -> y, cache; backward -> gradients of the float inputs, in their order (one
    array, or a tuple). constants: indices of the inputs that the design takes as constants; their
    gradient must be None. Allowed per input: |a - n| <= 1e-7 + 1e-6 max|n|. Also demands that
    neither function writes into its arguments.
    -> the largest difference. Raises GradientError naming the worst element.
    """
    floats = [i for i, x in enumerate(inputs) if is_float(x)]
    before = [np.array(inputs[i]) for i in floats]
    y, cache = forward(*inputs)
    dy = np.random.default_rng(seed).normal(size=y.shape)
    given = dy.copy()
    grads = backward(given, cache)
    grads = grads if isinstance(grads, tuple) else (grads,)
    need(len(grads) == len(floats), f"{len(grads)} gradients for {len(floats)} float inputs")
    for i, old in zip(floats, before):
        need(np.array_equal(inputs[i], old), f"input {i} was written into")
    need(np.array_equal(given, dy), "dy was written into")
    worst = 0.0
    for i, grad in zip(floats, grads):
        need((grad is None) == (i in constants), f"input {i}: gradient is {grad}")
        if grad is not None:
            numeric = differences(lambda: (forward(*inputs)[0] * dy).sum(), inputs[i], eps)
            worst = max(worst, compare(f"input {i}", grad, numeric))
    return worst


def is_float(x):
    return isinstance(x, np.ndarray) and x.dtype == np.float64


def differences(f, x, eps):
    """df/dx for every element of x, by central differences; x is restored to the bit."""
    numeric = np.empty(x.shape)
    for at in np.ndindex(x.shape):
        old = x[at]
        x[at] = old + eps
        above = f()
        x[at] = old - eps
        numeric[at] = (above - f()) / (2 * eps)
        x[at] = old
    return numeric


def compare(name, grad, numeric):
    """Largest |analytic - numeric|, or GradientError with the worst element and both values."""
    need(grad.shape == numeric.shape,
         f"{name}: gradient has shape {grad.shape}, the input {numeric.shape}")
    if not numeric.size:
        return 0.0
    need(np.isfinite(grad).all(), f"{name}: gradient is not finite")
    off = abs(grad - numeric)
    allowed = 1e-7 + 1e-6 * abs(numeric).max()
    at = tuple(int(i) for i in np.unravel_index(off.argmax(), off.shape))
    need(off[at] <= allowed, f"{name}, worst at {at}: analytic {grad[at]:.10g}, "
         f"numeric {numeric[at]:.10g}, apart {off[at]:.2g}, allowed {allowed:.2g}")
    return float(off[at])


# --- a whole model ------------------------------------------------------------------------------

def derivative(f, step):
    """f'(0) from central differences at step and step/2, extrapolated to step 0 (Richardson).

    Plain central differences leave an error of step^2 f'''/6. Hot models bend so much that no step
    makes this and the rounding error small together; extrapolation leaves step^4.
    """
    wide, narrow = ((f(h) - f(-h)) / (2 * h) for h in (step, step / 2))
    return (4 * narrow - wide) / 3


def check_direction(loss, params, grads, directions, tolerance=1e-6, step=7e-4):
    """Compare sum(grads * direction) with the derivative of `loss()` along unit directions.

    loss() reads `params` {name: array}, which are moved and restored. directions: {label: {name:
    array}}. Relative to the derivative, or to 1e-4 of the whole gradient where that is larger:
    a key bias, say, may have no gradient at all.
    -> the largest relative difference. Raises GradientError naming the worst direction.
    """
    floor = 1e-4 * sum((g * g).sum() for g in grads.values()) ** 0.5
    worst, report = 0.0, ""
    for label, direction in directions.items():
        size = sum((d * d).sum() for d in direction.values()) ** 0.5
        old = {n: params[n].copy() for n in direction}

        def along(t):
            for n, d in direction.items():
                params[n][...] = old[n] + t / size * d
            return loss()

        numeric = derivative(along, step)
        for n in direction:
            params[n][...] = old[n]
        analytic = sum((grads[n] * d).sum() for n, d in direction.items()) / size
        relative = abs(analytic - numeric) / max(abs(numeric), abs(analytic), floor)
        if not relative <= worst:                         # also true for a NaN
            worst = relative
            report = f"along {label}: analytic {analytic:.12g}, numeric {numeric:.12g}"
    need(worst <= tolerance, f"{report}, relative {worst:.2g}, allowed {tolerance:.2g}")
    return worst


# --- a tiny model with its batch and loss -------------------------------------------------------

TINY = dict(vocab_size=23, width=12, layers=3, heads=4, kv_heads=2, head_dim=6, mlp_width=10,
            max_positions=14)
# lora_alpha / rank 3 = 1/2: at the usual scale of 4 and more a hot model bends too much to measure
STREAMS = dict(count=3, layers=2, transition_rank=5, prune_rank=2, lora_alpha=1.5)


def hot_params(config, streams, seed=0):
    """Parameters of std 0.4, gains around 1, float64."""
    rng = np.random.default_rng(seed)
    params = init_params(config, streams, dtype="float64")
    for name, value in params.items():
        value[...] = rng.normal(1.0 if name.endswith("gain") else 0.0, 0.4, value.shape)
    return params


def documents(vocab, seed=0, sizes=((9, 4), (7, 3), (12, 6), (5, 2), (3, 1))):
    """Random documents, (length, first completion token) each; the last is shorter than 3 streams
    can use. Few distinct tokens, so ids repeat."""
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(0, vocab, n).tolist(), start) for n, start in sizes]


class Problem:
    """A tiny model, a batch, the loss weights, and what training computes from them.

    model, streams: changes to TINY and STREAMS (streams=None: a plain transformer). layout:
    "padded" or "packed". detach: conditional streams send nothing into the streams.
    """

    def __init__(self, model=None, streams=(), layout="padded", detach=False, seed=0):
        self.config = ModelConfig(**{**TINY, **(model or {})})
        self.streams = None if streams is None else StreamConfig(**{**STREAMS, **dict(streams)})
        self.params = hot_params(self.config, self.streams, seed)
        drafts = self.streams.draft_vocab if self.streams else 0
        self.model = Model(self.config, self.params, self.streams,
                           draft_ids=np.arange(1, 1 + drafts) if drafts else None)
        index = self.model.draft_index
        self.names = trainable_names(self.params, self.streams)
        self.documents, count = documents(11, seed), self.streams.count if self.streams else 0
        a, b, c, d, e = self.documents
        self.batch = (pad_batch(self.documents, count, index) if layout == "padded"
                      else pack_batch([[a, b], [e, c], [d]], count, index))
        frozen = self.streams is not None and self.streams.mode == "lossless"
        self.weights = {"main": 0.0 if frozen else 1.0, "stream": 0.3, "next": 0.2,
                        "counts": self.batch.counts, "detach": detach}
        self.held = None

    def zeros(self):
        return {n: np.zeros_like(self.params[n]) for n in self.names}

    def gradients(self, batches=None, segments=1):
        """(grads, metrics) of the batch, or of some micro-batches that make it up."""
        grads, metrics = self.zeros(), objective.Metrics()
        for batch in batches or [self.batch]:
            metrics.merge(objective.Pass(self.model, batch, grads, self.weights, segments).run())
        return grads, metrics

    def total(self, metrics):
        """The loss that the gradients belong to, from its definition: every kind of loss averaged
        over its own targets, then weighted."""
        counts, total = self.batch.counts, 0.0
        for kind, loss in metrics.loss.items():
            name, _, number = kind.partition(" ")
            alpha = 1.0 if name == "exit" else self.weights[name]
            total += alpha * loss / max(counts[int(number or 0)], 1)
        return total

    def loss(self):
        """The total as a function of the parameters, forward only.

        What the design takes as a constant is recorded in the first call and replayed after that:
        in conditional streams the token embedding (and with `detach` the streams); in the early
        exit everything but its own map.
        """
        if self.held is None:
            self.held = {"transition": [], "exit": []}
            self.start = {n: a.copy() for n, a in self.params.items()}
        calls, transition, exit_loss = iter([]), objective.transition_forward, objective.exit_loss
        recording = not self.held["transition"]
        if not recording:
            calls = iter(self.held["transition"])

        def held_transition(n, before, *maps):
            if recording:
                self.held["transition"].append((n.copy(), before.copy()))
            else:
                n_start, before = next(calls)
                n = n_start if self.weights["detach"] else n
            return transition(n, before, *maps)

        def held_exit(params, config, grads, h, targets, weights, columns=None):
            if not self.held["exit"]:
                self.held["exit"].append(h.copy())
            params = {n: a if n.startswith("prune.") else self.start[n] for n, a in params.items()}
            if columns is not None:
                columns = head_columns(self.start, columns.ids)
            return exit_loss(params, config, {}, self.held["exit"][0], targets, weights,
                             columns)

        with mock.patch.object(objective, "transition_forward", held_transition), \
                mock.patch.object(objective, "exit_loss", held_exit), \
                mock.patch.object(objective, "top_backward", lambda *args: 0.0):
            run = objective.Pass(self.model, self.batch, {}, self.weights)
            return self.total(run.run())

    def directions(self, per_parameter=True, seed=1):
        """Three random directions over all parameters together, and one for each on its own."""
        rng = np.random.default_rng(seed)

        def random(n):
            return rng.normal(size=self.params[n].shape)

        alone = self.names if per_parameter else ()
        return {**{f"all, draw {i}": {n: random(n) for n in self.names} for i in range(3)},
                **{n: {n: random(n)} for n in alone}}

    def check(self, per_parameter=True):
        """check_direction of this problem, along `directions`."""
        self.loss()                                       # records what is held constant
        return check_direction(self.loss, self.params, self.gradients()[0],
                               self.directions(per_parameter))
