"""Low-rank adapters (LoRA) and the projection that they belong to.

A projection is y = x W + b. An adapter adds (alpha / R) x A B to it, for all rows (shared mode) or
for the stream rows alone (lossless mode). Main rows come first in every call, so "stream rows
only" is a slice: rows from `first` on. That slice is the whole proof that lossless mode leaves the
base model's output alone: no main row ever meets A or B.

Gradients: `grads` holds one zero-filled array per trainable parameter. A name that is not in it is
frozen; its gradient is not computed at all, which is what makes frozen gradients exactly zero.

Read first: layers.py. Proven by: tests/test_lora.py, tests/test_model_grad.py.
"""

from .layers import linear_backward, linear_forward, rows_matmul


def project_forward(params, name, x, adapter):
    """y = x W + b, plus scale * x[first:] A B where an adapter `name.lora_a/b` exists.

    x (B, rows, I) -> y (B, rows, O).   Hu et al. 2021, eq. 3.
    adapter: (scale, first): rows from `first` on are adapted.   cache: x, x A, adapter.
    """
    y, _ = linear_forward(x, params[name + ".w"], params.get(name + ".b"))
    a = params.get(name + ".lora_a")
    if a is None:
        return y, (x, None, adapter)
    scale, first = adapter
    low = rows_matmul(x[:, first:], a)                    # (B, adapted rows, R)
    update = rows_matmul(low, params[name + ".lora_b"])   # (B, adapted rows, O)
    update *= scale
    y[:, first:] += update
    return y, (x, low, adapter)


def project_backward(dy, cache, params, grads, name):
    """dy (B, rows, O) -> dx (B, rows, I); parameter gradients are added to `grads`."""
    x, low, (scale, first) = cache
    w = name + ".w"
    # forward: y = x @ w + b
    dx, dw, db = linear_backward(dy, (x, params[w]), need_dw=w in grads,
                                 need_db=name + ".b" in grads)
    if w in grads:
        grads[w] += dw
    if name + ".b" in grads:
        grads[name + ".b"] += db
    if low is None:
        return dx
    # forward: y[first:] += scale * (x[first:] @ a) @ b
    dupdate = dy[:, first:] * scale                       # (B, adapted rows, O)
    trained = name + ".lora_a" in grads
    dlow, db_, _ = linear_backward(dupdate, (low, params[name + ".lora_b"]), trained, False)
    da_x, da, _ = linear_backward(dlow, (x[:, first:], params[name + ".lora_a"]), trained, False)
    dx[:, first:] += da_x
    if trained:
        grads[name + ".lora_a"] += da
        grads[name + ".lora_b"] += db_
    return dx


def adapter_names(model_config, stream_config):
    """Names of the projections that get an adapter, e.g. "blocks.4.attn.q"."""
    if not stream_config.lora_rank:
        return []
    first = 0 if stream_config.lora_all_layers else model_config.layers - stream_config.layers
    targets = [t for t in stream_config.lora_targets if t != "mlp.gate" or model_config.gated]
    return [f"blocks.{i}.{t}" for i in range(first, model_config.layers) for t in targets]


def merge(params, scale):
    """A copy of `params` with every adapter folded into its matrix: W + scale A B.

    For shared mode only: a merged matrix serves all rows.
    """
    merged = {k: v for k, v in params.items() if not k.endswith((".lora_a", ".lora_b"))}
    for name in params:
        if name.endswith(".lora_a"):
            base = name[:-len(".lora_a")]
            update = params[name] @ params[base + ".lora_b"]      # (I, O)
            merged[base + ".w"] = params[base + ".w"] + scale * update    # (I, O)
    return merged
