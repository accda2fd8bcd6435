"""The draft tree as data: two arrays, and all that follows from them.

A draft is a tree of tokens. Its root is already decided; every other node is a guess for the token
that follows its parent. As data a tree is two arrays, `parent` and `token`, root first and parents
before children. Depth, ancestors (hence the attention mask), positions and paths all follow from
them. Everything here is host code: NumPy int32 and Python ints, no model.

A node's `score` is the drafter's probability of the whole path from the root to it, so scores never
grow along a path. That is why the best nodes under a budget always form a tree.

Read first: nothing. Read next: growing.py (how a tree is made), verify.py (which nodes are
accepted), masks.py (`tree_context`). Paper: Speculative Streaming (PMLR v262, 2024) sec. 3.1.3.
Proven by: tests/test_tree.py.
"""

from functools import cached_property

import numpy as np


class Tree:
    """A draft tree of N nodes, root included. Treat it as frozen: its arrays are read-only.

    parent (N,) int32, -1 for the root and parent[n] < n; token (N,) int32, different among
    siblings; score (N,) float64 or None, 1 for the root and never above the parent's.
    Raises: ValueError if the arrays do not describe such a tree.
    """

    def __init__(self, parent, token, score=None):
        self.parent = whole(parent, "parent")                     # (N,)
        self.token = whole(token, "token")                        # (N,)
        self.score = None if score is None else np.array(score, dtype=np.float64)     # (N,)
        self._check()
        for array in (self.parent, self.token, *([] if score is None else [self.score])):
            frozen(array)

    def _check(self):
        parent, token = self.parent, self.token
        needs(len(parent) and parent.shape == token.shape, f"parent has shape {parent.shape} and "
              f"token {token.shape}, expected two equal lengths of 1 or more")
        needs(parent[0] == -1, f"parent[0] is {parent[0]}, expected -1: the root comes first")
        odd = (parent < 0) | (parent >= np.arange(len(parent)))   # (N,)
        for n in np.flatnonzero(odd[1:]) + 1:
            raise ValueError(f"parent[{n}] is {parent[n]}, expected 0..{n - 1}: parents come "
                             "before their children")
        for n in np.flatnonzero(token < 0):
            raise ValueError(f"token[{n}] is {token[n]}, expected 0 or more")
        if len(self._child) < len(parent) - 1:                    # two siblings shared a key
            twice = set(range(1, len(parent))) - set(self._child.values())
            raise ValueError(f"node {min(twice)} has the same parent and token as another node, "
                             "expected siblings with different tokens")
        if self.score is None:
            return
        score = self.score
        needs(score.shape == parent.shape and score[0] == 1, f"score has shape {score.shape} and "
              f"starts with {score[:1]}, expected shape {parent.shape} and 1 for the root")
        good = (score >= 0) & (score <= score[parent])            # (N,)  False for NaN
        for n in np.flatnonzero(~good[1:]) + 1:
            raise ValueError(f"score[{n}] is {score[n]}, expected 0..{score[parent[n]]}: a path "
                             "is never more probable than its first part")

    def __len__(self):
        return len(self.parent)

    def __repr__(self):
        return f"Tree({len(self)} nodes, depth {self.max_depth})"

    # --- what follows from parent and token ------------------------------------------------------

    @cached_property
    def _child(self):
        """{(parent, token): node}: the step of the verification walk, without a search."""
        pairs = zip(self.parent[1:].tolist(), self.token[1:].tolist())
        return {pair: n for n, pair in enumerate(pairs, start=1)}

    @cached_property
    def _children(self):
        lists = [[] for _ in range(len(self))]
        for n, m in enumerate(self.parent[1:].tolist(), start=1):
            lists[m].append(n)
        return lists

    @cached_property
    def depth(self):
        """(N,) int32: edges between the root and each node."""
        depth = [0] * len(self)
        for n, m in enumerate(self.parent[1:].tolist(), start=1):
            depth[n] = depth[m] + 1
        return frozen(np.array(depth, dtype=np.int32))            # (N,)

    @cached_property
    def max_depth(self):
        return int(self.depth.max())

    @cached_property
    def ancestors(self):
        """(N, N) bool: row n is True at n itself and at every ancestor of n, never at a sibling."""
        seen = np.eye(len(self), dtype=bool)                      # (N, N)
        for n, m in enumerate(self.parent[1:].tolist(), start=1):
            seen[n] |= seen[m]            # the parent's row is complete: parents come first
        return frozen(seen)

    def positions(self, first):
        """(N,) int32 position ids: the root at `first`, all nodes of depth d at first + d."""
        return self.depth + np.int32(first)                       # (N,)

    def children(self, n):
        """Children of node n, in node order."""
        return list(self._children[n])

    def find_child(self, n, token):
        """The child of node n that carries this token, or None."""
        return self._child.get((n, token))

    def path(self, n):
        """Nodes from the root to n."""
        nodes = [int(n)]
        while nodes[-1]:
            nodes.append(int(self.parent[nodes[-1]]))
        return nodes[::-1]

    def paths(self):
        """The path to every leaf, leaves in node order."""
        return [self.path(n) for n, below in enumerate(self._children) if not below]

    # --- smaller trees ---------------------------------------------------------------------------

    def close(self, keep):
        """`keep` without the nodes that lost an ancestor.   keep (N,) bool -> (N,) bool."""
        keep = as_mask(keep, len(self))                           # (N,)
        return ~(self.ancestors & ~keep).any(axis=1)              # (N,)

    def take(self, keep):
        """The tree of the kept nodes, renumbered in their old order.

        keep (N,) bool, or the node numbers in any order. Raises: ValueError if the root or the
        parent of a kept node is missing; `close` the mask first.
        """
        keep = as_mask(keep, len(self))                           # (N,)
        lost = keep & ~keep[self.parent]                          # (N,)
        if not keep[0] or lost[1:].any():
            why = f"the parent of node {1 + lost[1:].argmax()}" if keep[0] else "the root"
            raise ValueError(f"cannot take these nodes: {why} is not among them")
        number = np.cumsum(keep) - 1                              # (N,)  new number of each node
        parent = number[self.parent[keep]]                        # (kept,)
        parent[0] = -1
        return Tree(parent, self.token[keep], None if self.score is None else self.score[keep])

    def cut(self, max_depth):
        """Without the nodes that lie deeper than max_depth."""
        needs(max_depth >= 0, f"max_depth is {max_depth}, expected 0 or more")
        return self if self.max_depth <= max_depth else self.take(self.depth <= max_depth)

    def truncate(self, max_nodes):
        """The root and the best max_nodes - 1 others: by score, else (and for ties) by number."""
        needs(max_nodes >= 1, f"max_nodes is {max_nodes}, expected 1 or more (the root counts)")
        if len(self) <= max_nodes:
            return self
        score = np.zeros(len(self)) if self.score is None else self.score     # (N,)
        return self.take(best_numbers(score, max_nodes))

    def render(self, text_of=str, path=()):
        """The tree as lines of text. `text_of(id)` names a token; nodes on `path` get a tick."""
        def label(n):
            score = f" {self.score[n]:.2f}" if self.score is not None and n else ""
            return text_of(int(self.token[n])) + score + (" ✓" if n in path else "")

        def below(n, lead):
            for m in self._children[n]:
                last = m == self._children[n][-1]
                yield lead + ("└─ " if last else "├─ ") + label(m)
                yield from below(m, lead + ("   " if last else "│  "))

        return "\n".join([label(0), *below(0, "")])


