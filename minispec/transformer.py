"""The block and the model's two ends (embedding and head), forward and backward.

A block is pre-norm: x = x + attention(norm1(x)); x = x + mlp(norm2(x)). It runs rows: of the
prompt, of a decode step, of a draft tree, of streams. What differs between them is the `View`
(masks.py: who sees whom) and the rotary angles of their positions; nothing else.

`Call` bundles what every block of a call needs. `store` is where main keys and values live: a
`KVCache` in decoding, a `Segments` store in training. It gives back all main keys up to now.

Read first: layers.py, masks.py, attention.py, lora.py. Proven by: tests/test_model_grad.py
(backward), tests/test_cache.py (steps equal the full forward).
"""

from dataclasses import dataclass

from .attention import (merge_heads, multi_stream_backward, multi_stream_forward, rotate_backward,
                        rotate_forward, split_heads)
from .backend import scatter_add
from .layers import (ACTIVATIONS, layernorm_backward, layernorm_forward, linear_backward,
                     linear_forward, rmsnorm_backward, rmsnorm_forward)
from .lora import project_backward, project_forward
from .masks import View


@dataclass(frozen=True)
class Call:
    """What all blocks of one call share.

    view     masks.View of the rows
    angles   None, or cos and sin of all rows, each (1 or B, 1, rows, D/2)
    turn     None, or cos and sin (1, 1, stream rows, D/2) that rotate the values of the last rows
    adapter  (scale, first row that LoRA applies to)
    """

    view: View
    angles: object
    turn: object
    adapter: tuple


# --- norm: one of two kinds ---------------------------------------------------------------------

def norm_forward(params, config, name, x):
    """RMSNorm or LayerNorm with the parameters `name`.gain (and .bias).   x (..., C) -> (..., C)

    The identity for "norm" where the model has no norm before its head.
    """
    if name == "norm" and not config.final_norm:
        return x, None
    if config.norm == "rms":
        return rmsnorm_forward(x, params[name + ".gain"], config.norm_eps)
    return layernorm_forward(x, params[name + ".gain"], params[name + ".bias"], config.norm_eps)


def norm_backward(dy, cache, config, grads, name):
    """dy (..., C) -> dx (..., C); gradients of gain and bias are added to `grads`."""
    if cache is None:
        return dy
    backward = rmsnorm_backward if config.norm == "rms" else layernorm_backward
    dx, *dparams = backward(dy, cache)
    for kind, dparam in zip((".gain", ".bias"), dparams):
        if name + kind in grads:
            grads[name + kind] += dparam
    return dx


# --- attention sublayer -------------------------------------------------------------------------

def attend_forward(params, config, layer, x, call, store):
    """Project, (normalise,) rotate, attend, project back.   x (B, rows, C) -> (B, rows, C)."""
    name, view = f"blocks.{layer}.attn", call.view
    q, cq = project_forward(params, name + ".q", x, call.adapter)         # (B, rows, H*D)
    k, ck = project_forward(params, name + ".k", x, call.adapter)         # (B, rows, Hkv*D)
    v, cv = project_forward(params, name + ".v", x, call.adapter)         # (B, rows, Hkv*D)
    q = split_heads(q, config.heads)                      # (B, H, rows, D)
    k = split_heads(k, config.kv_heads)                   # (B, Hkv, rows, D)
    v = split_heads(v, config.kv_heads)                   # (B, Hkv, rows, D)
    cqn = ckn = None
    if config.qk_norm:
        q, cqn = norm_forward(params, config, name + ".q_norm", q)        # (B, H, rows, D)
        k, ckn = norm_forward(params, config, name + ".k_norm", k)        # (B, Hkv, rows, D)
    if call.angles is not None:
        q, _ = rotate_forward(q, *call.angles)            # (B, H, rows, D)
        k, _ = rotate_forward(k, *call.angles)            # (B, Hkv, rows, D)
    if call.turn is not None:
        turned = rows_of(call.turn)                       # the last rows are streams
        v[:, :, turned], _ = rotate_forward(v[:, :, turned], *call.turn)
    main = view.main
    keys, values = store.append(layer, k[:, :, :main], v[:, :, :main])    # (B, Hkv, P + T, D)
    y, c_attn = multi_stream_forward(q, keys, values, k[:, :, main:], v[:, :, main:], view)
    y, co = project_forward(params, name + ".out", merge_heads(y), call.adapter)
    return y, (cq, ck, cv, cqn, ckn, c_attn, co)          # (B, rows, C)


