"""Speculative Streaming: how streams enter, and the top layers that they share with the main rows.

Once, below the top A layers, each bundle's main row m[t] spawns its G streams (paper eq. 3):

    s[t, g] = f(m[t]) + P[g]          f: the identity, or a low-rank map;  P: stream embeddings

P is kept in units of `embed_scale`: hidden states of a model that exists may be large, and both P's
start and Adam's steps, which have the size of the learning rate whatever the gradient, would leave
P too small beside them to tell the streams apart (fine_tune.py).

From there on streams are rows like any other: the same norms, projections and MLPs, positions t+g,
and a mask that lets stream (t, g) see main rows <= t and streams (t, 1..g). Their outputs go
through the same head; stream g predicts token t + 1 + g.

Read first: masks.py, transformer.py. Proven by: tests/test_streams.py, tests/test_model_grad.py.
"""

import numpy as np

from .attention import rope_table
from .backend import get_xp, scatter_add
from .masks import stream_positions
from .rope_scaling import rope_stretch
from .transformer import Call, block_backward, block_forward


# --- insertion ----------------------------------------------------------------------------------

def insert_forward(params, streams, main, positions):
    """s[t, g] = f(m[t]) + P[g].   main (B, S, C), positions (1 or B, S) -> (B, S*G, C).   eq. 3.

    With learned positions and streams "ahead", the row also moves from position t to t + g:
    + E[t+g] - E[t] of the position table (at its end: the last entry). `positions` are entries of
    that table, config.position_offset included.
    cache: main, main @ down, position ids of the rows and of the streams, batch shape.
    """
    xp = get_xp(main)
    (batch, bundles, width), count = main.shape, streams.count
    low = None
    base = main                                           # (B, S, C)
    if streams.insertion_rank:
        low = main @ params["streams.insert.down"]        # (B, S, eta)
        base = low @ params["streams.insert.up"]          # (B, S, C)
    s = xp.empty((batch, bundles, count, width), dtype=main.dtype)        # (B, S, G, C)
    s[:] = base[:, :, None]
    if "streams.embed" in params:
        s += params["streams.embed"] * streams.embed_scale
    moved = None
    if "embed.positions" in params and streams.positions == "ahead":
        table = params["embed.positions"]                 # (max_positions, C)
        ahead = stream_positions(positions, count).reshape(*positions.shape, count)
        moved = xp.asarray(positions), xp.asarray(np.minimum(ahead, len(table) - 1))
        s += table[moved[1]] - table[moved[0]][:, :, None]
    return s.reshape(batch, bundles * count, width), (main, low, moved)


def insert_backward(ds, cache, params, streams, grads):
    """ds (B, S*G, C) -> dmain (B, S, C). A copy per stream in the forward is a sum here."""
    main, low, moved = cache
    batch, bundles, width = main.shape
    ds = ds.reshape(batch, bundles, streams.count, width)         # (B, S, G, C)
    # forward: s += table[t + g] - table[t]
    if moved is not None and "embed.positions" in grads:
        here = np.broadcast_shapes(moved[0].shape, (batch, bundles))
        xp = get_xp(ds)
        scatter_add(grads["embed.positions"], xp.broadcast_to(moved[1], ds.shape[:3]), ds)
        scatter_add(grads["embed.positions"], xp.broadcast_to(moved[0], here), -ds.sum(axis=2))
    # forward: s += P
    if "streams.embed" in grads:
        grads["streams.embed"] += ds.sum(axis=(0, 1)) * streams.embed_scale
    # forward: s = f(main) for each of the G streams
    dbase = ds.sum(axis=2)                                # (B, S, C)
    if low is None:
        return dbase
    # forward: f(main) = main @ down @ up
    flat = dbase.reshape(-1, width)                       # (B*S, C)
    dlow = dbase @ params["streams.insert.up"].T          # (B, S, eta)
    if "streams.insert.up" in grads:
        grads["streams.insert.up"] += low.reshape(len(flat), -1).T @ flat
        grads["streams.insert.down"] += main.reshape(flat.shape).T @ dlow.reshape(len(flat), -1)
    return dlow @ params["streams.insert.down"].T         # (B, S, C)


# --- positions and call -------------------------------------------------------------------------

