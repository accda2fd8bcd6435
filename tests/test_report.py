"""What the terminal shows is the text itself, marked by how each token came, and the right figures.

Claims: the pieces joined are the output's text, coloured or not, also where a character is spread
over tokens or a stop string cuts; each piece has the kind of its token; every colour ends with its
line; a figure that does not exist is a dash; run_script gives one line and the right status.
"""

import io
import re
from dataclasses import replace

import pytest
from scripted import Oracle, Scripted
from tiny import tiny_model

from minispec import report
from minispec.compare import Difference, Pair, Result, compare
from minispec.generate import Output, generate
from minispec.growing import chain
from minispec.model import Model
from minispec.stats import DecodeStats, Step
from minispec.text import Tokenizer

TOKENIZER = Tokenizer.train(["the cat sat on the mat", "a hat and a bat ate oats"] * 9, 280)


@pytest.fixture(scope="module")
def talker():
    """A random model over bytes and short words: its text is full of broken characters."""
    model = tiny_model("llama", "conditional", seed=1, vocab_size=TOKENIZER.vocab_size)
    return Model(model.config, model.params, model.streams, TOKENIZER)


def strip(text):
    return re.sub(r"\033\[[0-9;]*m", "", text)


def handmade(text, counts, cut=False):
    """Output of the tokens of `text`: the prompt's pass, then steps with counts[i] accepted."""
    ids = TOKENIZER.encode(text, bos=False)
    steps, at = [Step(ids[:1], prompt=True)], 1
    for count in counts:
        tree = chain(ids[at - 1], ids[at:at + count])
        part = ids[at:at + count + 1]
        steps.append(Step(part, tree=tree, path=range(count + 1)))
        at += len(part)
    assert at == len(ids)
    return Output(ids, text, "stop", DecodeStats.of(steps), steps)


# --- pieces -------------------------------------------------------------------------------------

def test_each_token_has_the_kind_it_came_with():
    pieces = report.token_pieces(handmade("0123456789", [2, 0, 4]), TOKENIZER)
    assert "".join(kind[0] for _, kind in pieces) == "baabbaaaab"
    assert [piece for piece, _ in pieces] == list("0123456789")       # one token per digit


def test_a_step_cut_inside_its_path_has_no_bonus():
    out = handmade("0123", [3])                           # the last pass lost its bonus token
    assert out.steps[-1].cut
    pieces = report.token_pieces(out, TOKENIZER)
    assert pieces == [("0", "bonus"), *((digit, "accepted") for digit in "123")]


def test_a_character_spread_over_tokens_has_the_kind_of_its_last():
    assert len(TOKENIZER.encode("1€2", bos=False)) == 5   # the euro sign is three tokens
    for counts, euro in (([3], "accepted"), ([2, 0], "bonus"), ([0, 2], "accepted"),
                         ([1, 1], "accepted")):
        pieces = report.token_pieces(handmade("1€2", counts), TOKENIZER)
        assert [piece for piece, _ in pieces] == list("1€2")
        assert pieces[1][1] == euro and pieces[2][1] == "bonus"


def test_a_stop_string_that_starts_inside_a_token_cuts_its_piece():
    ids = TOKENIZER.encode("1the", bos=False)
    assert [TOKENIZER.decode([i]) for i in ids] == ["1", "the"]
    out = replace(handmade("1the", [1]), text="1t")       # as with the stop string "he"
    assert report.token_pieces(out, TOKENIZER) == [("1", "bonus"), ("t", "accepted")]


def test_the_rest_of_a_broken_character_keeps_its_kind():
    euro = TOKENIZER.encode("€", bos=False)
    steps = [Step(euro[:1], prompt=True), Step(euro[1:2], tree=chain(euro[0], euro[1:2]),
                                               path=(0, 1))]
    out = Output(euro[:2], TOKENIZER.decode(euro[:2]), "length", DecodeStats.of(steps), steps)
    assert report.token_pieces(out, TOKENIZER) == [("\ufffd", "accepted")]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafter", ["plain", "streams", "right", "mixed"])
def test_pieces_joined_are_the_text(talker, seed, drafter):
    answer = generate(talker, [3 + seed], 40)
    stops = ["", answer.text[9:12], answer.text[17], answer.text[-2:]]
    for stop in stops:
        drafters = {"plain": None, "streams": "streams", "right": Oracle([3], answer.ids, 4),
                    "mixed": Scripted([3], answer.ids, [3, 0, 2, 1] * 10, 3, 280)}
        out = generate(talker, [3 + seed], 40, drafters[drafter], stop=[stop] if stop else ())
        pieces = report.token_pieces(out, TOKENIZER)
        assert "".join(piece for piece, _ in pieces) == out.text == answer.text[:len(out.text)]
        assert all(piece for piece, _ in pieces)
        assert strip(report.coloured(out, TOKENIZER, True)) == out.text
        marked = report.coloured(out, TOKENIZER, False)
        assert "\033" not in marked
        if not {"[", "]"} & set(out.text):
            assert re.sub(r"[\[\]]", "", marked) == out.text
        if drafter == "plain":
            assert {kind for _, kind in pieces} <= {"bonus"}
        elif drafter == "right" and not stop:
            assert {kind for _, kind in pieces} == {"bonus", "accepted"}


