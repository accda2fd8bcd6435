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
    depth (N,) int32: edges between the root and each node; max_depth: the largest.
    Raises: ValueError if the arrays do not describe such a tree.
    """

    def __init__(self, parent, token, score=None):
        self.parent = whole(parent, "parent")                     # (N,)
        self.token = whole(token, "token")                        # (N,)
        self.score = None if score is None else np.array(score, dtype=np.float64)     # (N,)
        needs(len(self.parent) and self.parent.shape == self.token.shape,
              f"parent has shape {self.parent.shape} and token {self.token.shape}, expected two "
              "equal lengths of 1 or more")
        self._link(self.parent.tolist(), self.token.tolist())
        if score is not None:
            self._check_score(self.score.tolist())
            frozen(self.score)
        frozen(self.parent), frozen(self.token)

    def _link(self, parent, token):
        """Check the lists and derive depth and `_child`, in one walk: for trees of decoding size
        a Python loop is several times faster than the NumPy calls it would take."""
        needs(parent[0] == -1, f"parent[0] is {parent[0]}, expected -1: the root comes first")
        depth, self._child = [0] * len(parent), {}        # {(parent, token): node}
        for n in range(len(parent)):
            above, word = parent[n], token[n]
            if word < 0:
                raise ValueError(f"token[{n}] is {word}, expected 0 or more")
            if n == 0:
                continue
            if not 0 <= above < n:
                raise ValueError(f"parent[{n}] is {above}, expected 0..{n - 1}: parents come "
                                 "before their children")
            if self._child.setdefault((above, word), n) != n:
                raise ValueError(f"node {n} has the same parent and token as another node, "
                                 "expected siblings with different tokens")
            depth[n] = depth[above] + 1
        self.max_depth = max(depth)
        self.depth = frozen(np.array(depth, dtype=np.int32))      # (N,)

    def _check_score(self, score):
        needs(len(score) == len(self) and score[0] == 1, f"score has {len(score)} entries and "
              f"starts with {score[:1]}, expected {len(self)} and 1 for the root")
        for n, above in enumerate(self.parent[1:].tolist(), start=1):
            if not 0 <= score[n] <= score[above]:         # also False for NaN
                raise ValueError(f"score[{n}] is {score[n]}, expected 0..{score[above]}: a path "
                                 "is never more probable than its first part")

    def __len__(self):
        return len(self.parent)

    def __repr__(self):
        return f"Tree({len(self)} nodes, depth {self.max_depth})"

    # --- what follows from parent and token ------------------------------------------------------

    @cached_property
    def _children(self):
        lists = [[] for _ in range(len(self))]
        for n, m in enumerate(self.parent[1:].tolist(), start=1):
            lists[m].append(n)
        return lists

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
