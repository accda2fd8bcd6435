"""drafters: prompt lookup equals a slow search; it is fast on long texts; it never hurts."""


import numpy as np
import pytest
from hypothesis import given, strategies as st

from minispec.drafters import Drafter
from minispec.drafters.prompt_lookup import PromptLookup
from minispec.growing import union
from minispec.verify import walk


def slow_lookup(ids, max_ngram, num_draft):
    """The definition: longest n, first earlier window, what follows it."""
    for n in range(min(max_ngram, len(ids)), 0, -1):
        for end in range(n, len(ids)):
            if ids[end - n:end] == ids[len(ids) - n:]:
                return ids[end:end + num_draft]
    return []


def drafted(tree):
    assert tree.parent.tolist() == list(range(-1, len(tree) - 1))         # a chain
    return tree.token[1:].tolist()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20),
       st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8),
       st.integers(1, 4), st.integers(1, 6), st.integers(0, 8))
def test_equals_the_slow_search_at_every_step(prompt, runs, max_ngram, num_draft, room):
    drafter = PromptLookup(max_ngram, num_draft)
    drafter.begin([9, 1, 2, 3])           # another prompt before: it must leave no trace
    drafter.draft([9, 1, 2, 3, 1], None, 5)
    ids = list(prompt)
    drafter.begin(ids)
    for emitted in [[], *runs]:
        ids += emitted
        tree = drafter.draft(ids, None, room)
        assert tree.token[0] == ids[-1]
        assert drafted(tree) == slow_lookup(ids, max_ngram, num_draft)[:room]
    assert ids == [*prompt, *(token for emitted in runs for token in emitted)]    # not changed


def test_copies_what_followed_the_longest_match():
    ids = [1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 2, 3]
    drafter = PromptLookup(max_ngram=3, num_draft=4)
    drafter.begin(ids)
    assert drafted(drafter.draft(ids, None, 10)) == [4, 5, 9, 2]  # first "2 3", not the latest
    assert drafted(drafter.draft(ids + [7], None, 10)) == [7, 2, 3, 7]    # "2 3 7" beats "7"


def test_the_text_does_not_match_itself_and_rooms_are_kept():
    drafter = PromptLookup()
    drafter.begin([1, 2, 3])
    assert len(drafter.draft([1, 2, 3], None, 10)) == 1           # nothing repeats
    assert len(drafter.draft([1, 1], None, 0)) == 1               # no room: the root alone
    assert drafter.draft([1, 1], None, 3).token.tolist() == [1, 1]
    assert drafter.draft([4], None, 3).token.tolist() == [4]      # one-token prompt


def test_arrays_and_tuples_are_as_good_as_lists():
    ids = [5, 6, 7, 5, 6]
    want = drafted(PromptLookup().draft(ids, None, 10))
    assert want == [7, 5, 6]
    assert drafted(PromptLookup().draft(np.array(ids), None, 10)) == want
    assert drafted(PromptLookup().draft(tuple(ids), None, 10)) == want


def test_scores_let_it_share_a_budget_with_other_drafters():
    tree = PromptLookup().draft([1, 2, 3, 1], None, 10)
    assert 0 < tree.score[-1] < tree.score[1] < 1
    assert len(union([tree, PromptLookup().draft([8, 1], None, 10)], budget=2)) == 3


def test_decoding_with_it_equals_plain_decoding():
    """A target that copies: many accepted tokens, the same ids."""
    text = np.random.default_rng(0).integers(0, 30, 40).tolist() * 3
    following = lambda ids: text[len(ids)]
    drafter, ids, forwards = PromptLookup(), text[:40], 0
    drafter.begin(ids)
    while len(ids) < 110:
        tree = drafter.draft(ids, None, 110 - len(ids) - 1)
        choices = [following(ids[:-1] + tree.token[tree.path(n)].tolist())
                   for n in range(len(tree))]
        ids += walk(tree, choices).emitted
        forwards += 1
    assert ids == text[:110]
    assert forwards < 20


def test_a_step_does_not_search_a_long_text_again():
    """The index grows with the text: a step looks at a few of 20,000 ids, whatever came before."""
    class Counted(list):
        looked_at = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Counted.looked_at += len(found) if isinstance(key, slice) else 1
            return found

    rng = np.random.default_rng(1)
    ids = Counted(rng.integers(0, 1000, 20_000).tolist())
    drafter = PromptLookup()
    drafter.begin(ids)
    Counted.looked_at = 0
    for token in rng.integers(0, 1000, 200).tolist():
        ids.append(token)
        drafter.draft(ids, None, 10)
    assert Counted.looked_at < 200 * 40                   # a search would look at 20,000 each


@pytest.mark.parametrize("fields", [{"max_ngram": 0}, {"num_draft": 0}])
def test_settings_are_checked(fields):
    with pytest.raises(ValueError, match="is 0, expected 1 or more"):
        PromptLookup(**fields)


def test_the_seam_says_what_is_missing():
    class Silent(Drafter):
        pass

    Silent().begin([1])
    assert not Silent.needs_streams
    with pytest.raises(NotImplementedError, match="Silent does not say how to draft"):
        Silent().draft([1], None, 1)
