"""stats.py: each figure equals its definition, the identity holds, nothing divides by zero."""

import json

import pytest
from hypothesis import given, strategies as st

from minispec.stats import Comparison, DecodeStats, Step
from minispec.growing import chain
from minispec.tree import Tree


def step(accepted, depth, cut=False, seconds=1.0):
    """A step over a chain of this depth; `cut` by a stop rule before its bonus token."""
    return Step([5] * (accepted + (not cut)), tree=chain(5, [5] * depth),
                path=list(range(accepted + 1)), seconds=seconds)


def prompt_step(seconds):
    return Step([5], rows=40, seconds=seconds, prompt=True)


outcomes = st.integers(0, 4).flatmap(
    lambda depth: st.tuples(st.integers(0, depth), st.just(depth), st.booleans())
).filter(lambda row: row[0] or not row[2])        # a step emits at least one token


# --- Step ----------------------------------------------------------------------------------------

def test_step_derives_what_is_left_out():
    tree = Tree([-1, 0, 0, 2], [1, 2, 3, 4])
    full = Step([3, 4, 9], tree=tree, path=[0, 2, 3])
    assert (full.emitted, full.accepted, full.drafted, full.depth_drafted, full.rows) \
        == (3, 2, 3, 2, 4)
    plain = Step([7])
    assert (plain.emitted, plain.accepted, plain.drafted, plain.depth_drafted, plain.rows) \
        == (1, 0, 0, 0, 1)
    assert not full.cut and not plain.cut


def test_step_cut_by_a_stop_rule_has_no_bonus():
    tree = chain(1, [2, 3, 4])
    cut = Step([2, 3], tree=tree, path=[0, 1, 2, 3])      # say 3 is EOS
    assert (cut.emitted, cut.accepted, cut.cut) == (2, 2, True)
    exact = Step([2, 3, 4], tree=tree, path=[0, 1, 2, 3])         # 4 is EOS: no bonus either
    assert (exact.accepted, exact.cut) == (3, True)


def test_ids_that_a_stop_string_holds_back_count_where_they_were_emitted():
    held = Step([], emitted=3, tree=chain(1, [2, 3]), path=[0, 1, 2])
    assert (held.emitted, held.accepted, held.cut) == (3, 2, False)
    late = Step([2, 3], emitted=1)        # 9 and 8 completed the stop string: emitted, not returned
    stats = DecodeStats.of([held, late])
    assert (stats.emitted, stats.accepted, stats.tokens_per_forward) == (4, 2, 2.0)


@pytest.mark.parametrize("fields", [
    {"ids": []},
    {"ids": [1, 2]},
    {"ids": [1, 2], "emitted": 0},
    {"ids": [1, 2, 3, 4], "tree": chain(5, [1, 2]), "path": [0, 1, 2]},
])
def test_step_refuses_tokens_that_the_path_does_not_explain(fields):
    with pytest.raises(ValueError, match="a step emitted . tokens along a path of"):
        Step(**fields)


def test_given_figures_stay():
    pruned = Step([1, 2], "ab", tree=chain(0, [1]), path=[0, 1], drafted=9, rows=40)
    assert (pruned.drafted, pruned.rows, pruned.depth_drafted) == (9, 40, 1)


# --- DecodeStats ---------------------------------------------------------------------------------

@given(st.lists(outcomes, max_size=12))
def test_figures_equal_their_definitions(rows):
    steps = [step(*row) for row in rows]
    stats = DecodeStats.of([prompt_step(0.5), *steps])
    assert stats.prompt_seconds == 0.5
    assert stats.seconds == len(rows)
    assert stats.emitted == stats.accepted + stats.forwards       # THE identity
    assert stats.forwards == len(rows)
    assert stats.emitted == sum(len(s.ids) for s in steps)     # without the first token
    assert stats.accepted == sum(accepted - cut for accepted, _, cut in rows)
    assert stats.drafted == sum(depth for _, depth, _ in rows)
    assert stats.rows == stats.drafted + stats.forwards
    if rows:
        assert stats.tokens_per_forward == stats.emitted / stats.forwards
        assert stats.tokens_per_second == stats.emitted / stats.seconds
    for d in range(1, 6):                 # P(depth d accepted | depth d - 1 accepted)
        tried = [row for row in rows if row[0] >= d - 1 and row[1] >= d
                 and not (row[2] and row[0] == d - 1)]            # cut there: never judged
        passed = [row for row in tried if row[0] >= d]
        assert (len(stats.accept_rate) >= d) == bool(tried)
        if tried:
            assert stats.accept_rate[d - 1] == len(passed) / len(tried)


