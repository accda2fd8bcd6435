"""The n-gram loss: every row's cross-entropy under the shared head, averaged stream by stream.

The main row at t is trained on token t+1, stream g on token t+1+g. The paper's loss is
alpha_0 * (main) + sum_g alpha_g * (stream g), each an average over that stream's own targets: the
last stream has fewer targets than the first, and must not be weakened for it. The averages are
taken over a whole optimiser step, so the loss is the same however the step is cut into
micro-batches: each trained row n simply carries the weight alpha_g / count_g.

The loss is the end of the graph, so its gradient is known as soon as the logits are: forward and
backward run together, chunk by chunk, and the (rows, V) array never exists as a whole.

Read first: layers.py (cross-entropy). Proven by: tests/test_loss.py, tests/test_model_grad.py.
"""

from dataclasses import dataclass, field

import numpy as np

from .backend import get_xp, to_host
from .layers import (cross_entropy_backward, cross_entropy_forward, linear_backward,
                     linear_forward)
from .transformer import add_head_gradient, head_matrix

CHUNK_CELLS = 1_000_000             # logits held at a time: 4 MB in float32, about one L2 cache
CHUNK_ROWS = 128                    # but no fewer rows: each chunk reads the whole head twice


def head_loss(params, grads, x, targets, weights, columns=None):
    """Cross-entropy of rows under the head, and its gradient, in one go.

    x (n, C) normed rows, targets (n,) int, weights (n,): the total loss is sum_n weights * loss.
    -> loss (n,) unweighted, in nats; correct (n,) bool, is the target the largest logit;
    dx (n, C). The head's gradient is added to `grads` unless the head is frozen.
    columns: draft_vocab.Columns, the part of the head that counts; targets are places in it.
    """
    xp = get_xp(x, targets, weights)
    project = params.get("head.project.w")
    if project is not None:
        x, c_project = linear_forward(x, project)         # (n, E)
    head, bias, ids = head_matrix(params), params.get("head.b"), None     # (C or E, V), (V,)
    if columns is not None:
        head, bias, ids = columns.head, columns.bias, columns.ids         # (C or E, n), (n,)
    trained = ("head.w" if "head.w" in params else "embed.tokens") in grads
    losses, hits, dxs = [], [], []
    step = max(CHUNK_ROWS, CHUNK_CELLS // head.shape[1])
    for at in range(0, len(x), step):
        rows, wanted = x[at:at + step], targets[at:at + step]     # (chunk, C), (chunk,)
        logits = rows @ head                              # (chunk, V)
        if bias is not None:
            logits += bias
        loss, cache = cross_entropy_forward(logits, wanted)       # (chunk,)
        hits.append(logits.argmax(axis=-1) == wanted)     # (chunk,)
        dlogits = cross_entropy_backward(weights[at:at + step], cache)    # (chunk, V)
        # forward: logits = rows @ head + bias
        if "head.b" in grads:
            grads["head.b"][... if ids is None else ids] += dlogits.sum(axis=0)
        dxs.append(dlogits @ head.T)                      # (chunk, C)
        if trained:
            add_head_gradient(params, grads, rows.T @ dlogits, ids)
        losses.append(loss)
    dx = xp.concatenate(dxs)                              # (n, C or E)
    # forward: x = x @ project
    if project is not None:
        projected = "head.project.w" in grads
        dx, dw, _ = linear_backward(dx, c_project, projected, False)      # (n, C), (C, E)
        if projected:
            grads["head.project.w"] += dw
    return xp.concatenate(losses), xp.concatenate(hits), dx


@dataclass
class Metrics:
    """Sums over trained targets, per kind of loss: "main", "stream 1", ..., "next 1", ..., "exit".

    "stream g" is the paper's stream g, "next g" the same stream told the token before its target
    (conditional), "exit" the early-exit map of pruning.
    """

    loss: dict = field(default_factory=dict)              # nats
    hits: dict = field(default_factory=dict)              # targets that had the largest logit
    count: dict = field(default_factory=dict)             # targets

    def add(self, kind, loss, hits, count):
        for sums, value in ((self.loss, loss), (self.hits, hits), (self.count, count)):
            sums[kind] = sums.get(kind, 0) + value

    def add_rows(self, kinds, group, loss, hits):
        """Sort rows by `group` (n,) host ints into `kinds`; loss and hits (n,) of any library."""
        loss = np.bincount(group, to_host(loss), len(kinds))      # (kinds,)
        hits = np.bincount(group, to_host(hits), len(kinds))      # (kinds,)
        count = np.bincount(group, minlength=len(kinds))  # (kinds,)
        for i, kind in enumerate(kinds):
            self.add(kind, float(loss[i]), int(hits[i]), int(count[i]))

    def merge(self, other):
        for kind in other.count:
            self.add(kind, other.loss[kind], other.hits[kind], other.count[kind])

    def mean_loss(self, kind):
        """Nats per target, or None without targets."""
        return self.loss[kind] / self.count[kind] if self.count.get(kind) else None

    def accuracy(self, kind):
        """Share of targets that had the largest logit, or None without targets."""
        return self.hits[kind] / self.count[kind] if self.count.get(kind) else None
