"""A loaded model, and the passes of decoding: prefill, one step over a tree, deferred streams.

One step runs a draft tree through the model once (paper fig. 2 and 9):

    lower blocks over all nodes -> prune -> streams beside the survivors (fused) -> top A blocks
    -> norm -> head

Plain decoding is the same step with a tree of one node. Deferred streams (ours) leave the streams
out of that pass and run the top blocks once more for the G streams of the one accepted node, from
its state at layer L-A. Where main rows never see streams, both give the same streams.

Read first: streams.py, cache.py, pruning.py. Proven by: tests/test_cache.py, tests/test_streams.py.
"""

from dataclasses import dataclass

import numpy as np

from . import masks, pruning
from .backend import as_xp, get_xp, pack_columns, packed_matmul, to_host
from .cache import KVCache
from .draft_vocab import column_logits, draft_index, head_columns
from .parameters import all_shapes
from .streams import Angles, insert_forward, top_forward
from .transformer import (block_forward, embed_forward, head_logits, head_matrix,
                          norm_forward)
from .transitions import conditional_states


@dataclass
class StepOutput:
    """What one pass leaves behind.

    logits   (N, V) of the rows asked for
    hidden   (N, C) of the same rows at layer L-A: what deferred streams start from
    streams  (N, G, C) normed stream states beside those rows, or None
    kept     indices of the tree nodes that survived pruning, or None if all did
    rows     rows that went through the top layers, streams included
    """

    logits: object
    hidden: object
    streams: object
    kept: object
    rows: int


