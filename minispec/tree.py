"""The draft tree: what it is as data, and four ways to grow one.

A draft is a tree of tokens. Its root is already decided; every other node is a guess for the token
that follows its parent. As data a tree is two arrays, `parent` and `token`, root first and parents
before children. Depth, ancestors (hence the attention mask), positions and paths all follow from
them. Everything here is host code: NumPy int32 and Python ints, no model.

A node's `score` is the drafter's probability of the whole path from the root to it, so scores never
grow along a path. That is why the best nodes under a budget always form a tree.

Read first: nothing. Read next: verify.py (which nodes are accepted), masks.py (`tree_context`).
Paper: Speculative Streaming (PMLR v262, 2024) sec. 3.1.3, tree draft; `full_product` is its tree.
Proven by: tests/test_tree.py (every builder against brute force).
"""

import heapq
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


# --- growing a tree ------------------------------------------------------------------------------

def chain(root, tokens, probs=None):
    """One guess after the other.   probs: of each token given those before it, or None."""
    score = None if probs is None else np.cumprod([1.0, *probs])  # (N,)
    return Tree(np.arange(-1, len(tokens)), [root, *tokens], score)


def grow_by_depth(root, expand, depth, budget):
    """The `budget` most probable nodes, where a node's children depend on its token.

    `expand(d, tokens int32[m])` gives the children, at depth d, of m nodes with these tokens:
    (child_tokens (m, k), child_probs (m, k)), probabilities given the parent. It is called once
    per depth, and only for nodes among the best `budget` found so far: a node outside has `budget`
    better ones, and what grows below it is no better. So the result is that of growing everything.
    Ties: the lower depth first, then the order of the columns along the path. Conditional streams
    (design: "beyond the paper") draft with this. Raises: ValueError for impossible children.
    """
    check_size(depth, budget)
    parent, token, score = np.array([-1]), np.array([root]), np.ones(1)       # (generated,)
    frontier = np.zeros(min(budget, 1), dtype=np.int64)           # (m,)  nodes to expand
    for d in range(1, depth + 1):
        if not len(frontier):
            break
        found = len(parent)
        tokens, probs = expand(d, token[frontier].astype(np.int32))           # (m, k)
        tokens, probs = check_children(tokens, probs, len(frontier))          # (m, k)
        parent = np.append(parent, np.repeat(frontier, tokens.shape[1]))      # (generated,)
        token = np.append(token, tokens)                          # (generated,)
        score = np.append(score, score[frontier, None] * probs)   # (generated,)
        best = np.sort(best_numbers(score, budget + 1))           # (<= budget + 1,)
        frontier = best[best >= found]                            # (m,)
    return Tree(parent, token, score).truncate(budget + 1)


def full_product(root, top_tokens, top_probs, depth, max_nodes=None):
    """The paper's tree: every node at depth d - 1 has all k guesses of stream d as children.

    top_tokens (G, k), top_probs (G, k) or None -> 1 + k + ... + k^depth nodes, level by level; of
    these the best `max_nodes` (root included) as `Tree.truncate` counts them.   Paper sec. 3.1.3.
    """
    tokens, probs = check_levels(top_tokens, top_probs, depth)    # (G, k)
    everything = sum(tokens.shape[1] ** d for d in range(1, depth + 1))
    needs(max_nodes is None or max_nodes >= 1,
          f"max_nodes is {max_nodes}, expected 1 or more (the root counts)")

    def same_for_all(d, parents):
        shape = (len(parents), tokens.shape[1])
        return np.broadcast_to(tokens[d - 1], shape), np.broadcast_to(probs[d - 1], shape)

    budget = everything if max_nodes is None else max_nodes - 1
    tree = grow_by_depth(root, same_for_all, depth, budget)
    return Tree(tree.parent, tree.token) if top_probs is None else tree


