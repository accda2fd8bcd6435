"""One training pass: forward through main rows and streams, losses, and the whole way back.

    embed -> L-A blocks, main rows only -> streams enter -> A blocks, main rows and streams
          -> final norm -> head -> n-gram loss

With `segments` > 1 the streams of one slice of positions run at a time: the forward keeps only the
main keys of each slice; the backward visits the slices in reverse and runs each again before it
goes back through it. Memory falls, gradients stay the same (a test shows it).

Nothing is computed twice, or for nobody. A frozen trunk keeps no activations, or is not run at all
where the batch brings its states (trunk.py). In lossless mode the top layers run once for the main
rows, which are frozen too, to fill the store with their keys and values; then the streams run
alone, and only they are gone back through.

Read first: streams.py, loss.py, transitions.py, pruning.py.
Proven by: tests/test_model_grad.py (directional derivatives of everything together).
"""

import numpy as np

from .backend import get_xp
from .data import NO_TARGET, pad_batch
from .draft_vocab import head_columns
from .loss import Metrics, head_loss
from .masks import View, causal_documents, in_window
from .parameters import is_base
from .pruning import exit_loss
from .streams import Segments, top_backward, top_forward
from .transformer import (block_backward, block_forward, embed_backward, embed_forward,
                          norm_backward, norm_forward)
from .transitions import transition_backward, transition_forward


