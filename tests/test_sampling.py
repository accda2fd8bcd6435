"""Sampling: the filters' edges, the choice made with a coin, and coins that know no order."""

import warnings

import numpy as np
import pytest
import strict_cupy
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.sampling import check_sampling, choose_token, coin_at, coins, filter_probs

LAST = 1 - 2.0**-53  # the largest coin there is
PROBS = np.array([0.3, 0.1, 0.1, 0.5])


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings(), np.errstate(divide="raise", over="raise", invalid="raise"):
        warnings.simplefilter("error")
        yield


def kept(probs, dtype="float64", **rules):
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(probs)).astype(dtype)
    return set(np.flatnonzero(filter_probs(logits, 1.0, **rules)).tolist())


def slow_filter(logits, temperature, top_k, top_p):
    """The definition for one row, in Python numbers."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [np.exp((logits[i] - logits[order[0]]) / temperature) for i in range(len(logits))]
    order = order[: top_k or None]
    total, before, stay = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if top_p == 1 or not stay or before < (top_p - 1e-12) * total:
            stay.append(i)
        before += weight[i]
    total = sum(weight[i] for i in stay)
    return [weight[i] / total if i in stay else 0.0 for i in range(len(logits))]


# ---- filters


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rules, right", [
    (dict(top_p=0.8), {0, 3}),
    (dict(top_p=1.0), {0, 1, 2, 3}),
    (dict(top_p=1e-8), {3}),
    (dict(top_p=0.5), {3}),
    (dict(top_p=0.81), {0, 1, 3}),  # of two equals the lower id
    (dict(top_p=0.91), {0, 1, 2, 3}),
    (dict(top_k=1, top_p=0.8), {3}),
    (dict(top_k=2, top_p=0.8), {0, 3}),
    (dict(top_k=3), {0, 1, 3}),
    (dict(top_k=10), {0, 1, 2, 3}),
    (dict(top_k=0), {0, 1, 2, 3}),
])  # fmt: skip
def test_edges_of_top_k_and_top_p(rules, right, dtype):
    assert kept(PROBS, dtype, **rules) == right
    shuffled = [3, 0, 2, 1]  # all in one row of several
    rows = np.log(np.stack([PROBS, PROBS[shuffled]])).astype(dtype)
    both = filter_probs(rows, 1.0, **rules) > 0
    assert set(np.flatnonzero(both[0]).tolist()) == right


def test_top_p_counts_what_top_k_left():
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.55) == {0}  # .4 of .7 is .571
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.55) == {0, 1}
    assert kept([1, 1e-9, 1e-9], "float32", top_k=2, top_p=1.0) == {0, 1}  # 1 drops nothing


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9), st.sampled_from([0.3, 1.0, 2.5]),
       st.integers(0, 10), st.sampled_from([1e-9, 0.2, 0.5, 0.77, 0.95, 1.0]))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_filter_equals_its_definition(logits, temperature, top_k, top_p):
    row = np.array(logits, dtype="float64") / 2
    right = slow_filter(row.tolist(), temperature, top_k, top_p)
    got = filter_probs(np.stack([row, row[::-1]]), temperature, top_k, top_p)
    np.testing.assert_allclose(got[0], right, rtol=1e-12, atol=0)
    assert abs(got.sum(axis=-1) - 1).max() < 1e-12


def test_temperature_zero_is_the_lowest_id_of_the_largest():
    logits = np.array([[1.0, 3, 3, 2], [5, 1, 5, 5], [-np.inf, -2, -np.inf, -2]])
    assert choose_token(logits, None).tolist() == [1, 0, 1]
    assert choose_token(logits, None, 0, top_k=2, top_p=0.1).tolist() == [1, 0, 1]
    assert filter_probs(logits, 0.0).argmax(axis=-1).tolist() == [1, 0, 1]
    assert filter_probs(logits, 0.0).sum() == 3


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 1.0, 1e6, 1e300])
def test_extreme_values_give_no_warning_and_no_nan(dtype, temperature):
    logits = np.array([-np.inf, -1e30, 2.0, 1.0, 2.0, -np.inf], dtype=dtype)
    for rules in [{}, dict(top_k=3), dict(top_p=0.9), dict(top_k=6, top_p=1e-9)]:
        probs = filter_probs(logits, temperature, **rules)
        assert probs.dtype == dtype and abs(probs.sum() - 1) < 1e-6
        assert probs[0] == probs[5] == 0
        for coin in (0.0, 0.3, LAST):
            i = choose_token(logits, coin, temperature, **rules)
            assert probs[i] > 0
            if temperature < 1e-3:
                assert i in (2, 4)


# ---- the choice


def test_inverse_cdf():
    logits = np.log(PROBS)
    edges = [(0.0, 0), (0.299, 0), (0.301, 1), (0.399, 1), (0.401, 2), (0.501, 3), (LAST, 3)]
    for coin, right in edges:
        assert choose_token(logits, coin, 1.0) == right


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ids_of_probability_zero_are_never_chosen(dtype):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(300, 60)).astype(dtype)
    logits[rng.random(logits.shape) < 0.8] = -np.inf
    logits[:, 30] = 0
    logits[:, [0, 1, -2, -1]] = -np.inf
    for coin in (0.0, 2.0**-53, 0.5, LAST):
        for rules in [{}, dict(top_k=2), dict(top_p=0.7)]:
            ids = choose_token(logits, np.full(300, coin), 1.0, **rules)
            chosen = np.take_along_axis(logits, ids[:, None], axis=-1)
            assert np.isfinite(chosen).all()
            probs = filter_probs(logits, 1.0, **rules)
            assert (np.take_along_axis(probs, ids[:, None], axis=-1) > 0).all()


def test_a_coin_past_the_end_of_the_cdf_takes_the_last_possible_id():
    # What rounding could do to the largest coin, done with certainty.
    logits = np.array([0.0, 0, 0, -np.inf])
    assert choose_token(logits, 1.0, 1.0) == 2


class UnevenSum(np.ndarray):
    """Sums as a parallel machine may: the last digits of the total differ from place to place."""

    def cumsum(self, **options):
        total = np.asarray(self).cumsum(**options)
        total[..., -1] += 1e-12
        return total


def test_a_cdf_that_grows_over_impossible_ids():
    logits = np.array([0.0, 0, -np.inf, -np.inf]).view(UnevenSum)
    assert choose_token(logits, LAST, 1.0) == 1


def test_a_coin_on_the_edge_belongs_to_the_next_id():
    grid = np.array([0.0, 0.25, 0.5, 0.75])
    assert choose_token(np.zeros((4, 4)), grid, 1.0).tolist() == [0, 1, 2, 3]


def test_large_vocabulary_in_float32_reaches_both_ends():
    logits = np.zeros(200_000, dtype="float32")
    grid = np.array([0.0, 0.25, 0.5, LAST])
    ids = choose_token(np.broadcast_to(logits, (4, 200_000)), grid, 1.0)
    assert abs(ids - grid * 200_000).max() <= 1  # a float32 CDF misses by hundreds


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]),
       st.integers(0, 5), st.sampled_from([0.6, 1.0]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_rows_are_independent_of_each_other(seed, rows, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(rows, 3, 7))
    row_coins = coins(seed, 0, rows * 3).reshape(rows, 3)
    together = choose_token(logits, row_coins, temperature, top_k, top_p)
    assert together.shape == (rows, 3)
    for r in range(rows):
        for c in range(3):
            alone = choose_token(logits[r, c], row_coins[r, c], temperature, top_k, top_p)
            assert alone == together[r, c]


def test_inputs_are_not_changed():
    logits = np.log(PROBS)
    before = logits.copy()
    choose_token(logits, 0.5, 0.7, 3, 0.9)
    assert (logits == before).all()


def chi_square(ids, probs):
    seen = np.bincount(ids, minlength=len(probs))
    expected = probs * len(ids)
    return ((seen - expected) ** 2 / expected).sum()


def test_choices_follow_the_distribution_and_a_wrong_rule_does_not():
    probs = np.array([0.3, 0.02, 0.18, 0.25, 0.05, 0.2])
    trials, limit = 400_000, 25.7  # chi-square, 5 degrees of freedom: exceeded once in 10,000
    logits = np.broadcast_to(np.log(probs).astype("float32"), (trials, 6))
    row_coins = coins(11, 0, trials)
    assert chi_square(choose_token(logits, row_coins, 1.0), probs) < limit
    warm = probs**0.5 / (probs**0.5).sum()
    assert chi_square(choose_token(logits, row_coins, 2.0), warm) < limit
    top = probs[[0, 2, 3, 5]] / probs[[0, 2, 3, 5]].sum()
    ids = choose_token(logits, row_coins, 1.0, top_k=4, top_p=0.99)
    assert set(ids.tolist()) == {0, 2, 3, 5}
    assert chi_square(np.searchsorted([0, 2, 3, 5], ids), top) < limit
    # Negative controls: a slightly wrong temperature, and coins used for two rows each.
    assert chi_square(choose_token(logits, row_coins, 1.03), probs) > limit
    assert chi_square(choose_token(logits, row_coins**1.02, 1.0), probs) > limit


# ---- coins


def test_a_coin_depends_on_seed_and_position_alone():
    line = coins(5, 0, 50)
    order = np.random.default_rng(0).permutation(50)
    assert {int(t): coin_at(5, int(t)) for t in order} == dict(enumerate(line.tolist()))
    for first, count in [(0, 0), (1, 7), (3, 1), (4, 9), (49, 1)]:
        assert (coins(5, first, count) == line[first : first + count]).all()
    both = [(coin_at(5, t), coin_at(6, t)) for t in range(50)]  # interleaved
    assert [a for a, _ in both] == line.tolist()
    assert [b for _, b in both] == coins(6, 0, 50).tolist()


def test_coins_are_those_of_the_philox_stream():
    stream = np.random.Generator(np.random.Philox(key=5))
    assert coins(5, 0, 9).tolist() == stream.random(9).tolist()
    assert coins(5, 0, 3).dtype == np.float64 and type(coin_at(5, 0)) is float
    assert coin_at(2**100, 2**70) == coin_at(2**100, 2**70)
    # Frozen: a run recorded today must be repeatable with every later NumPy.
    frozen = [0.011546754286331562, 0.24154919656271812, 0.11142585551493822]
    assert coins(0, 0, 3).tolist() == frozen


def test_coins_are_uniform_and_seeds_unrelated():
    many = coins(3, 0, 100_000)
    assert 0 <= many.min() and many.max() < 1
    seen = np.bincount((many * 20).astype(int), minlength=20)
    assert ((seen - 5000) ** 2 / 5000).sum() < 52  # 19 degrees of freedom, once in 10,000
    first = np.array([coin_at(seed, 0) for seed in range(2000)])
    assert abs(first.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(coins(3, 0, 5000), coins(4, 0, 5000))[0, 1]) < 0.06
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


# ---- bad input, other library


@pytest.mark.parametrize("name, bad", [
    ("temperature", -0.1), ("temperature", np.nan), ("temperature", np.inf), ("temperature", None),
    ("temperature", "1"), ("top_k", -1), ("top_k", 2.5), ("top_k", None), ("top_k", True),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", -1), ("top_p", np.nan), ("top_p", None),
])  # fmt: skip
def test_bad_settings_are_named(name, bad):
    with pytest.raises(ValueError, match=f"^{name} is .*expected"):
        check_sampling(**{name: bad})
    with pytest.raises(ValueError, match=name):
        choose_token(np.zeros(3), 0.5, **{"temperature": 1.0, name: bad})


def test_good_settings_pass():
    check_sampling(0, np.int64(3), 1)
    check_sampling(np.float32(0.5), 0, 0.1)


def test_bad_coins():
    for arguments in [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (0.5, 0, 1), (0, None, 1)]:
        with pytest.raises(ValueError, match="expected a whole number"):
            coins(*arguments)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        choose_token(np.zeros((3, 4)), np.zeros(2), 1.0)


def test_same_choices_on_a_device(monkeypatch):
    cp = strict_cupy.install(monkeypatch)
    logits = np.random.default_rng(2).normal(size=(40, 9)).astype("float32")
    row_coins = coins(1, 0, 40)
    for rules in [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.0, 4, 0.6)]:
        on_device = choose_token(cp.asarray(logits), row_coins, *rules)
        assert isinstance(on_device, cp.ndarray)
        assert (cp.asnumpy(on_device) == choose_token(logits, row_coins, *rules)).all()
        probs = filter_probs(cp.asarray(logits), *rules)
        assert probs.dtype == np.float32
