"""The layers of a transformer as forward/backward pairs, each gradient derived by hand.

Every pair reads alike. `name_forward(inputs, params) -> y, cache` and `name_backward(dy, cache)`
gives the gradients in the order of the inputs. A backward walks its forward from the bottom up,
and four sentences are all the calculus it needs:

    a broadcast in the forward is a sum in the backward;   a sum is a broadcast;
    a slice or a lookup is a scatter-add;                  a branch is a plus.

Read first: config.py (the letters). Proven by: tests/test_ops_grad.py, and by
tests/test_gradcheck_detects.py, which plants bugs here and demands that the check finds them.
"""

from .backend import erf, get_xp


def leading(x):
    """All axes but the last: those over which a (C,) parameter was broadcast."""
    return tuple(range(x.ndim - 1))


# --- linear -------------------------------------------------------------------------------------

def rows_matmul(x, w):
    """x (..., I) @ w (I, O) -> (..., O), all rows in one product.

    `x @ w` would be a product per entry of the leading axis, and BLAS rearranges w before each
    (4 texts of 60 rows, 576 x 1,536: 4.9 ms so, 3.3 ms in one).
    """
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[1])


def linear_forward(x, w, b=None):
    """y = x W + b.

    x (..., I), w (I, O), b (O,) or None -> y (..., O).   cache: x, w.
    """
    y = rows_matmul(x, w)                                 # (..., O)
    if b is not None:
        y = y + b                                         # (..., O)
    return y, (x, w)


def linear_backward(dy, cache, need_dw=True, need_db=True):
    """dy (..., O) -> dx (..., I), dw (I, O) or None, db (O,) or None.

    `need_dw=False` leaves out the product that a frozen matrix does not need, `need_db=False` the
    sum of a bias that is frozen or not there.
    """
    x, w = cache
    # forward: y = x @ w + b
    dx = rows_matmul(dy, w.T)                             # (..., I)
    rows_x = x.reshape(-1, x.shape[-1])                   # (rows, I)
    rows_dy = dy.reshape(-1, dy.shape[-1])                # (rows, O)
    dw = rows_x.T @ rows_dy if need_dw else None          # (I, O)
    db = rows_dy.sum(axis=0) if need_db else None         # (O,)
    return dx, dw, db


# --- norms --------------------------------------------------------------------------------------

def layernorm_forward(x, gain, bias, eps=1e-5):
    """y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias, statistics over the last axis.

    x (..., C), gain (C,), bias (C,) -> y (..., C).   Ba et al. 2016, eq. 4.
    cache: xhat (..., C), rstd (..., 1), gain.
    """
    mean = x.mean(axis=-1, keepdims=True)                 # (..., 1)
    xc = x - mean                                         # (..., C)
    var = (xc * xc).mean(axis=-1, keepdims=True)          # (..., 1)
    rstd = (var + eps) ** -0.5                            # (..., 1)
    xhat = xc * rstd                                      # (..., C)
    y = xhat * gain + bias                                # (..., C)
    return y, (xhat, rstd, gain)


def layernorm_backward(dy, cache):
    """dy (..., C) -> dx (..., C), dgain (C,), dbias (C,).

    With xhat = xc rstd and rstd = (mean(xc^2) + eps)^(-1/2):
    d rstd / d xc_i = -rstd^3 xc_i / C, hence
    dx = rstd (dxhat - mean(dxhat) - xhat mean(dxhat xhat)).
    """
    xhat, rstd, gain = cache
    # forward: y = xhat * gain + bias
    dxhat = dy * gain                                     # (..., C)
    dgain = (dy * xhat).sum(axis=leading(dy))             # (C,)
    dbias = dy.sum(axis=leading(dy))                      # (C,)
    # forward: mean, xc, var, rstd, xhat
    m1 = dxhat.mean(axis=-1, keepdims=True)               # (..., 1)  through xc = x - mean
    m2 = (dxhat * xhat).mean(axis=-1, keepdims=True)      # (..., 1)  through rstd
    dx = rstd * (dxhat - m1 - xhat * m2)                  # (..., C)
    return dx, dgain, dbias


def rmsnorm_forward(x, gain, eps=1e-5):
    """y = gain * x / sqrt(mean(x^2) + eps), mean over the last axis.

    x (..., C), gain (C,) -> y (..., C).   Zhang and Sennrich 2019, eq. 4.
    cache: xhat (..., C), rstd (..., 1), gain.
    """
    # a sum times 1/C: `mean` goes through Python in NumPy, which costs more than the sum itself
    square = (x * x).sum(axis=-1, keepdims=True) * (1.0 / x.shape[-1])    # (..., 1)
    rstd = (square + eps) ** -0.5                         # (..., 1)
    xhat = x * rstd                                       # (..., C)
    y = xhat * gain                                       # (..., C)
    return y, (xhat, rstd, gain)


