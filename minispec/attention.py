"""Rotary positions and attention: plain under any mask, and the factored multi-stream form.

Plain attention takes queries, keys, values and a boolean mask, and serves every kind of row. The
factored form computes the same for bundles of streams without the large mask: the G streams of a
position see the same main keys, and besides them only one another. So the scores split into a
context part (rows x main keys) and an own part (G x G per bundle), with one softmax over both.

Grouped-query attention: H query heads share Hkv key/value heads, H/Hkv neighbours each. Queries
are viewed as (B, Hkv, H/Hkv * T, D), so no key or value is ever repeated in memory.

Read first: masks.py. Proven by: tests/test_attention.py, tests/test_ops_grad.py.
"""

from .backend import get_xp
from .masks import own_streams

MASKED = -1e30        # a Python float: keeps float32 scores float32; exp(MASKED - max) is 0


# --- rotary positions ---------------------------------------------------------------------------

def rope_table(xp, positions, head_dim, theta, dtype, stretch=None):
    """cos and sin of every angle, `positions` (n,) -> two arrays (n, D/2).

    Channel pair i turns by position * theta^(-2i/D).   Su et al. 2021, eq. 15. The angles are
    computed in float64: at position 8,192 a float32 angle is off by 5e-4.
    stretch: a function of the frequencies (rope_scaling.py).
    """
    pair = xp.arange(0, head_dim, 2, dtype="float64")     # (D/2,)
    frequency = theta ** (-pair / head_dim)               # (D/2,)
    if stretch is not None:
        frequency = stretch(frequency)                    # (D/2,)
    angle = positions[:, None] * frequency                # (n, D/2)
    return xp.cos(angle).astype(dtype), xp.sin(angle).astype(dtype)


def rotate_forward(x, cos, sin):
    """Rotate channel pairs (i, i + D/2) by their angle.

    x (B, heads, T, D), cos and sin broadcastable to (B, heads, T, D/2) -> y like x.
    cache: cos, sin. The pairing of halves is that of all HF llama files. Fewer angles than D/2
    rotate the leading channels and leave the rest as they are (partial rotary, GPT-NeoX).
    """
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half:2 * half]           # (B, heads, T, D/2)
    y = get_xp(x).empty_like(x)                           # (B, heads, T, D)
    y[..., :half] = a * cos - b * sin
    y[..., half:2 * half] = b * cos + a * sin
    if 2 * half < x.shape[-1]:
        y[..., 2 * half:] = x[..., 2 * half:]
    return y, (cos, sin)


def rotate_backward(dy, cache):
    """dy (B, heads, T, D) -> dx. The inverse of a rotation is its transpose: angle -> -angle."""
    cos, sin = cache
    return rotate_forward(dy, cos, -sin)[0]               # (B, heads, T, D)


# --- heads --------------------------------------------------------------------------------------