class Angles:
    """Rotary tables of a model, made once, and the per-call choices that depend on the config."""

    def __init__(self, config, streams, xp, dtype):
        self.config, self.streams, self.xp = config, streams, xp
        if config.positions == "rope":
            reach = config.max_positions + (streams.count if streams else 0)
            at = xp.arange(reach, dtype="float64")        # (positions,)
            self.table = rope_table(xp, at, config.rotary_dim or config.head_dim,
                                    config.rope_theta, dtype, rope_stretch(config))
        if streams and streams.kind == "rotation":
            # values of stream g turn by g times one small angle, all channel pairs alike (eq. 9)
            turn = xp.arange(1, streams.count + 1, dtype="float64") * streams.rotation_angle
            turn = xp.broadcast_to(turn[:, None], (streams.count, config.head_dim // 2))
            self.turn = xp.cos(turn).astype(dtype), xp.sin(turn).astype(dtype)    # (G, D/2)

    def call(self, view, positions, streams_alone=False):
        """The `Call` for rows `view` whose main rows sit at `positions`.

        positions (1 or B, T) int on the host; in a view without main rows those of the main rows
        that the bundles belong to. streams_alone: the view's main rows are the streams of one
        cached row (`Model.deferred_streams`).
        """
        config, streams, xp = self.config, self.streams, self.xp
        angles = turn = None
        if config.positions == "rope":
            rows = positions[:, :view.main]               # (1 or B, T)
            if view.bundles:
                at = positions[:, -view.bundles:]         # (1 or B, S)
                ahead = streams.positions == "ahead"
                rows = np.concatenate([rows, stream_positions(at, view.streams, ahead)], axis=1)
            rows = xp.asarray(rows)                       # (1 or B, rows)
            angles = tuple(t[rows][:, None] for t in self.table)          # (1 or B, 1, rows, D/2)
        bundles = 1 if streams_alone else view.bundles
        if bundles and streams.kind == "rotation":
            turn = tuple(xp.tile(t, (bundles, 1))[None, None] for t in self.turn)
        return Call(view, angles, turn, self.adapter(0 if streams_alone else view.main))

    def adapter(self, main):
        """(scale, first row) of LoRA: all rows in shared mode, in lossless mode those after the
        `main` first."""
        if self.streams is None or not self.streams.lora_rank:
            return 1.0, 0
        scale = self.streams.lora_alpha / self.streams.lora_rank
        return scale, main if self.streams.mode == "lossless" else 0


# --- the top layers -----------------------------------------------------------------------------

def top_forward(params, config, streams, main, positions, call, store):
    """Insert the streams beside the last S main rows and run the top A layers.

    main (B, T, C): hidden states at layer L-A -> x (B, T + S*G, C), rows laid out as in masks.View.
    In a view without main rows (T = 0) main and positions are those that the bundles belong to.
    """
    view, caches, inserted = call.view, [], None
    x = main[:, :view.main]                               # (B, T, C)
    if view.bundles:
        s, inserted = insert_forward(params, streams, main[:, -view.bundles:],
                                     positions[:, -view.bundles:] + config.position_offset)
        x = get_xp(x).concatenate([x, s], axis=1) if view.main else s     # (B, T + S*G, C)
    for layer in range(config.layers - (streams.layers if streams else 0), config.layers):
        x, cache = block_forward(params, config, layer, x, call, store)
        caches.append(cache)
    return x, (caches, inserted)


def top_backward(dx, cache, params, config, streams, call, store, grads):
    """dx (B, T + S*G, C) -> dmain (B, T, C) at layer L-A; of the S rows that the bundles belong to
    in a view without main rows."""
    caches, inserted = cache
    view = call.view
    for layer in reversed(range(config.layers - len(caches), config.layers)):
        dx = block_backward(dx, caches.pop(), params, config, layer, call, store, grads)
    dmain = dx[:, :view.main]                             # (B, T, C)
    if view.bundles:
        # forward: streams inserted beside the last S main rows
        dinsert = insert_backward(dx[:, view.main:], inserted, params, streams, grads)
        if not view.main:
            return dinsert                                # (B, S, C)
        dmain = dmain.copy()
        dmain[:, view.main - view.bundles:] += dinsert
    return dmain


class Segments:
    """Main keys and values of one training pass, segment after segment, and their gradients.

    Segment training runs the streams of one slice of positions at a time (paper app. C). Main rows
    of a segment attend to the keys of earlier segments, so a backward that visits the segments in
    reverse order meets each key's gradients from later segments first, and keeps them here.

    Streams may also run without main rows, whose keys are here already (T = 0, lossless mode):
    then `start` is where the keys end that they see, and there is nobody to hand gradients to.
    """

    def __init__(self, xp):
        self.xp, self.start = xp, 0
        self.keys, self.values, self.grads = {}, {}, {}

    def append(self, layer, k, v):
        """k, v (B, Hkv, T, D) of the segment that begins at `start` -> all keys up to its end."""
        if not k.shape[2]:
            return tuple(a[layer][:, :, :self.start] for a in (self.keys, self.values))
        if self.start:
            past_k = self.keys[layer][:, :, :self.start]  # (B, Hkv, P, D)
            past_v = self.values[layer][:, :, :self.start]
            k = self.xp.concatenate([past_k, k], axis=2)  # (B, Hkv, P + T, D)
            v = self.xp.concatenate([past_v, v], axis=2)  # (B, Hkv, P + T, D)
        if layer not in self.keys or k.shape[2] >= self.keys[layer].shape[2]:
            self.keys[layer], self.values[layer] = k, v   # a recomputed segment changes nothing
        return k, v

    def backward(self, layer, dk, dv):
        """dk, dv (B, Hkv, P + T, D) -> the gradients of this segment's own T keys, now complete."""
        if dk.shape[2] == self.start:                     # no main rows: frozen, all of them
            return dk[:, :, self.start:], dv[:, :, self.start:]
        if layer in self.grads:
            end = dk.shape[2]
            dk = dk + self.grads[layer][0][:, :, :end]    # (B, Hkv, P + T, D)
            dv = dv + self.grads[layer][1][:, :, :end]    # (B, Hkv, P + T, D)
        self.grads[layer] = dk, dv
        return dk[:, :, self.start:], dv[:, :, self.start:]