class Model:
    """Config, streams and parameters of one model, with its tokenizer if it has one.

    `streams` is None for a plain transformer. `params` maps names to arrays of one library and
    one dtype; that library and dtype decide where and how everything is computed. `draft_ids` (n,)
    is the draft vocabulary (host ints), None for the whole vocabulary.
    """

    def __init__(self, config, params, streams=None, tokenizer=None, draft_ids=None):
        if streams is not None:
            streams.check_model(config)
        odd = sorted(set(params) ^ set(all_shapes(config, streams)))
        if odd:
            raise ValueError(f"parameters missing or not part of this config: {', '.join(odd)}")
        self.config, self.streams, self.params = config, streams, params
        self.tokenizer = tokenizer
        table = params["embed.tokens"]
        self.xp, self.dtype = get_xp(table), table.dtype
        self.angles = Angles(config, streams, self.xp, self.dtype)
        self.draft_ids = draft_ids
        self.draft_index = draft_index(draft_ids, streams, config.vocab_size)
        self.packed_head = self.columns = None

    @property
    def draft_columns(self):
        """draft_vocab.Columns of the draft vocabulary, or None. A copy, until `unpack`."""
        if self.columns is None and self.draft_ids is not None:
            self.columns = head_columns(self.params, self.draft_ids)
        return self.columns

    def draft_logits(self, x):
        """Logits of normed stream rows over what they may guess.   x (n, C) -> (n, V or fewer)."""
        if self.draft_ids is None:
            return self.head_logits(x)
        return column_logits(self.params, x, self.draft_columns)

    def head_logits(self, x):
        """Logits of normed rows.   x (n, C) -> (n, V)."""
        if self.packed_head is None:
            return head_logits(self.params, x)            # (n, V)
        return head_logits(self.params, x, lambda x: packed_matmul(x, self.packed_head,
                                                                   self.config.vocab_size))

    def pack(self):
        """Make copies that decode faster. They go stale when parameters change: `unpack` first."""
        if self.xp is np:
            self.packed_head = pack_columns(head_matrix(self.params))     # (V / 64, C, 64)
        return self

    def unpack(self):
        """Forget the copies."""
        self.packed_head = self.columns = None
        return self

    @property
    def bottom(self):
        """L - A: layers below the streams."""
        return self.config.layers - (self.streams.layers if self.streams else 0)

    @property
    def sees_streams(self):
        """Do main rows attend to their own streams (PMLR eq. 1)? Then every new row has them."""
        return self.streams is not None and self.streams.main_sees_streams

    def to(self, xp):
        """The same model with its parameters on library `xp` (a copy unless it is there)."""
        move = to_host if xp is np else (lambda a: as_xp(to_host(a), xp))
        params = {n: move(a) for n, a in self.params.items()}
        return Model(self.config, params, self.streams, self.tokenizer, self.draft_ids)

    def new_cache(self, capacity=None):
        return KVCache(self.xp, self.config, self.dtype, capacity)

    def check_ids(self, ids):
        """Raise ValueError for ids outside the vocabulary: NumPy would read from the end for
        negative ones, and CuPy would wrap them all."""
        ids = np.asarray(ids)                             # (T,)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError("ids must be a flat sequence of integers")
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.config.vocab_size:
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary of "
                             f"{self.config.vocab_size}")
        return ids

    def logits(self, ids):
        """Logits at every position of a text.   ids (T,) -> (T, V).

        With main_sees_streams these are the logits of a text whose every row has streams.
        """
        ids = self.check_ids(ids)                         # (T,)
        if not 0 < len(ids) <= self.config.max_positions:
            raise ValueError(f"got {len(ids)} ids, expected 1 to {self.config.max_positions}")
        cache = self.new_cache(len(ids))
        bundles = len(ids) if self.sees_streams else 0
        return self.run(cache, ids, masks.causal(len(ids)), bundles=bundles).logits

    # --- passes ---------------------------------------------------------------------------------

    def prefill(self, cache, ids, streams=False):
        """Run the prompt and settle it; only the last row gets logits, and streams if asked for.

        ids (T,) host ints -> StepOutput of one row.
        """
        out = self.run(cache, ids, masks.causal(len(ids), len(cache)),
                       bundles=int(streams or self.sees_streams), last_only=True)
        cache.keep(range(len(ids)))
        return out

    def step(self, cache, tree, fused=False, prune=None):
        """Run a draft tree behind the settled rows. Its rows stay pending until `cache.keep`.

        tree: tree.Tree. fused: streams beside every surviving node. prune: None or a function
        (scores (N,)) -> indices of the survivors.
        """
        with_streams = fused or self.sees_streams
        return self.run(cache, tree.token, masks.tree_context(tree.ancestors, len(cache)),
                        depth=tree.depth, bundles=len(tree) if with_streams else 0,
                        prune=prune, tree=tree)

    def run(self, cache, ids, context, depth=None, bundles=0, last_only=False, prune=None,
            tree=None):
        """The pass behind prefill and step.

        ids (N,), context (N, P + N) bool, depth (N,) position of each row behind the settled ones
        (None: 0, 1, 2, ...). The last `bundles` rows get streams.
        """
        xp, config, rows = self.xp, self.config, len(ids)
        depth = np.arange(rows) if depth is None else depth       # (N,)
        at = len(cache) + depth[None]                     # (1, N)
        if config.sliding_window:
            keys = np.concatenate([np.arange(len(cache)), at[0]])         # (P + N,)
            context = context & masks.in_window(at[0], keys, config.sliding_window)
        entry = xp.asarray(at + config.position_offset)   # (1, N)
        x, _ = embed_forward(self.params, xp.asarray(ids)[None], entry)   # (1, N, C)
        call = self.angles.call(masks.View(rows, xp.asarray(context)[None]), at)
        for layer in range(self.bottom):
            x, _ = block_forward(self.params, config, layer, x, call, cache)
        kept = None
        if prune is not None and rows > 1:
            draft = None if self.draft_ids is None else (self.draft_index, self.draft_columns)
            kept = prune(pruning.exit_scores(self.params, config, x[0], tree, draft))
            if len(kept) == rows:
                kept = None
            else:
                x, at, context = self._take(cache, kept, x, at, context)
                rows, bundles = len(kept), min(bundles, len(kept))
        if kept is not None or bundles:                   # else the rows are those from below
            view = masks.View(rows, xp.asarray(context)[None], bundles,
                              self.streams.count if bundles else 0, self._sees(bundles))
            call = self.angles.call(view, at)
        y, _ = top_forward(self.params, config, self.streams, x, at, call, cache)
        return self._output(x, y, call.view, last_only, kept)

    def _take(self, cache, kept, x, at, context):
        """Rows `kept` (ascending) of x (1, N, C), at (1, N) and context (N, P + N), and of what the
        lower layers have put into the cache: the rest is gone as if it had never been drafted."""
        cache.prune(kept, self.bottom)
        keys = np.concatenate([np.arange(len(cache)), len(cache) + kept])         # (P + kept,)
        return x[:, self.xp.asarray(kept)], at[:, kept], context[np.ix_(kept, keys)]

    def _sees(self, bundles):
        return self.xp.ones((1, bundles), dtype=bool) if bundles and self.sees_streams else None

    def _output(self, x, y, view, last_only, kept):
        """Norm and head of the rows that are needed -> StepOutput."""
        first = view.main - 1 if last_only else 0
        main, _ = norm_forward(self.params, self.config, "norm", y[0, first:view.main])   # (n, C)
        streams = None
        if view.bundles:
            normed, _ = norm_forward(self.params, self.config, "norm", y[0, view.main:])  # (S*G, C)
            streams = normed.reshape(view.bundles, view.streams, -1)      # (S, G, C)
        logits = self.head_logits(main)                   # (n, V)
        return StepOutput(logits, x[0, first:], streams, kept, view.rows)

    def deferred_streams(self, cache, hidden):
        """Streams beside the last settled row, from its state at layer L-A.

        hidden (C,) -> (G, C) normed stream states. Only for models whose main rows never see
        streams: then nothing that the main rows computed depends on them.
        """
        count, streams = self.streams.count, self.streams
        at = np.array([[len(cache) - 1]])                 # (1, 1)
        s, _ = insert_forward(self.params, streams, hidden[None, None],
                              at + self.config.position_offset)   # (1, G, C)
        # The G streams of one row see all cached rows, and one another causally: they are G rows
        # of an ordinary text. Their keys stay pending in the cache and are never kept.
        context = masks.causal(count, len(cache))         # (G, P + G)
        if self.config.sliding_window:
            window, past = self.config.sliding_window, np.arange(len(cache))
            context[:, :len(cache)] &= masks.in_window(at[0], past, window)
        view = masks.View(count, self.xp.asarray(context)[None])
        at = masks.stream_positions(at, count, streams.positions == "ahead")      # (1, G)
        call = self.angles.call(view, at, streams_alone=True)
        y, _ = top_forward(self.params, self.config, streams, s, at, call, cache)
        return norm_forward(self.params, self.config, "norm", y[0])[0]    # (G, C)