def best_first(root, top_tokens, top_probs, budget, depth):
    """The `budget` nodes of the full product that have the largest product of probabilities.

    top_tokens, top_probs (G, k) -> at most 1 + budget nodes, level by level, without ever building
    the product: the best node not yet taken is always the root's child or a taken node's child.
    Ties: the lower depth first, then the order of the columns along the path.
    """
    check_size(depth, budget)
    tokens, probs = check_levels(top_tokens, top_probs, depth)    # (G, k)
    tokens, probs = tokens.tolist(), probs.tolist()
    heap, taken = [(-1.0, 0, ())], []     # (-score, depth, columns from the root): its own order
    while heap and len(taken) <= budget:
        minus, d, columns = heapq.heappop(heap)
        taken.append((d, columns, -minus))
        if d < depth:
            for column, prob in enumerate(probs[d]):
                heapq.heappush(heap, (minus * prob, d + 1, (*columns, column)))
    taken.sort()
    number = {columns: n for n, (_, columns, _) in enumerate(taken)}
    parent = [-1] + [number[columns[:-1]] for _, columns, _ in taken[1:]]
    token = [root] + [tokens[d - 1][columns[-1]] for d, columns, _ in taken[1:]]
    return Tree(parent, token, [score for _, _, score in taken])


def union(trees, budget=None):
    """One tree with the paths of all, shared prefixes merged, of at most `budget` drafted nodes.

    The best stay; ties: earlier trees first. A node drafted twice keeps its larger score, so scores
    still never grow along a path. The result has scores if all trees have (a lone root needs none).
    Raises: ValueError for no trees, different roots, or a budget without scores.
    """
    trees = list(trees)
    roots = {int(tree.token[0]) for tree in trees}
    needs(len(roots) == 1, f"root tokens are {sorted(roots)}, expected the same in every tree")
    scored = all(tree.score is not None or len(tree) == 1 for tree in trees)
    needs(scored or budget is None, "a budget needs scores, and one of the trees has none")
    check_size(0, budget or 0)
    parent, token, score, child = [-1], [roots.pop()], [1.0], {}
    for tree in trees:
        number = [0]                      # of this tree's nodes in the union
        scores = tree.score if scored and len(tree) > 1 else np.ones(len(tree))   # (N,)
        rows = zip(tree.parent.tolist(), tree.token.tolist(), scores.tolist())
        next(rows)                        # the root
        for above, word, prob in rows:
            n = child.setdefault((number[above], word), len(parent))
            if n == len(parent):
                parent.append(number[above])
                token.append(word)
                score.append(prob)
            score[n] = max(score[n], prob)
            number.append(n)
    tree = Tree(parent, token, score if scored else None)
    return tree if budget is None else tree.truncate(budget + 1)


# --- small helpers -------------------------------------------------------------------------------

def best_numbers(score, count):
    """The `count` nodes with the largest scores, ties by number.   score (N,) -> (count,) int.

    Closed under ancestors: a parent scores no less than its child and has the lower number.
    """
    return np.argsort(-score, kind="stable")[:count]              # (count,)


def check_size(depth, budget):
    needs(depth >= 0, f"depth is {depth}, expected 0 or more")
    needs(budget >= 0, f"budget is {budget}, expected 0 or more (the root does not count)")


def check_children(tokens, probs, rows):
    """tokens, probs (rows, k) as arrays, float32 rounding above 1 taken off the probabilities."""
    tokens, probs = np.asarray(tokens), np.asarray(probs, dtype=np.float64)   # (rows, k)
    needs(tokens.ndim == 2 and tokens.shape == probs.shape and len(tokens) == rows,
          f"tokens have shape {tokens.shape} and probabilities {probs.shape}, expected both "
          f"({rows}, k)")
    needs(((probs >= 0) & (probs <= 1.001)).all(), "probabilities must lie between 0 and 1")
    return tokens, np.minimum(probs, 1.0)                         # (rows, k)


def check_levels(top_tokens, top_probs, depth):
    """The guesses of G streams as arrays (G, k), probabilities of None as ones."""
    top_tokens = np.asarray(top_tokens)                           # (G, k)
    top_probs = np.ones(top_tokens.shape) if top_probs is None else top_probs     # (G, k)
    needs(0 <= depth <= len(top_tokens),
          f"depth is {depth}, but there are guesses for {len(top_tokens)} levels")
    return check_children(top_tokens, top_probs, len(top_tokens))


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