def attend_backward(dy, cache, params, config, layer, call, store, grads):
    """dy (B, rows, C) -> dx (B, rows, C).

    `store.backward` adds the gradients that later segments sent to this call's main keys, and
    passes on those of the keys before this call.
    """
    name, view = f"blocks.{layer}.attn", call.view
    cq, ck, cv, cqn, ckn, c_attn, co = cache
    xp_cat = store.xp.concatenate
    # forward: y = out(merge(attention(q, keys, values)))
    dy = project_backward(dy, co, params, grads, name + ".out")           # (B, rows, H*D)
    dq, dkeys, dvalues, dk_own, dv_own = multi_stream_backward(split_heads(dy, config.heads),
                                                               c_attn)
    # forward: keys, values = store.append(k[main rows], v[main rows])
    dk, dv = store.backward(layer, dkeys, dvalues)        # (B, Hkv, T, D)
    if view.bundles:
        dk = xp_cat([dk, dk_own], axis=2)                 # (B, Hkv, rows, D)
        dv = xp_cat([dv, dv_own], axis=2)                 # (B, Hkv, rows, D)
    # forward: v[stream rows] = rotate(v[stream rows])
    if call.turn is not None:
        turned = rows_of(call.turn)
        dv[:, :, turned] = rotate_backward(dv[:, :, turned], call.turn)
    # forward: q, k = rotate(q), rotate(k)
    if call.angles is not None:
        dq = rotate_backward(dq, call.angles)             # (B, H, rows, D)
        dk = rotate_backward(dk, call.angles)             # (B, Hkv, rows, D)
    # forward: q, k = norm(q), norm(k), or nothing
    dq = norm_backward(dq, cqn, config, grads, name + ".q_norm")          # (B, H, rows, D)
    dk = norm_backward(dk, ckn, config, grads, name + ".k_norm")          # (B, Hkv, rows, D)
    # forward: q, k, v = project(x): a branch, so the three gradients add up
    dx = project_backward(merge_heads(dv), cv, params, grads, name + ".v")
    dx += project_backward(merge_heads(dk), ck, params, grads, name + ".k")
    dx += project_backward(merge_heads(dq), cq, params, grads, name + ".q")
    return dx                                             # (B, rows, C)


def rows_of(turn):
    """The rows that value rotation turns: as many as it has angles, from the end."""
    return slice(-turn[0].shape[2], None)


# --- MLP sublayer -------------------------------------------------------------------------------

