"""From logits to one token: temperature, top-k, top-p, and a choice made with one given coin.

The idea: all randomness is a coin in [0, 1) that depends on (seed, position) alone and is drawn
on the host. Given its coin the choice is a function of the logits, so plain and speculative
decoding, which meet the same position in different steps, choose the same token there.

Read first: backend.py. Read next: verify.py. Proven by: tests/test_sampling.py.
NOTE: NumPy and CuPy logits differ in the last digits, so ids can differ between the two where
a coin falls on the edge between two tokens, or two logits tie up to rounding.
"""

import math
import operator

import numpy as np

from .backend import as_xp, get_xp

ZERO_BELOW = 1000.0  # exp(-1000) is 0 in float32 and in float64


def check_sampling(temperature=0.0, top_k=0, top_p=1.0):
    """Raises ValueError unless temperature >= 0, top_k is a whole number >= 0, 0 < top_p <= 1."""
    if not _is_number(temperature) or not math.isfinite(temperature) or temperature < 0:
        raise ValueError(f"temperature is {temperature!r}, expected a finite number >= 0")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}, expected a number in (0, 1] (1 turns it off)")
    if not _is_whole(top_k) or top_k < 0:
        raise ValueError(f"top_k is {top_k!r}, expected a whole number >= 0 (0 turns it off)")


def filter_probs(logits, temperature, top_k=0, top_p=1.0):
    """Probabilities that are sampled from: softmax(logits / temperature), top-k, then top-p.

    logits (..., V), at least one of a row finite -> probs (..., V), same dtype, rows sum to 1.
    temperature 0: all on the lowest id among the largest logits. top_k: the k most probable ids,
    0 for all. top_p: the fewest most probable ids whose sum reaches top_p of what top-k left
    (Holtzman et al. 2020, sec. 3.1). Equal probabilities rank by id. The best id always stays.
    Raises: ValueError as check_sampling.
    """
    check_sampling(temperature, top_k, top_p)
    xp, width = get_xp(logits), logits.shape[-1]
    if temperature == 0:
        best = logits.argmax(axis=-1)[..., None]  # (..., 1)
        return (xp.arange(width) == best).astype(logits.dtype)  # (..., V)
    probs = _softmax(logits, temperature, xp)  # (..., V)
    if 0 < top_k < width or top_p < 1:
        probs = probs * _kept(probs, top_k or width, top_p, xp)  # (..., V)
        probs = probs / probs.sum(axis=-1, keepdims=True)  # (..., V)
    return probs


def choose_token(logits, coin, temperature=0.0, top_k=0, top_p=1.0):
    """The target's own choice: lowest id of the largest logits, or inverse CDF at the coin.

    logits (..., V); coin (...) or one number, in [0, 1), unused at temperature 0 -> ids (...).
    An id of probability 0 is never chosen. The dtype is that of the logits, except that the CDF
    is summed in float64: at V = 50,000 a float32 sum would move its edges by 1e-5.
    Raises: ValueError as check_sampling, or if there is not one coin for each row.
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(axis=-1)  # (...)
    xp, rows = get_xp(logits), logits.shape[:-1]
    coin = as_xp(coin, xp, "float64")  # (...)
    if coin.shape not in ((), rows):
        raise ValueError(f"coins have shape {coin.shape}, logits have rows {rows}")
    probs = filter_probs(logits, temperature, top_k, top_p)  # (..., V)
    cdf = probs.cumsum(axis=-1, dtype="float64")  # (..., V)
    goal = coin[..., None] * cdf[..., -1:]  # (..., 1)
    possible = probs > 0  # (..., V)
    hit = (cdf > goal) & possible  # (..., V)
    # A parallel sum on a GPU need not be monotone in its last bit, so a coin next to 1 may pass
    # the end of the CDF. It then belongs to the last id that is possible at all.
    last = probs.shape[-1] - 1 - possible[..., ::-1].argmax(axis=-1)  # (...)
    return xp.where(hit.any(axis=-1), hit.argmax(axis=-1), last)  # (...)


def coins(seed, first, count):
    """Coins of positions first .. first + count - 1 -> host float64 (count,), each in [0, 1).

    Coin t is number t of the Philox stream with the seed as its key: a counter-based generator,
    which can start anywhere, so a coin does not depend on what was asked before.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    Raises: ValueError if seed, first or count is not a whole number >= 0.
    """
    for name, value in (("seed", seed), ("first", first), ("count", count)):
        if not _is_whole(value) or value < 0:
            raise ValueError(f"{name} is {value!r}, expected a whole number >= 0")
    block, skip = divmod(int(first), 4)  # each step of the counter gives 4 numbers
    stream = np.random.Philox(key=int(seed), counter=block)
    words = stream.random_raw(skip + int(count))[skip:]  # (count,)
    return (words >> np.uint64(11)) * 2.0**-53  # (count,)  the upper 53 bits


def coin_at(seed, position):
    """The coin of one position, a float in [0, 1)."""
    return float(coins(seed, position, 1)[0])


def _softmax(logits, temperature, xp):
    """softmax(logits / temperature), (..., V), for any temperature > 0 without a warning."""
    info = xp.finfo(logits.dtype)
    # Keep the temperature and the bound below inside the range of the dtype.
    temperature = min(max(float(temperature), float(info.tiny)), float(info.max) / ZERO_BELOW)
    below = logits - logits.max(axis=-1, keepdims=True)  # (..., V)
    below = xp.maximum(below, -ZERO_BELOW * temperature)  # (..., V)  else -inf, or overflow
    weight = xp.exp(below / temperature)  # (..., V)
    return weight / weight.sum(axis=-1, keepdims=True)  # (..., V)


def _kept(probs, top_k, top_p, xp):
    """Mask of the ids that pass both filters, (..., V) bool.

    First how many stay in each row, from the sorted values; then which: all above the smallest
    value that stays, and as many of its equals, by id, as there is room for.
    """
    ranked = xp.sort(probs, axis=-1)[..., ::-1][..., :top_k]  # (..., K)
    upto = ranked.astype("float64").cumsum(axis=-1)  # (..., K)
    # An id stays while those before it fall short of top_p. Rounding must not count as short:
    # .5 + .3 reaches .8 also where float32 makes it .79999995.
    slack = 8 * float(xp.finfo(probs.dtype).eps)
    short = upto[..., :-1] < (top_p - slack) * upto[..., -1:]  # (..., K - 1)
    size = 1 + short.sum(axis=-1, keepdims=True)  # (..., 1)
    if top_p >= 1:
        size = xp.full_like(size, ranked.shape[-1])  # (..., 1)
    edge = xp.take_along_axis(ranked, size - 1, axis=-1)  # (..., 1)
    above, equal = probs > edge, probs == edge  # (..., V)
    room = size - above.sum(axis=-1, keepdims=True)  # (..., 1)
    return above | (equal & (equal.cumsum(axis=-1, dtype="int32") <= room))  # (..., V)


def _is_number(value):
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_whole(value):
    try:
        return not isinstance(value, bool) and operator.index(value) is not None
    except TypeError:
        return False