class StreamStates:
    """The streams of the last accepted node, as a drafter sees them: guesses, not arrays.

    states (G, C): normed stream states on the model's library.
    """

    def __init__(self, model, states):
        self.model, self.states = model, states

    @property
    def count(self):
        """G: how deep a tree can be."""
        return len(self.states)

    @property
    def conditional(self):
        """Was the model trained to tell a stream which token came before it?"""
        return "transitions.out" in self.model.params

    def guesses(self, k):
        """The paper's streams: the k best tokens of every depth, whatever came before.

        -> tokens (G, k), probabilities (G, k), host arrays, best first.
        """
        return self.top(self.states, k)

    def children(self, depth, tokens, k):
        """Conditional streams: the k best tokens at `depth` below nodes with these tokens.

        tokens (m,) host ints -> tokens (m, k), probabilities (m, k), host arrays, best first.
        """
        params, g = self.model.params, depth - 1
        z = conditional_states(params, self.states[g], g, self.model.xp.asarray(tokens))  # (m, C)
        return self.top(z, k)

    def top(self, states, k):
        """The k largest softmax entries of each state under the head, best first, equals by id.

        Which of several equal ones at the edge are among the k is left open: drafts are guesses.
        """
        logits = to_host(self.model.draft_logits(states)) # (n, V), or of the draft vocabulary
        rows = np.arange(len(logits))[:, None]            # (n, 1)
        k = min(k, logits.shape[1])
        part = np.argpartition(logits, -k, axis=1)[:, -k:]        # (n, k)  unordered
        value = logits[rows, part]                        # (n, k)
        order = np.lexsort((part, -value), axis=1)        # (n, k)
        part, value = part[rows, order], value[rows, order]       # (n, k)
        best = value[:, :1]                               # (n, 1)
        total = np.exp(logits - best).sum(axis=1, keepdims=True)  # (n, 1)
        if self.model.draft_ids is not None:
            part = np.asarray(self.model.draft_ids)[part] # (n, k)  places -> ids
        return part, np.exp(value - best) / total
