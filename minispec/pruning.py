"""Parallel tree pruning: drop unlikely branches before the top layers see them (paper sec. 3.1.4).

At layer L-A every node n of the draft tree has a hidden state h[n]. A low-rank map o turns it into
an early guess of the next token: early = softmax(head(norm(o(h[n])))). A child c of n survives if
early[token of c] is large enough. Whatever hangs below a dropped node goes with it; the root
always stays. Pruning only decides which guesses are checked, so it never changes the output.

The map is trained on next-token cross-entropy. Neither the model below nor the head above feels
its gradient: pruning must not disturb what it prunes.

Read first: tree.py, loss.py. Proven by: tests/test_pruning.py, tests/test_ops_grad.py.
"""

import numpy as np

from .backend import to_device, to_host
from .draft_vocab import column_logits
from .layers import linear_backward, linear_forward, softmax
from .loss import head_loss
from .transformer import head_logits, norm_backward, norm_forward


def exit_forward(params, config, h):
    """norm(o(h)) with o(h) = h down up.   h (..., C) -> (..., C).   cache: of the three steps."""
    low, c1 = linear_forward(h, params["prune.down"])     # (..., 8)
    o, c2 = linear_forward(low, params["prune.up"])       # (..., C)
    y, c3 = norm_forward(params, config, "norm", o)       # (..., C)
    return y, (c1, c2, c3)


def exit_backward(dy, cache, config, grads):
    """dy (..., C) -> dh (..., C); gradients of the map are added to `grads`. The final norm is
    borrowed from the model and gets none."""
    c1, c2, c3 = cache
    # forward: y = norm(o)
    do = norm_backward(dy, c3, config, {}, "norm")        # (..., C)
    # forward: o = low @ up;  low = h @ down
    dlow, dup, _ = linear_backward(do, c2, need_db=False) # (..., 8)
    dh, ddown, _ = linear_backward(dlow, c1, need_db=False)       # (..., C)
    if "prune.up" in grads:
        grads["prune.up"] += dup
        grads["prune.down"] += ddown
    return dh


def exit_loss(params, config, grads, h, targets, weights, columns=None):
    """Next-token loss of the early exit; only the map o is trained.

    h (n, C) states at layer L-A (taken as constants), targets and weights (n,)
    -> loss (n,), correct (n,). columns: of head_loss.
    """
    y, cache = exit_forward(params, config, h)            # (n, C)
    loss, hits, dy = head_loss(params, {}, y, targets, weights, columns)
    exit_backward(dy, cache, config, grads)
    return loss, hits


def exit_scores(params, config, h, tree, draft=None):
    """Early-exit probability of every node's token at its parent; 1 for the root.

    h (N, C) of the tree's nodes -> (N,) float64 on the host.
    draft: (index (V,), draft_vocab.Columns) of a draft vocabulary. The map was trained over it, so
    it judges the ids in it; others (another drafter's) stay: 1.
    """
    parents = np.unique(tree.parent[1:])                  # (M,)  leaves need no early exit
    scores = np.ones(len(tree))                           # (N,)
    if len(parents) == 0:
        return scores
    y, _ = exit_forward(params, config, h[to_device(parents, h)])         # (M, C)
    row, column = np.searchsorted(parents, tree.parent[1:]), tree.token[1:]       # (N-1,)
    if draft is None:
        early = softmax(head_logits(params, y))           # (M, V)
    else:
        early, column = softmax(column_logits(params, y, draft[1])), draft[0][column]     # (M, n)
    picked = to_host(early[to_device(row, h), to_device(column, h)])      # (N-1,)
    scores[1:] = np.where(column < 0, 1.0, picked)
    return scores


def survivors(tree, scores, threshold=0.0, budget=0):
    """Indices of the nodes that stay, ascending; always the root, always with all ancestors.

    tree: the draft tree; scores (N,): transition probability parent -> node.
    threshold: nodes below it go, with their subtrees (the paper's rule).
    budget: of the rest, the `budget` drafted nodes with the largest product of scores along
    their path stay (0: no limit). Products shrink along a path, so the choice is closed.
    """
    alive = np.ones(len(tree), dtype=bool)                # (N,)
    along = np.ones(len(tree))                            # (N,)  product from the root
    for n in range(1, len(tree)):                         # parents come before children
        alive[n] = alive[tree.parent[n]] and scores[n] >= threshold
        along[n] = along[tree.parent[n]] * scores[n]
    if budget and alive.sum() - 1 > budget:
        # stable: among equals the earlier node stays, and a parent is earlier than its child
        order = np.argsort(np.where(alive, -along, np.inf), kind="stable")        # (N,)
        alive[:] = False
        alive[order[:budget + 1]] = True
        alive[0] = True
    return np.flatnonzero(alive)                          # (kept,)