def rmsnorm_backward(dy, cache):
    """dy (..., C) -> dx (..., C), dgain (C,).   LayerNorm's rule without the mean's term."""
    xhat, rstd, gain = cache
    # forward: y = xhat * gain
    dxhat = dy * gain                                     # (..., C)
    dgain = (dy * xhat).sum(axis=leading(dy))             # (C,)
    # forward: rstd, xhat
    m2 = (dxhat * xhat).mean(axis=-1, keepdims=True)      # (..., 1)  through rstd
    dx = rstd * (dxhat - xhat * m2)                       # (..., C)
    return dx, dgain


# --- nonlinearities -----------------------------------------------------------------------------

def silu_forward(x):
    """y = x sigmoid(x).   x (...) -> y (...).   cache: x, sigmoid(x).

    sigmoid(x) = (1 + tanh(x/2)) / 2 never overflows, whatever x.
    """
    xp = get_xp(x)
    sig = xp.tanh(x * 0.5)                                # (...)
    sig *= 0.5
    sig += 0.5
    return x * sig, (x, sig)                              # (...)


def silu_backward(dy, cache):
    """dy (...) -> dx (...).   d(x s)/dx = s + x s (1 - s)."""
    x, sig = cache
    return dy * sig * (1.0 + x * (1.0 - sig))             # (...)


GELU_SCALE = 0.7978845608028654                           # sqrt(2 / pi)
GELU_CUBIC = 0.044715


def gelu_forward(x):
    """y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's form of GELU.

    x (...) -> y (...).   Hendrycks and Gimpel 2016.   cache: x, tanh(.).
    """
    xp = get_xp(x)
    tanh = xp.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))     # (...)
    return 0.5 * x * (1.0 + tanh), (x, tanh)              # (...)


def gelu_backward(dy, cache):
    """dy (...) -> dx (...).

    With u = sqrt(2/pi) (x + c x^3): dy/dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) du/dx.
    """
    x, tanh = cache
    du = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)    # (...)
    return dy * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * du)   # (...)


NORMAL_SCALE = 0.3989422804014327                         # 1 / sqrt(2 pi)


def gelu_exact_forward(x):
    """y = x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2 of the normal distribution.

    x (...) -> y (...).   Hendrycks and Gimpel 2016, eq. 1.   cache: x, Phi(x).
    """
    phi = erf(x * 0.5 ** 0.5)                             # (...)
    phi += 1.0
    phi *= 0.5
    return x * phi, (x, phi)                              # (...)


def gelu_exact_backward(dy, cache):
    """dy (...) -> dx (...).   d(x Phi)/dx = Phi + x phi, phi(x) = exp(-x^2 / 2) / sqrt(2 pi)."""
    x, phi = cache
    density = get_xp(x).exp(-0.5 * x * x) * NORMAL_SCALE  # (...)
    return dy * (phi + x * density)                       # (...)


def relu_forward(x):
    """y = max(x, 0).   x (...) -> y (...).   cache: where x is positive."""
    return get_xp(x).maximum(x, 0.0), x > 0.0             # (...)


def relu_backward(dy, positive):
    """dy (...) -> dx (...). At the kink, x = 0, the slope is taken as 0."""
    return dy * positive                                  # (...)


ACTIVATIONS = {"silu": (silu_forward, silu_backward), "gelu": (gelu_forward, gelu_backward),
               "gelu_exact": (gelu_exact_forward, gelu_exact_backward),
               "relu": (relu_forward, relu_backward)}


# --- softmax and its cross-entropy --------------------------------------------------------------

def log_softmax(logits):
    """log softmax over the last axis, safe for large logits.   logits (..., V) -> (..., V)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)         # (..., V)
    xp = get_xp(logits)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))  # (..., V)


def softmax(logits):
    """softmax over the last axis.   logits (..., V) -> probabilities (..., V)."""
    probs = logits - logits.max(axis=-1, keepdims=True)   # (..., V)
    get_xp(logits).exp(probs, out=probs)
    probs /= probs.sum(axis=-1, keepdims=True)
    return probs


def cross_entropy_forward(logits, targets):
    """loss[n] = -log softmax(logits[n])[targets[n]], in nats.

    logits (n, V), targets (n,) int -> loss (n,).   cache: probabilities (n, V), targets.
    """
    xp = get_xp(logits, targets)
    probs = softmax(logits)                               # (n, V)
    rows = xp.arange(len(targets))                        # (n,)
    # a probability that underflowed to 0 would give an infinite loss; the log of the smallest
    # normal number of this dtype (-87 in float32) is as far as the loss can see
    tiny = float(xp.finfo(logits.dtype).tiny)
    loss = -xp.log(xp.maximum(probs[rows, targets], tiny))        # (n,)
    return loss, (probs, targets)


def cross_entropy_backward(dloss, cache):
    """dloss (n,) -> dlogits (n, V).

    log p_y = z_y - log sum_v e^(z_v), so d(-log p_y)/dz_v = p_v - [v = y].
    """
    probs, targets = cache
    xp = get_xp(probs, targets)
    # forward: loss = -log(probs[rows, targets])
    dlogits = probs * dloss[:, None]                      # (n, V)
    rows = xp.arange(len(targets))                        # (n,)
    dlogits[rows, targets] -= dloss                       # one target per row: no duplicates
    return dlogits
