"""Verification: which drafted nodes the target model accepts, and what is emitted.

One pass of the target over the tree gives its own choice of the next token at every node. Accepted
are the nodes on one walk from the root, whose path is what plain decoding would have produced.

Read first: tree.py. Read next: generate.py (who calls this), sampling.py (how a choice is made).
Paper: Speculative Streaming sec. 3.1.5, appendix A.1; `walk` says why we replace its rule.
Proven by: tests/test_verify.py here, tests/test_lossless.py with the model.
"""

from typing import NamedTuple

import numpy as np

from .backend import get_xp, to_host


class Verdict(NamedTuple):
    """path: accepted nodes, the root first.   emitted: their tokens after the root, then one more.

    So len(emitted) == len(path), and the last emitted token (the bonus) is the next root.
    """

    path: list
    emitted: list


def walk(tree, choices):
    """Sample and match: follow the target's own choices through the tree.   -> Verdict

    choices (N,) int on the host: the target's choice of the token after each node.
    Exact, for any tree by any drafter, greedy or sampled: each emitted token IS the target's choice
    given all tokens before it, made with the coin that plain decoding uses at that position. The
    tree only decides how many choices one pass yields. There is one choice per node, shared by the
    paths through it; a draw per path would favour tokens with many drafted continuations.
    The paper's rule, accept with probability target / stream, is right only for tokens that were
    drawn from the stream. A stream's top-k tokens are not drawn: there it changes the distribution.
    """
    choices = checked(choices, len(tree), "choices").tolist()
    path = [0]
    while True:
        child = tree.find_child(path[-1], choices[path[-1]])
        if child is None:
            return Verdict(path, [choices[n] for n in path])
        path.append(child)


def typical_walk(tree, child_prob, entropy, choices, epsilon=0.09, delta=0.3):
    """LOSSY: Medusa's typical acceptance. The text differs from plain decoding.   -> Verdict

    child_prob (N,): the target's probability of each node's token at its parent (root ignored);
    entropy (N,) in nats: of the target's distribution at each node; both from `typical_inputs`.
    A child is accepted if child_prob > min(epsilon, delta * exp(-entropy at its parent)): a token
    need not be the chosen one, only not too rare. The longest accepted path wins, then the most
    probable one; after its end the target's own choice is emitted.   Cai et al. 2024, sec. 2.3.1.
    """
    child_prob = checked(child_prob, len(tree), "child_prob").tolist()
    entropy = checked(entropy, len(tree), "entropy")              # (N,)
    choices = checked(choices, len(tree), "choices")              # (N,)
    if not (0 <= epsilon <= 1 and 0 <= delta <= 1):
        raise ValueError(f"epsilon is {epsilon} and delta {delta}, expected 0..1")
    limit = np.minimum(epsilon, delta * np.exp(-entropy)).tolist()
    likelihood = {0: 1.0}                 # of the path to each accepted node
    for n, parent in enumerate(tree.parent.tolist()):
        if parent in likelihood and child_prob[n] > limit[parent]:
            likelihood[n] = likelihood[parent] * child_prob[n]
    end = max(likelihood, key=lambda n: (tree.depth[n], likelihood[n]))
    path = tree.path(end)
    return Verdict(path, tree.token[path[1:]].tolist() + [int(choices[end])])


def typical_inputs(tree, probs):
    """What `typical_walk` needs of the target's distributions.

    probs (N, V), row n the distribution after node n, on host or device -> child_prob (N,) with 1
    for the root, entropy (N,) in nats, both on the host: two numbers per node cross over, not V.
    """
    xp = get_xp(probs)
    parent = xp.asarray(np.maximum(tree.parent, 0))               # (N,)
    child_prob = to_host(probs[parent, xp.asarray(tree.token)]).copy()        # (N,)
    child_prob[0] = 1
    logs = xp.log(xp.where(probs > 0, probs, 1))                  # (N, V)  0 log 0 counts as 0
    return child_prob, to_host(-(probs * logs).sum(axis=-1))      # (N,), (N,)


def checked(values, count, name):
    """values as a host array (count,)."""
    values = np.asarray(values)                                   # (N,)
    if values.shape != (count,):
        raise ValueError(f"{name} has shape {values.shape}, expected one per tree node: ({count},)")
    return values