class Pass:
    """Forward and backward of one micro-batch.

    model: config, streams (StreamConfig or None), params, angles. batch: data.Batch (host).
    grads: {name: zero-filled array} of what is trained; added to.
    weights: dict with "main", "stream", "next" (alpha of each loss), "counts" (1+G,) trained
    targets of the whole optimiser step, and "detach" (True: conditional streams train on top of
    the streams and send no gradient into them).
    """

    def __init__(self, model, batch, grads, weights, segments=1):
        self.model, self.batch, self.grads, self.weights = model, batch, grads, weights
        self.config, self.streams, self.params = model.config, model.streams, model.params
        self.xp = get_xp(self.params["embed.tokens"])
        self.bottom, self.columns = model.bottom, None
        if model.draft_ids is not None:                   # not the model's copy: the head may train
            self.columns = head_columns(self.params, model.draft_ids)
        self.main_frozen = (self.streams is not None and self.streams.mode == "lossless"
                            and not any(is_base(n) for n in grads))
        self.metrics = Metrics()
        context = causal_documents(batch.documents)       # (B, T, T)
        if self.config.sliding_window:
            context &= in_window(batch.positions, batch.positions, self.config.sliding_window)
        self.context = self.xp.asarray(context)           # (B, T, T)
        self.store = Segments(self.xp)
        self.slices = self.cut(segments)

    def cut(self, segments):
        """[(first, last+1)] slices of positions; all positions before the first target ride with
        the first slice, since they carry no streams."""
        rows, start = self.batch.ids.shape[1], self.batch.streams_from
        edges = np.linspace(start, rows, segments + 1).round().astype(int)    # (segments+1,)
        edges[0] = 0
        return [(int(a), int(b)) for a, b in zip(edges, edges[1:]) if b > a]

    def run(self):
        """Metrics of the batch; gradients are in `grads`."""
        if self.batch.streams_from == self.batch.ids.shape[1]:
            return self.metrics                           # nothing to learn: no update, no NaN
        x, trail = self.trunk()
        self.early_exit(x)
        if self.main_frozen:
            self.top_of_streams(x)
            return self.metrics
        dx = self.top(x)                                  # (B, T, C)
        if trail is None:
            return self.metrics
        self.store.start = 0
        call, c_embed, caches = trail
        for layer in reversed(range(self.bottom)):
            dx = block_backward(dx, caches.pop(), self.params, self.config, layer, call, self.store,
                                self.grads)
        embed_backward(dx, c_embed, self.grads)
        return self.metrics

    def trains_below(self):
        """Does anything below the top layers want a gradient? A frozen trunk needs no backward."""
        return any(n.startswith("embed.") or (n.startswith("blocks.")
                                              and int(n.split(".")[1]) < self.bottom)
                   for n in self.grads)

    def trunk(self):
        """States at layer L-A (B, T, C), and what the way back needs; None if that part is frozen.

        Raises ValueError if the batch brings states of a trunk that is to be trained.
        """
        batch, xp, trained = self.batch, self.xp, self.trains_below()
        if batch.hidden is not None:
            if trained:
                raise ValueError("the batch brings hidden states, but layers below are trained")
            return xp.asarray(batch.hidden).astype(self.model.dtype), None
        x, c_embed = embed_forward(self.params, xp.asarray(batch.ids),
                                   xp.asarray(batch.positions + self.config.position_offset))
        call = self.model.angles.call(View(batch.ids.shape[1], self.context), batch.positions)
        caches = []
        for layer in range(self.bottom):
            x, cache = block_forward(self.params, self.config, layer, x, call, self.store)
            if trained:
                caches.append(cache)
        return x, (call, c_embed, caches) if trained else None

    def top_of_streams(self, x):
        """Lossless mode: main rows forward only, then the streams of each slice alone, and back.

        x (B, T, C) at layer L-A. Main rows are frozen and never see streams, so all that the
        streams need of them are keys and values.
        """
        batch, rows = self.batch, x.shape[1]
        call = self.model.angles.call(View(rows, self.context), batch.positions)
        self.store.start, y = 0, x
        for layer in range(self.bottom, self.config.layers):
            y, _ = block_forward(self.params, self.config, layer, y, call, self.store)
        if self.weights["main"]:                          # wanted as a metric
            self.losses(y, call.view, 0)
        slices = [(max(first, batch.streams_from), last) for first, last in self.slices]
        for first, last in (s for s in slices if s[0] < s[1]):
            self.store.start = last
            view = View(0, self.context[:, first:last, :last], last - first, self.streams.count)
            at = batch.positions[:, first:last]           # (B, S)
            call = self.model.angles.call(view, at)
            y, cache = top_forward(self.params, self.config, self.streams, x[:, first:last], at,
                                   call, self.store)
            dy = self.losses(y, view, first)              # (B, S*G, C)
            top_backward(dy, cache, self.params, self.config, self.streams, call, self.store,
                         self.grads)

    def top(self, x):
        """Streams, top layers, losses, and back.   x (B, T, C) at layer L-A -> dx (B, T, C)."""
        dx = self.xp.zeros_like(x)                        # (B, T, C)
        alone = len(self.slices) == 1
        if not alone:                                     # first sweep: only to fill the store
            for first, last in self.slices:
                self.segment_forward(x, first, last)
        for first, last in reversed(self.slices):
            y, cache, call = self.segment_forward(x, first, last)
            dy = self.losses(y, call.view, first)         # (B, rows, C)
            dx[:, first:last] = top_backward(dy, cache, self.params, self.config, self.streams,
                                             call, self.store, self.grads)
        return dx

    def segment_forward(self, x, first, last):
        """Top layers for main rows first..last-1 and their streams -> (y, cache, call)."""
        self.store.start = first
        start = max(first, self.batch.streams_from)
        bundles = last - start if self.streams else 0
        sees = None
        if bundles and self.streams.main_sees_streams:
            # exactly the rows that predict a completion token have streams
            sees = self.xp.asarray(self.batch.targets[:, start:last, 0] != NO_TARGET)     # (B, S)
        view = View(last - first, self.context[:, first:last, :last], bundles,
                    self.streams.count if bundles else 0, sees)
        call = self.model.angles.call(view, self.batch.positions[:, first:last])
        y, cache = top_forward(self.params, self.config, self.streams, x[:, first:last],
                               self.batch.positions[:, first:last], call, self.store)
        return y, cache, call

    def losses(self, y, view, first):
        """Losses of one segment's rows and their gradient.   y (B, rows, C) -> dy (B, rows, C)."""
        flat_y = y.reshape(-1, y.shape[-1])               # (B * rows, C)
        dy = self.xp.zeros_like(flat_y)                   # (B * rows, C)
        row, group, target, before = self.trained_rows(view, first)
        if len(row):
            row = self.xp.asarray(row)                    # (n,)
            normed, c_norm = norm_forward(self.params, self.config, "norm", flat_y[row])  # (n, C)
            dnormed = self.ngram_loss(normed, group, target)      # (n, C)
            self.transition_loss(normed, dnormed, group, target, before)
            dy[row] = norm_backward(dnormed, c_norm, self.config, self.grads, "norm")
        return dy.reshape(y.shape)

    def trained_rows(self, view, first):
        """Rows of a segment that have a target, sorted by stream.

        -> row in the flattened (B, rows) layout, group 0..G, target, token before it; (n,) each.
        """
        count = max(view.main, view.bundles)
        targets = self.batch.targets[:, first:first + count]      # (B, T, 1+G)
        wanted = targets.transpose(2, 0, 1) != NO_TARGET          # (1+G, B, T)
        wanted[0] &= view.main > 0                        # streams alone: their main rows are done
        wanted[1:] &= view.bundles > 0
        group, b, t = np.nonzero(wanted)                  # (n,) each
        # main row t is row t; stream g of bundle s is row T + s * G + g - 1 (masks.View)
        bundle = t - (count - view.bundles)               # (n,)
        row = np.where(group == 0, t, view.main + bundle * view.streams + group - 1)
        before = self.batch.ids[b, np.minimum(first + t + group, self.batch.ids.shape[1] - 1)]
        return b * view.rows + row, group, targets[b, t, group], before

    def row_weights(self, group, kinds):
        """(n,) alpha / count of each row's stream, on the device."""
        alpha = [self.weights[k] for k in kinds]
        per_row = np.asarray(alpha) / np.maximum(self.weights["counts"], 1)   # (1+G,)
        return self.xp.asarray(per_row[group].astype(str(self.params["embed.tokens"].dtype)))

    def ngram_loss(self, normed, group, target):
        """The paper's loss over main rows and streams -> dnormed (n, C)."""
        count, xp = self.streams.count if self.streams else 0, self.xp
        weights = self.row_weights(group, ["main"] + ["stream"] * count)
        edge = np.searchsorted(group, 1)                  # main rows come first
        if self.model.draft_index is None or edge == len(group):
            loss, hits, dnormed = head_loss(self.params, self.grads, normed, xp.asarray(target),
                                            weights)
        else:
            parts = [self.draft_loss(normed[edge:], target[edge:], weights[edge:])]
            if edge:                                      # main rows need the whole head
                parts.insert(0, head_loss(self.params, self.grads, normed[:edge],
                                          xp.asarray(target[:edge]), weights[:edge]))
            loss, hits, dnormed = (xp.concatenate(part) for part in zip(*parts))
        self.metrics.add_rows(["main"] + [f"stream {g + 1}" for g in range(count)], group, loss,
                              hits)
        return dnormed

    def draft_loss(self, normed, target, weights):
        """head_loss of stream rows, over the draft vocabulary if there is one."""
        if self.columns is not None:
            target = self.model.draft_index[target]       # (n,)  place in the draft vocabulary
        return head_loss(self.params, self.grads, normed, self.xp.asarray(target), weights,
                         self.columns)

    def transition_loss(self, normed, dnormed, group, target, before):
        """Loss of the conditional streams, teacher forced; their gradient is added to dnormed."""
        if self.streams is None or not self.streams.transition_rank or not (group > 0).any():
            return
        params, grads, xp = self.params, self.grads, self.xp
        edges = np.searchsorted(group, np.arange(1, self.streams.count + 2))  # rows by stream
        names = ("transitions.state", "transitions.token", "transitions.out")
        embedded = params["embed.tokens"][xp.asarray(before)]     # (n, C)
        spans = [slice(a, b) for a, b in zip(edges, edges[1:])]
        passes = [transition_forward(normed[span], embedded[span], *(params[n][g] for n in names))
                  for g, span in enumerate(spans)]
        first = edges[0]
        loss, hits, dz = self.draft_loss(
            xp.concatenate([z for z, _ in passes]), target[first:],
            self.row_weights(group[first:], ["next"] * (1 + self.streams.count)))
        for g, (span, (_, cache)) in enumerate(zip(spans, passes)):
            dn, _, *dparams = transition_backward(dz[span.start - first:span.stop - first], cache)
            for name, dparam in zip(names, dparams):
                if name in grads:
                    grads[name][g] += dparam
            if not self.weights.get("detach"):
                dnormed[span] += dn
        kinds = [f"next {g + 1}" for g in range(self.streams.count)]
        self.metrics.add_rows(kinds, group[first:] - 1, loss, hits)

    def early_exit(self, x):
        """Train the pruning map on the states at layer L-A.   x (B, T, C)."""
        if self.streams is None or not self.streams.prune_rank:
            return
        targets, xp = self.batch.targets[..., 0], self.xp         # (B, T)
        if self.model.draft_index is not None:            # drafts are all that it will judge
            targets = np.where(targets == NO_TARGET, NO_TARGET, self.model.draft_index[targets])
        b, t = np.nonzero(targets != NO_TARGET)           # (n,) each
        if not len(b):
            return
        target = targets[b, t]                            # (n,)
        per_row = np.full(len(b), 1.0 / max(self.weights["counts"][0], 1))    # (n,)
        rows = x[xp.asarray(b), xp.asarray(t)]            # (n, C)
        loss, hits = exit_loss(self.params, self.config, self.grads, rows, xp.asarray(target),
                               xp.asarray(per_row.astype(str(x.dtype))),
                               self.columns)
        self.metrics.add_rows(["exit"], np.zeros(len(b), dtype=int), loss, hits)


def heldout_metrics(model, documents, batch=16):
    """Metrics of documents (data.Document) without any training."""
    metrics, streams = Metrics(), model.streams.count if model.streams else 0
    weights = {"main": 1.0, "stream": 1.0, "next": 1.0, "counts": np.ones(1 + streams)}
    for at in range(0, len(documents), batch):
        # no parameter has an entry in `grads`, so nothing is trained
        part = pad_batch(documents[at:at + batch], streams, model.draft_index)
        metrics.merge(Pass(model, part, {}, weights).run())
    return metrics