def test_accept_rate_counts_only_steps_that_drafted_so_deep():
    stats = DecodeStats.of([step(2, 2), step(2, 4), step(0, 3)])
    assert stats.accept_rate == [2 / 3, 1.0, 0.0]         # depth 3 was tried once, 4 never


def test_a_stop_inside_an_accepted_run_is_no_rejection():
    assert DecodeStats.of([step(2, 4, cut=True)]).accept_rate == [1.0, 1.0]
    assert DecodeStats.of([step(2, 4)]).accept_rate == [1.0, 1.0, 0.0]    # negative control


@given(st.lists(outcomes, max_size=8), st.lists(outcomes, max_size=8))
def test_plus_equals_one_run_over_all_steps(left, right):
    left = [prompt_step(0.25)] + [step(*row) for row in left]
    right = [prompt_step(0.5)] + [step(*row) for row in right]
    a, b, both = DecodeStats.of(left), DecodeStats.of(right), DecodeStats.of(left + right)
    before = a.as_dict()
    assert a + b == both
    assert sum([a, b], DecodeStats()) == both
    assert a.as_dict() == before                          # operands stay as they are


def test_empty_run_has_no_ratios():
    stats = DecodeStats()
    assert (stats.forwards, stats.emitted, stats.accepted) == (0, 0, 0)
    assert stats.tokens_per_forward is None
    assert stats.tokens_per_second is None
    assert stats.accept_rate == []
    assert json.loads(json.dumps(stats.as_dict()))["tokens_per_forward"] is None


def test_as_dict_is_json_and_complete():
    steps = [prompt_step(0.5), step(1, 2), step(0, 0)]
    figures = json.loads(json.dumps(DecodeStats.of(steps).as_dict()))
    assert figures == {
        "forwards": 2, "emitted": 3, "accepted": 1, "tokens_per_forward": 1.5,
        "accept_rate": [1.0, 0.0], "drafted": 2, "rows": 4, "seconds": 2.0,
        "prompt_seconds": 0.5, "tokens_per_second": 1.5}


# --- Comparison ----------------------------------------------------------------------------------

def run(lengths, seconds):
    """A run whose steps emit so many tokens and take so long each."""
    return DecodeStats.of([step(n - 1, n - 1, seconds=s) for n, s in zip(lengths, seconds)])


def test_comparison_figures():
    plain = [run([1] * 6, [2.0] * 6), run([1] * 6, [2.0] * 5 + [8.0])]
    spec = [run([3, 3], [3.0, 3.0]), run([3, 3], [3.0, 3.0])]
    comparison = Comparison(plain, spec)
    assert comparison.as_dict() == {
        "tokens_per_forward": 3.0,
        "cost_ratio": 1.5,                # medians: one slow step of 8 s does not count
        "predicted_speedup": 2.0,
        "measured_speedup": (12 / 6 + 18 / 6) / 2}


def test_measured_speedup_is_the_median_of_the_pairs():
    plain = [run([1, 1], [t, t]) for t in (2.0, 4.0, 100.0)]
    spec = [run([2], [t]) for t in (2.0, 2.0, 2.0)]
    assert Comparison(plain, spec).measured_speedup == 4.0


def test_prompt_does_not_count_in_speedups():
    plain, spec = run([1, 1], [1.0, 1.0]), run([2], [1.0])
    plain.prompt_seconds = 1000.0
    assert Comparison([plain], [spec]).measured_speedup == 2.0


@pytest.mark.parametrize("plain, spec", [
    ([], []),
    ([run([1, 1], [1, 1])], [run([3], [1])]),
    ([run([1, 1], [1, 1])] * 2, [run([2], [1])]),
])
def test_comparison_refuses_runs_over_different_tokens(plain, spec):
    with pytest.raises(ValueError, match="pairs of runs over the same tokens"):
        Comparison(plain, spec)


def test_comparison_without_time_or_steps_has_no_speedup():
    nothing = {"tokens_per_forward": None, "cost_ratio": None, "predicted_speedup": None,
               "measured_speedup": None}
    assert Comparison([DecodeStats()], [DecodeStats()]).as_dict() == nothing
    untimed = Comparison([run([1, 1], [0.0, 0.0])], [run([2], [0.0])]).as_dict()
    assert untimed == {**nothing, "tokens_per_forward": 2.0}
