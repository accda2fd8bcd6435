"""Growing a draft tree: a chain, the paper's full product, best-first, and depth by depth.

All builders give the nodes level by level, and where they have a budget they agree: the tree of the
`budget` most probable nodes, probability being the product along the path. They differ in what they
know. `full_product` and `best_first` take one list of guesses per depth, the same below every node
(the paper's streams). `grow_by_depth` asks for the guesses below given nodes (conditional streams).

Read first: tree.py. Read next: drafters/streams.py (who calls this).
Paper: Speculative Streaming (PMLR v262, 2024) sec. 3.1.3; `full_product` is its tree.
Proven by: tests/test_growing.py (every builder against brute force).
"""

import heapq

import numpy as np

from .tree import Tree, best_numbers, needs


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
    parent, token, score = [-1], [int(root)], [1.0]
    best = frontier = [0][:budget]        # nodes to expand next: none if nothing may be drafted
    for d in range(1, depth + 1):
        if not frontier:
            break
        found = len(parent)
        above = np.array([token[n] for n in frontier], dtype=np.int32)        # (m,)
        tokens, probs = check_children(*expand(d, above), len(frontier))      # (m, k)
        for n, words, chances in zip(frontier, tokens.tolist(), probs.tolist()):
            parent += [n] * len(words)
            token += words
            score += [score[n] * chance for chance in chances]
        best = best_numbers(score, budget + 1)
        frontier = [n for n in best if n >= found]
    number = {n: i for i, n in enumerate(best)} or {0: 0}
    rows = list(number)
    return Tree([-1] + [number[parent[n]] for n in rows[1:]], [token[n] for n in rows],
                [score[n] for n in rows])


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


# --- checks --------------------------------------------------------------------------------------

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