# --- small helpers -------------------------------------------------------------------------------

def best_numbers(score, count):
    """The `count` nodes with the largest scores, ties by number, ascending.   -> list of ints

    Closed under ancestors: a parent scores no less than its child and has the lower number.
    """
    return sorted(sorted(range(len(score)), key=lambda n: -score[n])[:count])


def needs(condition, message):
    if not condition:
        raise ValueError(message)


def frozen(array):
    array.flags.writeable = False
    return array


def whole(values, name):
    """Own int32 copy of a row of whole numbers."""
    values = np.array(values)
    needs(values.ndim == 1 and values.dtype.kind in "iu", f"{name} is {values.dtype} of shape "
          f"{values.shape}, expected a row of whole numbers")
    return values.astype(np.int32)


def as_mask(keep, count):
    """(count,) bool from a mask or from node numbers."""
    keep = np.asarray(keep)
    if keep.dtype == bool:
        needs(keep.shape == (count,), f"mask has shape {keep.shape}, expected ({count},)")
        return keep
    numbers = whole(keep, "keep")                                 # (kept,)
    needs(len(numbers) and 0 <= numbers.min() and numbers.max() < count,
          f"node numbers are {numbers.tolist()}, expected some of 0..{count - 1}")
    mask = np.zeros(count, dtype=bool)                            # (count,)
    mask[numbers] = True
    return mask
