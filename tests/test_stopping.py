"""Stopping: one boundary for ids and text, the same however the ids are cut into steps."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import TOKENIZERS, TRAINED

from minispec.stopping import StopRules, StopStrings

BYTES = TOKENIZERS["bytes"]  # id = byte


def cut_into(items, sizes):
    """items in slices of the given sizes, the last size repeated."""
    sizes, start, parts = list(sizes) or [1], 0, []
    while start < len(items):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(items[start : start + size])
        start += size
    return parts


def run_strings(stops, parts):
    rules, shown = StopStrings(stops), ""
    for part in parts:
        visible, stopped = rules.push(part)
        shown += visible
        if stopped:
            return shown
    return shown + rules.finish()


def run(ids, sizes=(1,), **rules):
    """-> (kept ids, text, finish_reason) of all steps together."""
    rules = StopRules(**{"max_new_tokens": 10**6, "tokenizer": BYTES, **rules})
    kept, text, reason = [], "", rules.finish_reason
    for part in cut_into(list(ids), sizes):
        more, piece, reason = rules.push(part)
        kept, text = kept + more, text + piece
    assert (rules.ids, rules.text, rules.finish_reason) == (kept, text, reason)
    return kept, text, reason


def by_definition(ids, tokenizer, limit, eos_ids, stops):
    """The rules from whole texts only: slow, obvious, no streaming. None where it is undecided."""
    for n in range(limit + 1):
        if n > len(ids):
            return None
        at_end_id = n > 0 and ids[n - 1] in eos_ids
        ended = n == limit or at_end_id
        text = tokenizer.decode(ids[:n])
        # Text that later ids may still change is not searched, unless there are none.
        final = text if ended else text[: len(text) - (n > 0 and text.endswith("\ufffd"))]
        ends = [
            (end, end - len(stop))
            for stop in stops
            for end in range(len(stop), len(final) + 1)
            if final[end - len(stop) : end] == stop
        ]
        if ends:
            visible = final[: min(ends)[1]]
            fewest = next(
                k for k in range(n + 1) if tokenizer.decode(ids[:k]).startswith(visible)
            )
            return ids[:fewest], visible, "stop"
        if ended:
            return ids[:n], text, "stop" if at_end_id else "length"
    return None


# ---- stop strings on text


@pytest.mark.parametrize("size", range(1, 20))
def test_half_a_stop_string_is_never_shown(size):
    text = "The quick brown fox"
    for skip in range(size):
        parts = [text[:skip]] + cut_into(text[skip:], [size])
        assert run_strings("own fox", parts) == "The quick br"
        assert run_strings("own foxes", parts) == text  # never completed: flushed at the end


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.lists(st.integers(1, 4), max_size=6))  # fmt: skip
@settings(max_examples=500, deadline=None)
def test_any_split_gives_the_text_before_the_first_complete_match(text, stops, sizes):
    ends = [
        (end, end - len(stop))
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    right = text[: min(ends)[1]] if ends else text
    assert run_strings(stops, cut_into(text, sizes)) == right


def test_the_match_complete_first_wins():
    for size in (1, 2, 5):
        assert run_strings(["abcd", "bc"], cut_into("xabcd", [size])) == "xa"
        assert run_strings(["cd", "abcd"], cut_into("xabcd", [size])) == "x"  # same end


def test_nothing_is_held_without_need():
    rules = StopStrings(["\n\n", "END"])
    pieces = [rules.push(p)[0] for p in ["a\n", "b", "E", "N", "x"]]
    assert pieces == ["a", "\nb", "", "", "ENx"]
    assert rules.push("EEND more") == ("E", True)
    assert rules.push("more") == ("", True) and rules.finish() == ""


def test_bad_stop_strings():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
    with pytest.raises(ValueError, match="empty"):
        StopStrings("")
    with pytest.raises(TypeError, match="5"):
        StopStrings([5])
    assert StopStrings(None).push("a") == ("a", False)


# ---- one boundary for ids and text


@pytest.mark.parametrize("size", range(1, 7))
def test_stop_string_completed_inside_an_accepted_run(size):
    tokenizer = TRAINED
    head, ha, tail = (tokenizer.encode(t, bos=False) for t in ("fox", " ha", " jumps"))
    assert len(ha) == 1
    ids = head + ha * 3 + tail
    kept, text, reason = run(ids, [size], stops=[" ha ha ha"], tokenizer=tokenizer)
    assert (kept, text, reason) == (head, "fox", "stop")


@pytest.mark.parametrize("limit", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("sizes", [(1,), (4,), (50,)])
def test_max_new_tokens_is_exact(limit, sizes):
    kept, text, reason = run(b"abcdef", sizes, max_new_tokens=limit)
    assert (bytes(kept), text) == (b"abcdef"[:limit], "abcdef"[:limit])
    assert reason == ("length" if limit <= 6 else None)


def test_context_end_is_length():
    assert run(b"abcdef", [4], context_left=5) == (list(b"abcde"), "abcde", "length")
    assert run(b"abc", context_left=0) == ([], "", "length")


def test_end_ids():
    for sizes in [(1,), (3,), (9,)]:
        right = ([97, 98, 257], "ab", "stop")
        assert run([97, 98, 257, 99], sizes, eos_ids=[256, 257]) == right
        assert run([97, 98, 257, 99], sizes, eos_ids=257) == right
        assert run([257], sizes, eos_ids=np.int64(257)) == ([257], "", "stop")
    assert run([97, 257], eos_ids=None, max_new_tokens=2) == ([97, 257], "a", "length")
    assert run([97, 257], eos_ids=257, max_new_tokens=1) == ([97], "a", "length")
    assert run([97, 257], eos_ids=257, max_new_tokens=2) == ([97, 257], "a", "stop")


def test_stop_wins_over_length_at_the_same_id():
    assert run(b"ab", stops="b", max_new_tokens=2) == ([97], "a", "stop")


def test_held_text_is_flushed_at_every_end():
    for rules in [dict(max_new_tokens=3), dict(context_left=3), dict(eos_ids=[256])]:
        kept, text, _ = run([*b"aST", 256], stops=["STOP"], **rules)
        assert (kept[:3], text) == (list(b"aST"), "aST")
        assert kept[3:] == ([256] if "eos_ids" in rules else [])
    kept, text, reason = run("a🔥".encode()[:-1], max_new_tokens=4)
    assert text == BYTES.decode(kept) == "a\ufffd" and reason == "length"


def test_stop_string_that_only_the_flush_completes():
    tokenizer = TOKENIZERS["sentencepiece"]  # a newline is the byte token <0x0A>, held as a run
    a, newline = 260, 0x0A + 3
    for sizes in [(1,), (5,)]:
        right = ([a], "a", "stop")
        assert run([a, newline], sizes, max_new_tokens=2, stops="\n", tokenizer=tokenizer) == right
        assert run([a, newline, 2], sizes, eos_ids=2, stops="\n", tokenizer=tokenizer) == right
        # ids may end inside a run of byte tokens: "a\n" is shown, the second newline is not
        ids = [a, newline, newline, 261]
        right = ([a, newline], "a\n", "stop")
        assert run(ids, sizes, stops="\nb", tokenizer=tokenizer) == right


def test_ids_arrive_as_soon_as_they_are_certain():
    rules = StopRules(9, stops=["cd"], tokenizer=BYTES)
    steps = [rules.push([i]) for i in b"abcx"]
    assert [bytes(k) for k, _, _ in steps] == [b"a", b"b", b"", b"cx"]
    plain = StopRules(9, tokenizer=BYTES)
    assert plain.push([0xC3]) == ([0xC3], "", None)  # no stop strings: nothing to wait for
    assert plain.room == 8


def test_after_the_end_nothing_is_taken():
    rules = StopRules(5, eos_ids=[256], tokenizer=BYTES)
    assert rules.push([97, 256, 98]) == ([97, 256], "a", "stop")
    assert rules.push([98]) == ([], "", "stop") and rules.room == 0 and rules.ids == [97, 256]
    assert rules.taken == 2


def test_without_a_tokenizer_ids_alone():
    assert run([5, 6, 7], [2], tokenizer=None, max_new_tokens=2) == ([5, 6], "", "length")
    with pytest.raises(ValueError, match="tokenizer"):
        StopRules(5, stops=["a"])


@pytest.mark.parametrize("bad", [-1, 1.5, "3", None])
def test_bad_limits(bad):
    with pytest.raises(ValueError, match="max_new_tokens"):
        StopRules(bad)
    if bad is not None:
        with pytest.raises(ValueError, match="context_left"):
            StopRules(3, context_left=bad)


PIECES = st.sampled_from(["a", "b", "ab", "ba", "é", "\ufffd", "\n"])
RULES = st.fixed_dictionaries(
    dict(
        max_new_tokens=st.integers(0, 14),
        eos_ids=st.sets(st.sampled_from([1, 256, 97, 13]), max_size=2),
        stops=st.lists(st.lists(PIECES, min_size=1, max_size=3).map("".join), max_size=3),
    )
)
IDS = [*b"ab\n", 0xC3, 0xA9, 0xE6, 0x97, 0xEF, 0xBF, 0xBD, 256]


@given(st.data(), RULES, st.sampled_from(["bytes", "sentencepiece", "trained"]))
@settings(max_examples=600, deadline=None)
def test_any_split_of_the_ids_gives_the_same_outcome(data, rules, name):
    tokenizer = TOKENIZERS[name]
    ids = st.sampled_from(IDS) | st.integers(0, tokenizer.vocab_size + 2)
    if name == "sentencepiece":
        ids = st.sampled_from([i + 3 for i in IDS]) | st.integers(258, 266) | st.integers(0, 3)
    ids = data.draw(st.lists(ids, max_size=16))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    one = run(ids, tokenizer=tokenizer, **rules)
    assert run(ids, sizes, tokenizer=tokenizer, **rules) == one
    kept, text, reason = one
    assert kept == ids[: len(kept)] and len(kept) <= rules["max_new_tokens"]
    assert not set(kept[:-1]) & rules["eos_ids"]
    if reason:
        # an end id has no part in the text, also where it is a token like any other
        body = kept[:-1] if kept and kept[-1] in rules["eos_ids"] else kept
        assert tokenizer.decode(body).startswith(text)
        assert not any(stop in text for stop in rules["stops"])


def test_outcome_equals_the_definition_on_whole_texts():
    rng, ends = random.Random(3), []
    for _ in range(1500):
        ids = [rng.choice(b"aabb\n\xc3\xa9" + b"\xe6\x97\xa5") for _ in range(12)]
        ids = [256 if rng.random() < 0.05 else i for i in ids]
        limit, eos_ids = rng.randrange(14), {256} if rng.random() < 0.5 else set()
        lengths = [rng.randrange(1, 4) for _ in range(rng.randrange(3))]
        stops = ["".join(rng.choices("ab\né", k=n)) for n in lengths]
        right = by_definition(ids, BYTES, limit, eos_ids, stops)
        rules = dict(max_new_tokens=limit, eos_ids=eos_ids, stops=stops)
        got = run(ids, [rng.randrange(1, 7)], **rules)
        if right is None:
            assert got[2] is None
        else:
            assert got == right, (ids, rules)
            ends.append(right[2])
    assert min(ends.count("stop"), ends.count("length")) > 200


def test_cost_per_id_does_not_grow_with_stop_strings(monkeypatch):
    decoded, real = [], type(BYTES).decode
    monkeypatch.setattr(
        type(BYTES), "decode", lambda self, ids: decoded.append(len(ids)) or real(self, ids)
    )
    rules = StopRules(10**6, stops=["ab"], tokenizer=BYTES)
    kept = [len(rules.push([97])[0]) for _ in range(1000)]  # every id may begin the stop string
    assert kept == [0] + [1] * 999 and not decoded
    assert rules.push([98])[2] == "stop" and len(decoded) <= 2
