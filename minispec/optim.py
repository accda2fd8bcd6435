"""AdamW, gradient clipping, warm-up and cosine decay.

Read first: parameters.py. Proven by: tests/test_optim.py.
"""

import math

from .backend import get_xp

ADAM_EPS = 1e-8


def learning_rate(step, train):
    """Learning rate of optimiser step `step` (0, 1, ...): linear warm-up, then a cosine down to
    min_lr at the last step."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def gradient_norm(grads):
    """Euclidean norm over all gradients together, a Python float (one synchronisation)."""
    total = sum((g * g).sum() for g in grads.values())
    return float(total) ** 0.5


def clip(grads, limit):
    """Scale all gradients by one factor so that their norm is at most `limit` -> norm before."""
    norm = gradient_norm(grads)
    if norm > limit:
        for g in grads.values():
            g *= limit / norm
    return norm


class AdamW:
    """Loshchilov and Hutter 2019. One pair of moments per parameter; decay on matrices only.

    Small arrays (norm gains, biases, stream embeddings) are not pulled towards zero.
    """

    def __init__(self, names, params, train):
        self.train, self.updates = train, 0
        self.mean = {n: get_xp(params[n]).zeros_like(params[n]) for n in names}
        self.square = {n: get_xp(params[n]).zeros_like(params[n]) for n in names}

    def step(self, params, grads, lr):
        """Update `params` in place from `grads`, both {name: array}."""
        self.updates += 1
        beta1, beta2 = self.train.beta1, self.train.beta2
        rate = lr * (1 - beta2 ** self.updates) ** 0.5 / (1 - beta1 ** self.updates)
        eps = ADAM_EPS * (1 - beta2 ** self.updates) ** 0.5       # so that eps adds to corrected
        for name, mean in self.mean.items():
            grad, square, value = grads[name], self.square[name], params[name]
            mean *= beta1
            mean += (1 - beta1) * grad
            square *= beta2
            square += (1 - beta2) * grad * grad
            if value.ndim > 1 and name != "streams.embed":
                value *= 1 - lr * self.train.weight_decay
            value -= rate * mean / (square ** 0.5 + eps)

    def state(self):
        """{name: array} of all that a resumed run needs, but for the step count."""
        moments = {f"mean.{n}": a for n, a in self.mean.items()}
        moments.update({f"square.{n}": a for n, a in self.square.items()})
        return moments
