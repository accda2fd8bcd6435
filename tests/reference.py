"""Slow, obvious versions of what minispec computes, written from the definitions.

Imports nothing from minispec, so that no mistake can hide by being made twice. One row at a time,
one head at a time, one key at a time; no cache, no batch, no factoring. A configuration is any
object with the attributes that are read here; parameters are a dict of arrays, matrices (in, out).

attention        attention in three loops, under any mask
sees             the definition of multi-stream attention: may this row attend to that one?
run_text         the whole model on one text, with streams beside the positions that ask for them
tree_logits      a draft tree, one chain root..n after the other
decode           plain decoding, the whole text again for every token
conditional      the logits of a stream that is told the token before
"""

import math

import numpy as np


def attention(q, k, v, mask):
    """q (B, H, T, D), k and v (B, Hkv, K, D), mask (B, T, K) bool -> (B, H, T, D)."""
    batch, heads, rows, width = q.shape
    shared = heads // k.shape[1]          # query heads 0 .. shared-1 use key head 0, and so on
    y = np.zeros(q.shape)                                 # (B, H, T, D)
    for b in range(batch):
        for h in range(heads):
            for t in range(rows):
                seen = [j for j in range(k.shape[2]) if mask[b, t, j]]
                keys = [k[b, h // shared, j] for j in seen]
                values = [v[b, h // shared, j] for j in seen]
                y[b, h, t] = attend_one(q[b, h, t], keys, values)
    return y


def attend_one(query, keys, values):
    """One query over a list of keys; nothing to see gives zeros."""
    if not keys:
        return np.zeros(len(query))                       # (D,)
    scores = [float(query @ key) / math.sqrt(len(query)) for key in keys]
    weights = [math.exp(s - max(scores)) for s in scores]
    return sum(w / sum(weights) * value for w, value in zip(weights, values))     # (D,)


class Row:
    """One row of the model: position t of the text, stream g of it (0: the main row)."""

    def __init__(self, t, g, x):
        self.t, self.g, self.x = t, g, x


def sees(row, other, main_sees_streams):
    """May `row` attend to `other`? The paper's eqs. 1 and 2 in words."""
    if other.g == 0:                      # everybody sees the main rows up to its own position
        return other.t <= row.t
    if other.t != row.t:                  # nobody sees the streams of another position
        return False
    if row.g == 0:                        # a main row sees its own streams only with PMLR eq. 1
        return main_sees_streams
    return other.g <= row.g               # stream g sees streams 1..g


class Reference:
    """The model's parts, for single rows (C,)."""

    def __init__(self, params, config, streams=None):
        self.params, self.config, self.streams = params, config, streams

    def norm(self, name, x):
        gain, eps = self.params[name + ".gain"], self.config.norm_eps
        if self.config.norm == "rms":
            return gain * x / math.sqrt(sum(x * x) / len(x) + eps)
        centred = x - sum(x) / len(x)                     # (C,)
        scale = math.sqrt(sum(centred * centred) / len(x) + eps)
        return gain * centred / scale + self.params[name + ".bias"]

    def project(self, name, x, row):
        """x W + b, and the adapter: for every row, or in lossless mode for stream rows alone."""
        y = x @ self.params[name + ".w"]                  # (O,)
        if name + ".b" in self.params:
            y = y + self.params[name + ".b"]              # (O,)
        if name + ".lora_a" in self.params and (self.streams.mode == "shared" or row.g > 0):
            update = self.params[name + ".lora_a"] @ self.params[name + ".lora_b"]    # (I, O)
            y = y + self.streams.lora_alpha / self.streams.lora_rank * (x @ update)   # (O,)
        return y

    def position(self, row):
        """Position id: t of a main row; t + g of a stream, or t, as the setting says."""
        return row.t + row.g if row.g and self.streams.positions == "ahead" else row.t

    def heads(self, flat, count):
        return [flat[h * self.config.head_dim:(h + 1) * self.config.head_dim]
                for h in range(count)]

    def rope(self, x, row):
        """Turn pair (i, i + D/2) by position * theta^(-2i/D)."""
        if self.config.positions != "rope":
            return x
        return rotate(x, [self.position(row) * self.config.rope_theta ** (-2 * i / len(x))
                          for i in range(len(x) // 2)])

    def turn(self, x, row):
        """The value-rotation variant: values of stream g turn by g times one angle."""
        if not row.g or self.streams.kind != "rotation":
            return x
        return rotate(x, [row.g * self.streams.rotation_angle] * (len(x) // 2))

    def block(self, layer, rows):
        """Every row through one block; all rows' keys come from the block's input."""
        name, c = f"blocks.{layer}.", self.config
        with_streams = self.streams is not None and self.streams.main_sees_streams
        queries, keys, values = [], [], []
        for row in rows:
            h = self.norm(name + "norm1", row.x)          # (C,)
            q = self.heads(self.project(name + "attn.q", h, row), c.heads)
            k = self.heads(self.project(name + "attn.k", h, row), c.kv_heads)
            v = self.heads(self.project(name + "attn.v", h, row), c.kv_heads)
            queries.append([self.rope(x, row) for x in q])
            keys.append([self.rope(x, row) for x in k])
            values.append([self.turn(x, row) for x in v])
        for n, row in enumerate(rows):
            seen = [j for j, other in enumerate(rows) if sees(row, other, with_streams)]
            y = []
            for h in range(c.heads):
                shared = h // (c.heads // c.kv_heads)
                y.append(attend_one(queries[n][h], [keys[j][shared] for j in seen],
                                    [values[j][shared] for j in seen]))
            row.x = row.x + self.project(name + "attn.out", np.concatenate(y), row)
        for row in rows:
            row.x = row.x + self.mlp(name + "mlp", self.norm(name + "norm2", row.x), row)

    def mlp(self, name, x, row):
        act = {"silu": silu, "gelu": gelu}[self.config.activation]
        hidden = self.project(name + ".up", x, row)       # (F,)
        if self.config.gated:
            hidden = act(self.project(name + ".gate", x, row)) * hidden       # (F,)
        else:
            hidden = act(hidden)                          # (F,)
        return self.project(name + ".down", hidden, row)

    def embed(self, token, t):
        x = self.params["embed.tokens"][token]            # (C,)
        if self.config.positions == "learned":
            x = x + self.params["embed.positions"][t]     # (C,)
        return x

    def insert(self, main, g):
        """s[t, g] = f(m[t]) + P[g], and a learned position moves on from t to t + g."""
        x = main.x                                        # (C,)
        if self.streams.insertion_rank:
            down, up = (self.params["streams.insert." + n] for n in ("down", "up"))
            x = x @ down @ up                             # (C,)
        if self.streams.kind == "embedding":
            x = x + self.params["streams.embed"][g - 1]   # (C,)
        if self.config.positions == "learned" and self.streams.positions == "ahead":
            table = self.params["embed.positions"]        # (max_positions, C)
            x = x + table[min(main.t + g, len(table) - 1)] - table[main.t]    # (C,)
        return Row(main.t, g, x)

    def head(self, x):
        """Logits of a normed row."""
        if "head.w" in self.params:
            return x @ self.params["head.w"]              # (V,)
        return self.params["embed.tokens"] @ x            # (V,)


def run_text(params, config, ids, streams=None, bundles=()):
    """The model on one text, streams beside the positions `bundles`.

    -> logits (T, V); hidden (T, C) at layer L-A; {t: normed stream states (G, C)}.
    """
    ref = Reference(params, config, streams)
    top = streams.layers if streams is not None else 0
    rows = [Row(t, 0, ref.embed(token, t)) for t, token in enumerate(ids)]
    for layer in range(config.layers - top):
        ref.block(layer, rows)
    hidden = np.array([row.x for row in rows])            # (T, C)
    for t in bundles:
        rows += [ref.insert(rows[t], g) for g in range(1, streams.count + 1)]
    for layer in range(config.layers - top, config.layers):
        ref.block(layer, rows)
    normed = [ref.norm("norm", row.x) for row in rows]
    logits = np.array([ref.head(x) for x in normed[:len(ids)]])           # (T, V)
    states = {t: np.array([x for x, row in zip(normed, rows) if row.t == t and row.g])
              for t in bundles}
    return logits, hidden, states


def bundles_of(prompt, ids, streams):
    """Positions whose main rows see streams: the prompt's last and all after it, or none."""
    if streams is None or not streams.main_sees_streams:
        return ()
    return range(prompt - 1, len(ids))


def chain_to(parent, n):
    """Nodes root..n."""
    return chain_to(parent, parent[n]) + [n] if n > 0 else [0]


def tree_logits(params, config, prefix, parent, token, streams=None, prompt=None):
    """(N, V): logits at each node, from a text of its own: prefix + tokens of root..n.

    prompt: how many ids of the prefix were the prompt; it decides who has streams if main rows
    see them.
    """
    rows = []
    for n in range(len(parent)):
        ids = list(prefix) + [token[m] for m in chain_to(parent, n)]
        bundles = bundles_of(prompt or len(prefix), ids, streams)
        rows.append(run_text(params, config, ids, streams, bundles)[0][-1])
    return np.array(rows)                                 # (N, V)


def decode(params, config, prompt, count, streams=None, choose=None):
    """`count` new ids, one after the other, the whole text again for each.

    choose(logits, position of the new token) -> id; None: the lowest id of the largest logits.
    """
    ids = list(prompt)
    for _ in range(count):
        bundles = bundles_of(len(prompt), ids, streams)
        logits = run_text(params, config, ids, streams, bundles)[0][-1]       # (V,)
        best = max(range(len(logits)), key=lambda v: (logits[v], -v))
        ids.append(choose(logits, len(ids)) if choose else best)
    return ids[len(prompt):]


def conditional(params, config, state, g, token):
    """Logits (V,) of stream g's normed state (C,), told that the token before is `token`."""
    a, b, w = (params["transitions." + n][g - 1] for n in ("state", "token", "out"))
    z = state + silu(state @ a + params["embed.tokens"][token] @ b) @ w       # (C,)
    return Reference(params, config).head(z)


def softmax(x):
    weights = [math.exp(v - max(x)) for v in x]
    return np.array(weights) / sum(weights)               # (n,)


def silu(x):
    return x / (1 + np.exp(-x))                           # (n,)


def gelu(x):
    return np.array([v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v ** 3)))
                     for v in x])                         # (n,)


def rotate(x, angles):
    """Turn each pair (x[i], x[i + D/2]) in its plane by angles[i]."""
    y, half = np.zeros(len(x)), len(x) // 2               # (D,)
    for i, angle in enumerate(angles):
        y[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        y[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return y


def inverse_cdf(logits, coin, temperature):
    """The first id at which the summed probabilities pass the coin."""
    total = 0.0
    for v, prob in enumerate(softmax(np.asarray(logits) / temperature)):
        total += prob
        if total > coin:
            return v
    return len(logits) - 1