def mlp_forward(params, config, layer, x, adapter):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate.   (B, rows, C) -> same."""
    name, activate = f"blocks.{layer}.mlp", ACTIVATIONS[config.activation][0]
    up, cu = project_forward(params, name + ".up", x, adapter)            # (B, rows, F)
    if config.gated:
        gate, cg = project_forward(params, name + ".gate", x, adapter)    # (B, rows, F)
        act, ca = activate(gate)                          # (B, rows, F)
        hidden = act * up                                 # (B, rows, F)
    else:
        hidden, ca = activate(up)                         # (B, rows, F)
        cg = act = None
    y, cd = project_forward(params, name + ".down", hidden, adapter)      # (B, rows, C)
    return y, (cu, cg, ca, cd, act, up)


def mlp_backward(dy, cache, params, config, layer, grads):
    """dy (B, rows, C) -> dx (B, rows, C)."""
    name, activate = f"blocks.{layer}.mlp", ACTIVATIONS[config.activation][1]
    cu, cg, ca, cd, act, up = cache
    # forward: y = down(hidden)
    dhidden = project_backward(dy, cd, params, grads, name + ".down")     # (B, rows, F)
    if not config.gated:
        # forward: hidden = act(up(x))
        return project_backward(activate(dhidden, ca), cu, params, grads, name + ".up")
    # forward: hidden = act(gate(x)) * up(x)
    dgate = activate(dhidden * up, ca)                    # (B, rows, F)
    dx = project_backward(dgate, cg, params, grads, name + ".gate")       # (B, rows, C)
    dx += project_backward(dhidden * act, cu, params, grads, name + ".up")
    return dx                                             # (B, rows, C)


# --- block --------------------------------------------------------------------------------------

def block_forward(params, config, layer, x, call, store):
    """One transformer block.   x (B, rows, C) -> (B, rows, C)."""
    if config.residual == "post":
        return post_block_forward(params, config, layer, x, call, store)
    if config.residual in ("parallel", "shared"):
        return parallel_block_forward(params, config, layer, x, call, store)
    h, c1 = norm_forward(params, config, f"blocks.{layer}.norm1", x)
    a, c2 = attend_forward(params, config, layer, h, call, store)
    x = x + a                                             # (B, rows, C)
    h, c3 = norm_forward(params, config, f"blocks.{layer}.norm2", x)
    m, c4 = mlp_forward(params, config, layer, h, call.adapter)
    return x + m, (c1, c2, c3, c4)                        # (B, rows, C)


def block_backward(dx, cache, params, config, layer, call, store, grads):
    """dx (B, rows, C) of the output -> dx of the input. The forward, read upwards."""
    if config.residual == "post":
        return post_block_backward(dx, cache, params, config, layer, call, store, grads)
    if config.residual in ("parallel", "shared"):
        return parallel_block_backward(dx, cache, params, config, layer, call, store, grads)
    c1, c2, c3, c4 = cache
    # forward: x = x + mlp(norm2(x))
    dh = mlp_backward(dx, c4, params, config, layer, grads)
    dx = dx + norm_backward(dh, c3, config, grads, f"blocks.{layer}.norm2")
    # forward: x = x + attend(norm1(x))
    dh = attend_backward(dx, c2, params, config, layer, call, store, grads)
    return dx + norm_backward(dh, c1, config, grads, f"blocks.{layer}.norm1")


def parallel_block_forward(params, config, layer, x, call, store):
    """x + attend(norm1(x)) + mlp(norm2(x)) (GPT-NeoX); "shared": norm1 for both (Phi).

    x (B, rows, C) -> (B, rows, C).
    """
    name, c3 = f"blocks.{layer}.", None
    h, c1 = norm_forward(params, config, name + "norm1", x)
    a, c2 = attend_forward(params, config, layer, h, call, store)
    if config.residual == "parallel":
        h, c3 = norm_forward(params, config, name + "norm2", x)
    m, c4 = mlp_forward(params, config, layer, h, call.adapter)
    return x + a + m, (c1, c2, c3, c4)                    # (B, rows, C)


def parallel_block_backward(dx, cache, params, config, layer, call, store, grads):
    """dx (B, rows, C) of the output -> dx of the input: three branches, so three gradients add."""
    c1, c2, c3, c4 = cache
    name = f"blocks.{layer}."
    dh = attend_backward(dx, c2, params, config, layer, call, store, grads)
    dm = mlp_backward(dx, c4, params, config, layer, grads)
    if config.residual == "parallel":
        dx = dx + norm_backward(dm, c3, config, grads, name + "norm2")
    else:
        dh = dh + dm                                      # (B, rows, C)
    return dx + norm_backward(dh, c1, config, grads, name + "norm1")


def post_block_forward(params, config, layer, x, call, store):
    """x = norm1(x + attend(x)); x = norm2(x + mlp(x)): the norms after the sums (OPT-350M).

    x (B, rows, C) -> (B, rows, C).
    """
    name = f"blocks.{layer}."
    a, c1 = attend_forward(params, config, layer, x, call, store)
    x, c2 = norm_forward(params, config, name + "norm1", x + a)
    m, c3 = mlp_forward(params, config, layer, x, call.adapter)
    x, c4 = norm_forward(params, config, name + "norm2", x + m)
    return x, (c1, c2, c3, c4)                            # (B, rows, C)


def post_block_backward(dx, cache, params, config, layer, call, store, grads):
    """dx (B, rows, C) of the output -> dx of the input. The forward, read upwards."""
    c1, c2, c3, c4 = cache
    name = f"blocks.{layer}."
    # forward: x = norm2(x + mlp(x))
    dx = norm_backward(dx, c4, config, grads, name + "norm2")
    dx = dx + mlp_backward(dx, c3, params, config, layer, grads)
    # forward: x = norm1(x + attend(x))
    dx = norm_backward(dx, c2, config, grads, name + "norm1")
    return dx + attend_backward(dx, c1, params, config, layer, call, store, grads)


# --- the two ends -------------------------------------------------------------------------------

def embed_forward(params, ids, positions):
    """Token embedding, projected to the model's width where it has another (E), plus position
    embedding where the model has one.

    ids and positions (B, T) int -> x (B, T, C).   cache: ids, positions, looked-up rows and the
    projection or None.
    NOTE: CuPy wraps an id that is out of range instead of raising; ids are checked on the host.
    """
    x, c_project = params["embed.tokens"][ids], None      # (B, T, E)
    if "embed.project.w" in params:
        x, c_project = linear_forward(x, params["embed.project.w"])       # (B, T, C)
    if "embed.positions" in params:
        x = x + params["embed.positions"][positions]      # (B, T, C)
    return x, (ids, positions, c_project)


def embed_backward(dx, cache, grads):
    """dx (B, T, C) -> nothing below; an id that occurs twice collects both gradients."""
    ids, positions, c_project = cache
    # forward: x = tokens[ids] @ w + table[positions]
    if "embed.positions" in grads:
        scatter_add(grads["embed.positions"], positions, dx)
    if c_project is not None:
        trained = "embed.project.w" in grads
        dx, dw, _ = linear_backward(dx, c_project, trained, False)        # (B, T, E), (E, C)
        if trained:
            grads["embed.project.w"] += dw
    if "embed.tokens" in grads:
        scatter_add(grads["embed.tokens"], ids, dx)


def head_logits(params, x, multiply=None):
    """Logits of normed rows.   x (..., C) -> (..., V).   multiply: the product with the head's
    matrix, if the caller has a faster way."""
    if "head.project.w" in params:
        x = x @ params["head.project.w"]                  # (..., E)
    logits = multiply(x) if multiply else x @ head_matrix(params)         # (..., V)
    if "head.b" in params:
        logits += params["head.b"]
    return logits


def head_matrix(params):
    """(C, V), or (E, V) behind a projection: the output head; the transposed input embedding where
    the two are tied."""
    head = params.get("head.w")
    return params["embed.tokens"].T if head is None else head


def add_head_gradient(params, grads, dhead, ids=None):
    """Add d(head matrix) (C, V) to whichever parameter the head is, if that is trained.

    ids (n,): distinct columns that `dhead` (C, n) belongs to; None: all.
    """
    if "head.w" in params:
        name, dvalue = "head.w", dhead                    # (C, V)
    else:
        name, dvalue = "embed.tokens", dhead.T            # (V, C)  tied: both uses end in one array
    if name in grads and ids is None:
        grads[name] += dvalue
    elif name in grads:
        grads[name][(slice(None), ids) if name == "head.w" else ids] += dvalue
