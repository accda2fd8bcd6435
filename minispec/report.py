"""What a reader looks at in the terminal: text coloured by how each token came, and the figures.

Colours come from a palette that stays distinct for colour-blind eyes, and every colour has a
second sign (underline, bold). Without a terminal, or with NO_COLOR set, there is no escape code.

Read first: stats.py, compare.py. Proven by: tests/test_report.py.
"""

import os
import sys

from .text import TextStream

RESET = "\033[0m"
# What a user's input can cause. Anything else is a bug, and shows its traceback.
USER_ERRORS = (ValueError, OSError, RuntimeError, FloatingPointError)
STYLES = {
    "prompt": "\033[2m",                 # dim: what was given
    "bonus": "\033[1;38;5;39m",          # bold blue: the model's own token, one per pass
    "accepted": "\033[4;38;5;208m",      # underlined orange: drafted, and confirmed
    "head": "\033[1m",
}


def wants_colour(stream=None):
    """True if `stream` is a terminal and NO_COLOR is unset or empty (no-color.org)."""
    stream = stream or sys.stdout
    return not os.environ.get("NO_COLOR") and hasattr(stream, "isatty") and stream.isatty()


def paint(text, style, colour):
    """`text` in one of STYLES, line by line, or as it is without colour."""
    if not colour or not text:
        return text
    return "\n".join(STYLES[style] + line + RESET if line else "" for line in text.split("\n"))


def token_pieces(output, tokenizer):
    """[(text, "accepted" | "bonus")] of an Output: which characters came from accepted drafts.

    The pieces joined are the output's text. A character spread over several tokens belongs to the
    last of them.
    """
    kinds = [kind for step in output.steps
             for kind in ["accepted"] * step.accepted + ["bonus"] * (not step.cut)]
    stream, pieces, left, kind = TextStream(tokenizer), [], len(output.text), "bonus"
    for token, kind in zip(output.ids, kinds):            # a stop string may have cut ids off
        text = stream.push([token])[:left]
        left -= len(text)
        pieces.append((text, kind))
    pieces.append((stream.finish()[:left], kind))
    return [(text, kind) for text, kind in pieces if text]


def coloured(output, tokenizer, colour):
    """The text of an Output, accepted and bonus tokens apart.

    Without colour, accepted runs stand in [brackets], so that nothing is lost in a file.
    """
    parts, run = [], []
    for text, kind in token_pieces(output, tokenizer) + [("", "bonus")]:
        if colour:
            parts.append(paint(text, kind, True))
        elif kind == "accepted":
            run.append(text)
        else:
            parts += ["[" + "".join(run) + "]"] if run else []
            parts.append(text)
            run = []
    return "".join(parts)


def legend(colour):
    """One line that says what the marks mean."""
    if not colour:
        return "[accepted draft]  bonus: the model's own token, one per pass"
    return (paint("accepted draft", "accepted", True) + "  "
            + paint("bonus: the model's own token, one per pass", "bonus", True))


def number(value, form="{:.2f}"):
    """A figure, or a dash where there is none."""
    return "-" if value is None else form.format(value)


def figures(result):
    """Lines with the four numbers (stats.py) and the rates behind them."""
    facts = result.as_dict()
    rates = "  ".join(f"depth {d + 1}: {number(rate)}"
                      for d, rate in enumerate(facts["accept_rate"]))
    lines = [
        f"tokens per forward  {number(facts['tokens_per_forward'])}    (plain decoding: 1.00)",
        f"cost ratio          {number(facts['cost_ratio'])}    one speculative / one plain step",
        f"predicted speedup   {number(facts['predicted_speedup'])}    "
        "tokens per forward / cost ratio",
        f"measured speedup    {number(facts['measured_speedup'])}    "
        "plain seconds / speculative seconds",
        f"accept rate         {rates or '-'}",
        f"tokens per second   plain {number(facts['plain_tokens_per_second'], '{:.0f}')}, "
        f"speculative {number(facts['speculative_tokens_per_second'], '{:.0f}')}",
    ]
    return lines


def differences(result):
    """Lines about every prompt whose ids differ; empty if none does."""
    lines = []
    for number_, pair in enumerate(result.pairs, 1):
        d = pair.difference
        if d is not None:
            margin = "one output ends there" if d.margin is None else \
                f"their logits are {d.margin:.2e} apart"
            lines.append(f"prompt {number_}: ids differ at new token {d.index}: plain "
                         f"{d.plain_id}, speculative {d.speculative_id}; {margin}")
    return lines


def run_script(main, interrupted="interrupted"):
    """Run a script's `main` and leave with the status it returns.

    What a user can cause ends with one line on stderr and status 1, Ctrl-C with a line and 130.
    """
    try:
        status = main()
        sys.stdout.flush()                                # a closed pipe shows here at the latest
    except BrokenPipeError:                               # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except USER_ERRORS as error:
        status = f"{os.path.basename(sys.argv[0])}: {error}"
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        status = 130
    sys.exit(status)
