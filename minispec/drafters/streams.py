"""Drafting with the model's own streams: the paper's trees, and trees of conditional streams.

Read first: drafters/__init__.py, growing.py. Proven by: tests/test_lossless.py,
tests/test_drafting.py.
"""

from ..growing import best_first, chain, full_product, grow_by_depth
from . import Drafter


class Streams(Drafter):
    """Trees from the G streams beside the last accepted node.

    config: TreeConfig. Three forms:
    full          the paper's: all products of the k best tokens per depth (k = 3, G = 3: 39 drafts)
    best_first    of that product, the `budget` most probable nodes
    conditional   best-first too, but each node's children come from a distribution that knows the
                  node's token
    """

    needs_streams = True

    def __init__(self, config):
        self.config = config

    def draft(self, ids, streams, room):
        """Tree of the configured form, at most `room` deep."""
        config, root = self.config, ids[-1]
        depth = min(config.depth or streams.count, streams.count, room)
        if depth == 0:
            return chain(root, [], [])
        if config.conditional and streams.conditional:
            def expand(d, tokens):
                return streams.children(d, tokens, config.k)

            budget = config.budget
            if config.shape == "full":
                budget = sum(config.k ** d for d in range(1, depth + 1))
            return grow_by_depth(root, expand, depth, budget)
        tokens, probs = streams.guesses(config.k)         # (G, k)
        if config.shape == "full":
            return full_product(root, tokens, probs, depth)
        return best_first(root, tokens, probs, config.budget, depth)