# --- colours ------------------------------------------------------------------------------------

def test_accepted_runs_stand_in_brackets_without_colour():
    out = handmade("01234567", [2, 3])
    assert report.coloured(out, TOKENIZER, False) == "0[12]3[456]7"
    accepted, bonus, end = report.STYLES["accepted"], report.STYLES["bonus"], report.RESET
    assert report.coloured(out, TOKENIZER, True) == "".join(
        (accepted if digit in "12456" else bonus) + digit + end for digit in "01234567")


def test_a_colour_ends_with_its_line():
    assert report.paint("a\n\nb", "head", True) == "\033[1ma\033[0m\n\n\033[1mb\033[0m"
    assert report.paint("", "head", True) == "" and report.paint("a\nb", "head", False) == "a\nb"


def test_colours_have_a_second_sign():
    for kind, sign in (("accepted", "4"), ("bonus", "1")):
        assert sign in re.findall(r"\d+", report.STYLES[kind])
    assert report.STYLES["accepted"] in report.legend(True) and "\033" not in report.legend(False)
    assert "[accepted draft]" in report.legend(False)


@pytest.mark.parametrize("tty, no_color, wanted", [
    (True, None, True), (True, "", True), (True, "1", False), (True, "0", False),
    (False, None, False), (False, "1", False)])
def test_colour_only_on_a_terminal_and_never_with_no_color(monkeypatch, tty, no_color, wanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    stream = io.StringIO()
    stream.isatty = lambda: tty
    assert report.wants_colour(stream) is wanted
    monkeypatch.setattr("sys.stdout", stream)
    assert report.wants_colour() is wanted
    assert report.wants_colour(object()) is False


# --- figures ------------------------------------------------------------------------------------

def test_figures_are_those_of_the_result(talker):
    result = compare(talker, [[3], [4]], runs=2, max_new_tokens=12)
    facts, lines = result.as_dict(), report.figures(result)
    for line, name in zip(lines, ("tokens_per_forward", "cost_ratio", "predicted_speedup",
                                  "measured_speedup")):
        assert line.split(name.replace("_", " "))[1].split()[0] == f"{facts[name]:.2f}"
    rates = [f"depth {d}: {rate:.2f}" for d, rate in enumerate(facts["accept_rate"], 1)]
    assert lines[4].split("accept rate")[1].strip() == "  ".join(rates) and rates
    assert f"plain {facts['plain_tokens_per_second']:.0f}, " in lines[5]
    assert lines[5].endswith(f"speculative {facts['speculative_tokens_per_second']:.0f}")
    assert report.differences(result) == []


def test_figures_that_do_not_exist_are_dashes():
    out = Output([], "", "length", DecodeStats(), [])
    lines = report.figures(Result([Pair("", out, out, None)], None))
    assert [re.split(r"\s{2,}", line)[1] for line in lines[:5]] == ["-"] * 5
    assert lines[5].endswith("plain -, speculative -")
    assert report.number(None) == "-" and report.number(0.0) == "0.00"
    assert report.number(12.6, "{:.0f}") == "13"


def test_differences_name_place_ids_and_margin():
    pairs = [Pair("", None, None, None), Pair("", None, None, Difference(4, 17, 9, 0.00031)),
             Pair("", None, None, Difference(6, 5, None, None))]
    first, second = report.differences(Result(pairs, None))
    assert first == ("prompt 2: ids differ at new token 4: plain 17, speculative 9; their logits "
                     "are 3.10e-04 apart")
    assert second.startswith("prompt 3: ids differ at new token 6: plain 5, speculative None")
    assert "one output ends there" in second


# --- the scripts' way out -----------------------------------------------------------------------

@pytest.mark.parametrize("error, code, text", [
    (None, 7, ""), (ValueError("bad"), "me.py: bad", ""), (OSError("gone"), "me.py: gone", ""),
    (RuntimeError("no GPU"), "me.py: no GPU", ""), (KeyboardInterrupt(), 130, "stopped\n")])
def test_run_script_leaves_with_one_line_and_a_status(monkeypatch, capsys, error, code, text):
    def main():
        if error:
            raise error
        return 7

    monkeypatch.setattr("sys.argv", ["/some/where/me.py"])
    with pytest.raises(SystemExit) as end:
        report.run_script(main, "stopped")
    assert end.value.code == code and capsys.readouterr().err == text


def test_run_script_hides_no_bug(monkeypatch):
    monkeypatch.setattr("sys.argv", ["me.py"])
    with pytest.raises(KeyError):
        report.run_script(lambda: {}["missing"])
