"""Conditional streams (ours, beyond the paper): a stream that knows which token came before.

The paper's stream d does not know which token was taken at depth d-1, not even the root, which the
main row has decided before the tree is built. For a child of a node with token u, a low-rank map
tells it. With n = norm(s[d]), the stream's state right before the head:

    z = n + silu(n A[d] + E[u] B[d]) W[d]                   logits = z head

A (C, R) and B (C, R) lead into R channels, W (R, C) back; E is the token embedding, taken as a
constant here. W starts at zero, so training starts from the paper's streams. The idea, that each
draft depends on the drafts before it, is Hydra's (Ankner et al. 2024); here it costs 3 R C
parameters per stream and no layer of its own.

Read first: streams.py, loss.py. Proven by: tests/test_ops_grad.py, tests/test_transitions.py.
"""

from .layers import linear_backward, linear_forward, silu_backward, silu_forward


def transition_forward(n, before, state, token, out):
    """z = n + silu(n A + e B) W for rows of one stream.

    n (rows, C) normed stream states, before (rows, C) embeddings of the previous tokens,
    state = A (C, R), token = B (C, R), out = W (R, C) -> z (rows, C).   cache: all inputs.
    """
    a, ca = linear_forward(n, state)                      # (rows, R)
    b, cb = linear_forward(before, token)                 # (rows, R)
    act, cs = silu_forward(a + b)                         # (rows, R)
    update, co = linear_forward(act, out)                 # (rows, C)
    return n + update, (ca, cb, cs, co)                   # (rows, C)


def transition_backward(dz, cache):
    """dz (rows, C) -> dn (rows, C), dbefore None (frozen), dstate, dtoken (C, R), dout (R, C)."""
    ca, cb, cs, co = cache
    # forward: z = n + act @ out
    dact, dout, _ = linear_backward(dz, co, need_db=False)        # (rows, R), (R, C)
    # forward: act = silu(n @ state + before @ token)
    dpre = silu_backward(dact, cs)                        # (rows, R)
    dn, dstate, _ = linear_backward(dpre, ca, need_db=False)      # (rows, C), (C, R)
    x, _ = cb
    dtoken = x.T @ dpre                                   # (C, R)
    return dz + dn, None, dstate, dtoken, dout


def conditional_states(params, n, stream, tokens):
    """z for drafting: the state of one stream, once per node that may get children.

    n (C,) normed state of stream `stream` (0-based), tokens (nodes,) int on the same library
    -> z (nodes, C).
    """
    before = params["embed.tokens"][tokens]               # (nodes, C)
    # one state serves all nodes: (1, C) broadcasts inside the forward
    z, _ = transition_forward(n[None], before, params["transitions.state"][stream],
                              params["transitions.token"][stream],
                              params["transitions.out"][stream])
    return z
