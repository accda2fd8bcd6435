"""Who may see whom: causal, tree and multi-stream masks. Here the paper's pictures become code.

One principle carries the code base: the prompt, a decode step, tree verification and multi-stream
training are the same block run over rows that differ only in their positions and in who may see
whom. True means "may attend".

A `View` describes the rows of one call. They come in two groups, main rows first:

    [ main row 0 .. T-1 | streams 1..G of bundle 0 | streams 1..G of bundle 1 | ... ]

A bundle is a main row together with its streams; the last S main rows are bundles. With T = 0 the
streams run alone: their main rows ran before and are among the P keys (training in lossless mode).

Read first: config.py. Proven by: tests/test_masks.py (against brute-force definitions).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class View:
    """The rows of one call and what they see.

    main      T, main rows in this call
    bundles   S, how many of the last main rows carry streams
    streams   G, streams per bundle
    context   (1 or B, max(T, S), K) bool: which of the K = P + T main keys a main row sees. Its
              streams see the same. K counts the P cached rows first, then this call's main rows.
    sees_own  None: main rows never see streams (arXiv v1; lossless mode). Else (1 or B, S) bool:
              main row s also sees its own G streams where True (PMLR eq. 1).
    """

    main: int
    context: object
    bundles: int = 0
    streams: int = 0
    sees_own: object = None

    @property
    def rows(self):
        """Rows of the call: T + S * G."""
        return self.main + self.bundles * self.streams

    @property
    def stream_context(self):
        """(1 or B, S, K) bool: what the streams of each bundle see of the main keys."""
        return self.context[:, self.context.shape[1] - self.bundles:]


def causal(rows, cached=0):
    """Row t sees every cached row and this call's rows 0..t.   -> (rows, cached + rows) bool."""
    seen = np.arange(cached + rows)                       # (K,)
    return seen[None, :] <= np.arange(rows)[:, None] + cached     # (rows, K)


def causal_documents(documents):
    """Causal inside each document, never across; padding (document -1) sees only itself.

    documents (B, T) int -> (B, T, T) bool. A padding row sees itself so that its softmax has a
    key; nothing that is trained ever sees it.
    """
    rows = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]         # (B, T, T)
    real = (documents >= 0)[:, :, None]                   # (B, T, 1)
    return (same & real & causal(rows)) | np.eye(rows, dtype=bool)    # (B, T, T)


def tree_context(ancestors, cached):
    """Tree node n sees all cached rows, its ancestors and itself; never a sibling or a cousin.

    ancestors (N, N) bool, self included -> (N, cached + N) bool.   Paper sec. 3.1.3, eq. 4.
    """
    prefix = np.ones((len(ancestors), cached), dtype=bool)        # (N, P)
    return np.concatenate([prefix, ancestors], axis=1)    # (N, P + N)


def in_window(positions, keys, window):
    """Sliding window: position t sees keys at t - window + 1 and later; to be combined with the
    mask that says which keys come before it. Streams have the window of their main row.

    positions (..., T), keys (..., K) int -> (..., T, K) bool.   Jiang et al. 2023 (Mistral 7B).
    """
    return positions[..., :, None] - keys[..., None, :] < window  # (..., T, K)


def own_streams(streams):
    """Stream g of a bundle sees streams 1..g of the same bundle.   -> (G, G) bool.   eq. 2."""
    return np.tri(streams, dtype=bool)                    # (G, G)


def stream_positions(positions, streams, ahead=True):
    """Position ids of the streams of the given main rows, bundle by bundle.

    positions (..., S) int -> (..., S * G): t + g with `ahead`, else t. The paper does not say
    which; t + g is the position of the token that the stream takes in, one before its target.
    """
    offset = np.arange(1, streams + 1) if ahead else np.zeros(streams, dtype=int)   # (G,)
    at = np.asarray(positions)[..., None] + offset        # (..., S, G)
    return at.reshape(*at.shape[:-2], -1)                 # (..., S * G)


def explicit(view):
    """The whole multi-stream mask, written out.   View -> (1 or B, rows, K + S * G) bool.

    Keys are [context | streams of bundle 0 | streams of bundle 1 | ...]. attention.py works with
    the factored form, which never builds this array; a test shows that both are the same.
    """
    batch, _, keys = view.context.shape
    count, width = view.bundles * view.streams, view.streams
    if view.sees_own is not None:
        batch = max(batch, len(view.sees_own))
    mask = np.zeros((batch, view.rows, keys + count), dtype=bool)     # (B, rows, K + S*G)
    mask[:, :view.main, :keys] = view.context[:, :view.main]
    for s in range(view.bundles):
        first = view.main + s * width                     # row of this bundle's stream 1
        own = slice(keys + s * width, keys + (s + 1) * width)
        mask[:, first:first + width, :keys] = view.stream_context[:, s, None]
        mask[:, first:first + width, own] = own_streams(width)
        if view.sees_own is not None:
            mask[:, view.main - view.bundles + s, own] = view.sees_own[:, s, None]
    return mask
