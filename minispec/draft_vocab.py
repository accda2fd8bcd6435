"""The draft vocabulary: the few ids that streams may guess, instead of the whole vocabulary.

A small open model has 49,152 tokens or more, and the completions of one task use about a thousand
of them. Scoring every stream against the whole head would cost more than the layers that the
streams pass, in training and in drafting. So stream losses, conditional streams, the early exit
and drafting run over a subset of the head's columns. The main row always uses the whole head, and
drafts never decide what is emitted, so the output is the same for any subset.

A target outside the subset is not trained for streams: it could not be drafted anyway.

Read first: transformer.py (the head). Proven by: tests/test_draft_vocab.py.
"""

from dataclasses import dataclass

import numpy as np

from .backend import get_xp
from .transformer import head_matrix


@dataclass
class Columns:
    """The head's columns of the draft vocabulary, on the model's library.

    ids (n,) int, head (C, n) (or (E, n) behind a projection), bias (n,) or None.
    """

    ids: object
    head: object
    bias: object


def head_columns(params, ids):
    """Columns `ids` (n,) of the output head -> Columns, a copy."""
    xp = get_xp(params["embed.tokens"])
    at, bias = xp.asarray(ids), params.get("head.b")
    if "head.w" in params:
        head = params["head.w"][:, at]                    # (C, n)
    else:                                                 # rows of the table: faster to gather
        head = head_matrix(params).T[at].T                # (C, n)
    return Columns(at, head, None if bias is None else bias[at])


def column_logits(params, x, columns):
    """Logits of normed rows over the draft vocabulary.   x (..., C) -> (..., n)."""
    if "head.project.w" in params:
        x = x @ params["head.project.w"]                  # (..., E)
    logits = x @ columns.head                             # (..., n)
    return logits if columns.bias is None else logits + columns.bias


def choose_draft_ids(documents, size, eos_ids):
    """The `size` ids most frequent in the completions of data.Documents, and the end ids.

    -> (n,) int32, ascending; fewer than `size` if the completions use fewer.
    """
    used = [i for d in documents for i in d.ids[d.start:]]
    counts = np.bincount(np.asarray(used + list(eos_ids), dtype=np.int64))        # (ids,)
    counts[list(eos_ids)] = len(used) + 1                 # whatever their count: always in
    order = np.argsort(-counts, kind="stable")[:size]     # (size,)  equals: the lower id
    return np.sort(order[counts[order] > 0]).astype(np.int32)     # (n,)


def draft_index(ids, streams, vocab_size):
    """Place of every id in the draft vocabulary, -1 outside: (V,) int; None without a subset.

    ids (n,) or None. Raises ValueError unless ids and settings (StreamConfig or None) fit.
    """
    size = 0 if streams is None else streams.draft_vocab
    if ids is None or not size:
        if ids is None and not size:
            return None
        raise ValueError(f"draft_vocab is {size}, but draft ids are "
                         f"{'missing' if ids is None else 'there'}")
    ids = np.asarray(ids)                                 # (n,)
    if (ids.ndim != 1 or ids.dtype.kind not in "iu" or not 0 < len(ids) <= size
            or (np.diff(ids) <= 0).any() or not 0 <= ids[0] <= ids[-1] < vocab_size):
        raise ValueError(f"draft ids must be 1 to {size} ascending ids below {vocab_size}")
    index = np.full(vocab_size, -1)                       # (V,)
    index[ids] = np.arange(len(ids))
    return index
