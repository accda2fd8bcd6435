"""The key/value cache: main rows only, with append, prune, keep and rollback.

A step appends the keys and values of its rows behind the `length` rows that are settled. They are
pending until `keep(path)` settles those of the accepted tree nodes, in path order, and forgets the
rest. A path is rarely contiguous in node order: cutting off the tail instead would leave a
rejected sibling's row behind (case H-04). Stream rows never come here.

Read first: attention.py. Proven by: tests/test_cache.py (cases H-04, H-12).
"""


class KVCache:
    """Keys and values of all layers for one text.

    keys, values  (L, 1, Hkv, capacity, D); the capacity grows when a wide tree needs it
    length        settled rows P: prompt + emitted - 1 after every decode step
    """

    def __init__(self, xp, config, dtype, capacity=None):
        self.capacity = capacity or config.max_positions
        shape = (config.layers, 1, config.kv_heads, self.capacity, config.head_dim)
        self.keys = xp.zeros(shape, dtype=dtype)          # (L, 1, Hkv, capacity, D)
        self.values = xp.zeros(shape, dtype=dtype)        # (L, 1, Hkv, capacity, D)
        self.xp, self.length = xp, 0

    def __len__(self):
        return self.length

    def append(self, layer, k, v):
        """Put k, v (1, Hkv, T, D) behind the settled rows -> all P + T keys and values (views).

        Appending again to the same layer before `keep` replaces the pending rows. T = 0 reads.
        """
        end = self.length + k.shape[2]
        if end > self.capacity:
            self.grow(end)
        self.keys[layer, :, :, self.length:end] = k
        self.values[layer, :, :, self.length:end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def grow(self, capacity):
        """Make room for `capacity` rows; settled and pending rows stay."""
        grown = []
        for store in (self.keys, self.values):
            shape = (*store.shape[:3], max(capacity, 2 * self.capacity), store.shape[4])
            wider = self.xp.zeros(shape, dtype=store.dtype)       # (L, 1, Hkv, wider, D)
            wider[:, :, :, :self.capacity] = store
            grown.append(wider)
        (self.keys, self.values), self.capacity = grown, grown[0].shape[3]

    def prune(self, kept, layers):
        """Of the pending rows in the first `layers` layers keep rows `kept` (ascending ints)."""
        self._move(kept, slice(0, layers))

    def keep(self, path):
        """Settle the pending rows of `path` (ascending node indices), in that order."""
        self._move(path, slice(None))
        self.length += len(path)

    def _move(self, rows, layers):
        if list(rows) == list(range(len(rows))):          # already in place
            return
        source = self.xp.asarray([self.length + int(r) for r in rows])    # (rows,)
        target = slice(self.length, self.length + len(rows))
        for store in (self.keys, self.values):
            store[layers, :, :, target] = store[layers][:, :, :, source]

    def rollback(self, count):
        """Forget the last `count` settled rows. Raises ValueError if there are fewer."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot roll back {count} of {self.length} cached positions")
        self.length -= count