def split_heads(x, heads):
    """(B, T, heads * D) -> (B, heads, T, D)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x):
    """(B, heads, T, D) -> (B, T, heads * D)."""
    batch, heads, rows, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width)


def group(q, kv_heads):
    """(B, H, n, D) -> (B, Hkv, H/Hkv * n, D): the query heads that share a key head, in a row."""
    batch, _, _, width = q.shape
    return q.reshape(batch, kv_heads, -1, width)


def masked_softmax(scores, mask):
    """softmax over the last axis where `mask`; a row without any True gives zeros, never NaN.

    scores (..., K), mask broadcastable to it. Works in a new array.
    """
    xp = get_xp(scores, mask)
    probs = xp.where(mask, scores, MASKED)                # (..., K)
    top = probs.max(axis=-1, keepdims=True)               # (..., 1)
    probs -= top
    xp.exp(probs, out=probs)
    total = probs.sum(axis=-1, keepdims=True)             # (..., 1)
    probs *= (top > MASKED / 2) / total
    return probs


def softmax_backward(dprobs, probs):
    """dp (..., K) -> dscores (..., K).

    dp_j/ds_i = p_j ([i = j] - p_i), hence ds = p (dp - sum_j dp_j p_j). Masked keys have p = 0
    and so ds = 0.
    """
    return probs * (dprobs - (dprobs * probs).sum(axis=-1, keepdims=True))    # (..., K)


# --- attention under any mask -------------------------------------------------------------------

def attention_forward(q, k, v, mask):
    """y = softmax(q k^T / sqrt(D) where mask) v, per head.   Vaswani et al. 2017, eq. 1.

    q (B, H, T, D), k and v (B, Hkv, K, D), mask (1 or B, T, K) bool -> y (B, H, T, D).
    cache: q, k, v (grouped), probabilities (B, Hkv, H/Hkv, T, K).
    """
    (batch, heads, rows, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, rows, keys)
    qg = group(q, kv_heads)                               # (B, Hkv, H/Hkv * T, D)
    scores = (qg * width ** -0.5) @ k.transpose(0, 1, 3, 2)       # (B, Hkv, H/Hkv * T, K)
    probs = masked_softmax(scores.reshape(grouped), mask[:, None, None])
    y = probs.reshape(scores.shape) @ v                   # (B, Hkv, H/Hkv * T, D)
    return y.reshape(q.shape), (qg, k, v, probs)


def attention_backward(dy, cache):
    """dy (B, H, T, D) -> dq (B, H, T, D), dk and dv (B, Hkv, K, D).

    The sum over the query heads of a group happens in the matmul: its rows are those of all of
    the group's heads.
    """
    qg, k, v, probs = cache
    width, kv_heads = k.shape[-1], k.shape[1]
    flat = probs.reshape(*qg.shape[:3], k.shape[2])       # (B, Hkv, H/Hkv * T, K)
    dyg = group(dy, kv_heads)                             # (B, Hkv, H/Hkv * T, D)
    # forward: y = probs @ v
    dv = flat.transpose(0, 1, 3, 2) @ dyg                 # (B, Hkv, K, D)
    dprobs = dyg @ v.transpose(0, 1, 3, 2)                # (B, Hkv, H/Hkv * T, K)
    # forward: probs = softmax(scores where mask)
    dscores = softmax_backward(dprobs, flat)              # (B, Hkv, H/Hkv * T, K)
    dscores *= width ** -0.5
    # forward: scores = (q / sqrt(D)) @ k^T
    dq = dscores @ k                                      # (B, Hkv, H/Hkv * T, D)
    dk = dscores.transpose(0, 1, 3, 2) @ qg               # (B, Hkv, K, D)
    return dq.reshape(dy.shape), dk, dv


# --- multi-stream attention, factored -----------------------------------------------------------

def bundle_forward(q, k, v, k_own, v_own, context, own):
    """Attention of W rows per bundle over the main keys and the bundle's own streams.

    q (B, H, S, W, D); main k, v (B, Hkv, K, D); stream k_own, v_own (B, Hkv, S, G, D);
    context (1 or B, S, K) bool; own (1 or B, S or 1, W, G) bool -> y (B, H, S, W, D).
    cache: all inputs (grouped) and the probabilities over [K | G].
    """
    xp = get_xp(q)
    batch, heads, bundles, rows, width = q.shape
    kv_heads, keys = k.shape[1:3]
    shape = (batch, kv_heads, heads // kv_heads, bundles, rows)
    qs = (q * width ** -0.5).reshape(*shape, width)       # (B, Hkv, H/Hkv, S, W, D)
    to_main = group(qs.reshape(q.shape[0], heads, -1, width), kv_heads) @ k.transpose(0, 1, 3, 2)
    to_own = qs @ k_own.transpose(0, 1, 2, 4, 3)[:, :, None]      # (B, Hkv, H/Hkv, S, W, G)
    scores = xp.concatenate([to_main.reshape(*shape, keys), to_own], axis=-1)
    masks = (max(len(context), len(own)), bundles, rows)  # (1 or B, S, W)
    seen = xp.broadcast_to(context[:, :, None], (*masks, keys))
    mine = xp.broadcast_to(own, (*masks, own.shape[-1]))
    mask = xp.concatenate([seen, mine], axis=-1)          # (1 or B, S, W, K + G)
    probs = masked_softmax(scores, mask[:, None, None])   # (B, Hkv, H/Hkv, S, W, K + G)
    # contiguous, so that the matmuls below and in the backward do not copy it twice
    p_main = probs[..., :keys].reshape(batch, kv_heads, -1, keys)         # (B, Hkv, rows, K)
    p_own = probs[..., keys:]                             # (B, Hkv, H/Hkv, S, W, G)
    y = (p_main @ v).reshape(*shape, width) + p_own @ v_own[:, :, None]   # (B, Hkv, ..., W, D)
    return y.reshape(q.shape), (qs, k, v, k_own, v_own, probs)


def bundle_backward(dy, cache):
    """dy (B, H, S, W, D) -> dq like dy, dk and dv (B, Hkv, K, D), dk_own and dv_own
    (B, Hkv, S, G, D).

    One softmax covers both parts, so its backward runs over [K | G] together; after that the two
    parts separate again. A bundle's keys serve all heads of a group: their gradients are summed.
    """
    qs, k, v, k_own, v_own, probs = cache
    xp = get_xp(dy)
    keys, width, kv_heads = k.shape[2], k.shape[3], k.shape[1]
    dyg = dy.reshape(qs.shape)                            # (B, Hkv, H/Hkv, S, W, D)
    flat = (qs.shape[0], kv_heads, -1)                    # rows of all heads of a group
    dyf = dyg.reshape(*flat, width)                       # (B, Hkv, rows, D)
    # forward: y = p_main @ v + p_own @ v_own
    p_main = probs[..., :keys].reshape(*flat, keys)       # (B, Hkv, rows, K)
    p_own = probs[..., keys:]                             # (B, Hkv, H/Hkv, S, W, G)
    dv = p_main.transpose(0, 1, 3, 2) @ dyf               # (B, Hkv, K, D)
    dv_own = (p_own.swapaxes(-1, -2) @ dyg).sum(axis=2)   # (B, Hkv, S, G, D)
    dp_main = (dyf @ v.transpose(0, 1, 3, 2)).reshape(*probs.shape[:-1], keys)
    dp_own = dyg @ v_own.swapaxes(-1, -2)[:, :, None]     # (B, Hkv, H/Hkv, S, W, G)
    # forward: probs = softmax([to_main | to_own] where mask)
    dscores = softmax_backward(xp.concatenate([dp_main, dp_own], axis=-1), probs)
    d_main = dscores[..., :keys].reshape(*flat, keys)     # (B, Hkv, rows, K)
    d_own = dscores[..., keys:]                           # (B, Hkv, H/Hkv, S, W, G)
    # forward: to_main = qs @ k^T;  to_own = qs @ k_own^T
    dqs = (d_main @ k).reshape(qs.shape) + d_own @ k_own[:, :, None]      # (B, Hkv, ..., W, D)
    dk = d_main.transpose(0, 1, 3, 2) @ qs.reshape(*flat, width)          # (B, Hkv, K, D)
    dk_own = (d_own.swapaxes(-1, -2) @ qs).sum(axis=2)    # (B, Hkv, S, G, D)
    # forward: qs = q / sqrt(D)
    return (dqs * width ** -0.5).reshape(dy.shape), dk, dv, dk_own, dv_own


def multi_stream_forward(q, k, v, k_own, v_own, view):
    """Attention of all rows of a View: main rows over the context, streams over context and own.

    q (B, H, T + S*G, D); k, v (B, Hkv, K, D), the P cached keys and this call's T main keys;
    k_own, v_own (B, Hkv, S*G, D), the keys of this call's streams -> y like q.
    cache: of the two parts.   Paper eqs. 1 (with `view.sees_own`) and 2.
    """
    if not view.bundles:
        y, cache = attention_forward(q, k, v, view.context)
        return y, (cache, None, view)
    xp = get_xp(q)
    batch, heads, _, width = q.shape
    # rows that see streams go with the bundles: the streams, and the main row if it sees its own
    first = view.main - (view.bundles if view.sees_own is not None else 0)
    y = xp.empty_like(q)                                  # (B, H, T + S*G, D)
    plain = None
    if first:
        y[:, :, :first], plain = attention_forward(q[:, :, :first], k, v, view.context[:, :first])
    own_shape = (batch, k.shape[1], view.bundles, view.streams, width)
    own = xp.asarray(own_streams(view.streams))[None, None]       # (1, 1, G, G)
    if view.sees_own is not None:
        sees = xp.broadcast_to(view.sees_own[:, :, None, None],
                               (*view.sees_own.shape, 1, view.streams))
        own = xp.broadcast_to(own, (*view.sees_own.shape, *own.shape[2:]))
        own = xp.concatenate([sees, own], axis=2)         # (1 or B, S, 1 + G, G)
    out, bundled = bundle_forward(to_bundles(q, view), k, v, k_own.reshape(own_shape),
                                  v_own.reshape(own_shape), view.stream_context, own)
    from_bundles(out, view, y)
    return y, (plain, bundled, view)


def multi_stream_backward(dy, cache):
    """dy (B, H, T + S*G, D) -> dq like dy, dk, dv (B, Hkv, K, D), dk_own, dv_own
    (B, Hkv, S*G, D), the last two None in a view without streams."""
    plain, bundled, view = cache
    if not view.bundles:
        return (*attention_backward(dy, plain), None, None)
    dq = get_xp(dy).empty_like(dy)                        # (B, H, T + S*G, D)
    d_out, dk, dv, dk_own, dv_own = bundle_backward(to_bundles(dy, view), bundled)
    from_bundles(d_out, view, dq)
    if plain is not None:
        first = view.main - (view.bundles if view.sees_own is not None else 0)
        # main keys serve both groups of rows: a branch in the forward is a plus here
        dq[:, :, :first], dk_plain, dv_plain = attention_backward(dy[:, :, :first], plain)
        dk, dv = dk + dk_plain, dv + dv_plain             # (B, Hkv, K, D)
    batch, kv_heads, _, _, width = dk_own.shape
    return (dq, dk, dv, dk_own.reshape(batch, kv_heads, -1, width),
            dv_own.reshape(batch, kv_heads, -1, width))


def to_bundles(x, view):
    """Rows (B, H, T + S*G, D) -> bundles (B, H, S, W, D), W = G, or 1 + G with the main row."""
    xp = get_xp(x)
    batch, heads, _, width = x.shape
    streams = x[:, :, view.main:].reshape(batch, heads, view.bundles, view.streams, width)
    if view.sees_own is None:
        return streams
    main = x[:, :, view.main - view.bundles:view.main, None]      # (B, H, S, 1, D)
    return xp.concatenate([main, streams], axis=3)        # (B, H, S, 1 + G, D)


def from_bundles(x, view, rows):
    """Write bundles (B, H, S, W, D) back to their places in `rows` (B, H, T + S*G, D)."""
    batch, heads, _, wide, width = x.shape
    streams = x[:, :, :, wide - view.streams:]            # (B, H, S, G, D)
    rows[:, :, view.main:] = streams.reshape(batch, heads, -1, width)
    if view.sees_own is not None:
        rows[:, :, view.main - view.bundles:view.main] = x[:, :, :, 0]
