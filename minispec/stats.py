"""The figures: what one decode step did, what a run did, how two runs compare. Each defined once.

The one to remember: every pass of the target yields one token of its own and, on top, those tokens
that were drafted and accepted. Hence  emitted == accepted + forwards.  Speed is another matter: a
pass over a tree costs more than a pass over one token, which is what `Comparison` is about.

Read first: tree.py, verify.py. Read next: report.py (shows these), bench.py (measures them).
Proven by: tests/test_stats.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from .tree import Tree


@dataclass
class Step:
    """One pass of the target, and what came of it.

    ids         new ids that became final; a stop string may hold some back for a later step
    text        the text that became final
    emitted     tokens that the pass emitted, up to the one that met a stop rule; default len(ids)
    tree, path  the tree that was verified, and all its accepted nodes from the root on, also those
                that a stop rule cut off; None and the root for a pass without drafts
    drafted     tree nodes drafted, root not counted; default: those of `tree`, which are fewer if
                the tree was pruned
    rows        rows run through the model, streams included; default: the tree's nodes
    seconds     duration, drafting included
    prompt      True for the prompt's pass, which emits the first token

    Raises: ValueError if there were no tokens, or more than the path and one.
    """

    ids: list
    text: str = ""
    emitted: int | None = None
    tree: Tree | None = None
    path: Sequence = (0,)
    drafted: int | None = None
    rows: int | None = None
    seconds: float = 0.0
    prompt: bool = False

    def __post_init__(self):
        nodes = 1 if self.tree is None else len(self.tree)
        self.emitted = len(self.ids) if self.emitted is None else self.emitted
        self.drafted = nodes - 1 if self.drafted is None else self.drafted
        self.rows = nodes if self.rows is None else self.rows
        if not 1 <= self.emitted <= len(self.path):
            raise ValueError(f"a step emitted {self.emitted} tokens along a path of "
                             f"{len(self.path)} nodes, expected 1..{len(self.path)}")

    @property
    def accepted(self):
        """Emitted tokens that came from the tree. The one more, if any, is the bonus token."""
        return min(self.emitted, len(self.path) - 1)

    @property
    def cut(self):
        """True if a stop rule ended the output inside the path, before the bonus token."""
        return self.emitted < len(self.path)

    @property
    def depth_drafted(self):
        """Depth of the verified tree."""
        return 0 if self.tree is None else self.tree.max_depth


@dataclass
class DecodeStats:
    """Sums over the steps of one run; `+` joins runs.

    forwards        passes of the target after the prompt
    emitted         tokens those passes emitted. The very first token comes out of the prompt's
                    pass: it is part of the output ids but in none of these figures
    drafted, rows   sums of the steps' figures, the prompt's pass left out
    seconds         sum of the steps' seconds, likewise
    prompt_seconds  the prompt's pass
    tried, passed   [d - 1]: steps that accepted depth d - 1 and drafted depth d; those of them
                    that accepted depth d. A stop rule that cuts a step ends its trials there
    step_seconds    seconds of every step
    """

    forwards: int = 0
    emitted: int = 0
    drafted: int = 0
    rows: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    tried: list = field(default_factory=list)
    passed: list = field(default_factory=list)
    step_seconds: list = field(default_factory=list)

    @classmethod
    def of(cls, steps):
        """The figures of a run, from its steps, the prompt's pass among them."""
        stats = cls()
        for step in steps:
            stats.add(step)
        return stats

    def add(self, step):
        """Count one more step."""
        if step.prompt:
            self.prompt_seconds += step.seconds
            return
        self.forwards += 1
        self.emitted += step.emitted
        self.drafted += step.drafted
        self.rows += step.rows
        self.seconds += step.seconds
        self.step_seconds.append(step.seconds)
        # The target judged one depth more than it accepted, if there was one and no stop rule cut.
        judged = min(step.accepted + (not step.cut), step.depth_drafted)
        self.tried = add_lists(self.tried, [1] * judged)
        self.passed = add_lists(self.passed, [int(d < step.accepted) for d in range(judged)])

    def __add__(self, other):
        if not isinstance(other, DecodeStats):
            return NotImplemented
        return DecodeStats(
            forwards=self.forwards + other.forwards,
            emitted=self.emitted + other.emitted,
            drafted=self.drafted + other.drafted,
            rows=self.rows + other.rows,
            seconds=self.seconds + other.seconds,
            prompt_seconds=self.prompt_seconds + other.prompt_seconds,
            tried=add_lists(self.tried, other.tried),
            passed=add_lists(self.passed, other.passed),
            step_seconds=self.step_seconds + other.step_seconds)

    @property
    def accepted(self):
        """Tokens gained over plain decoding: emitted - forwards.

        The sum of the steps' `accepted`, less 1 for a step that a stop rule cut before its bonus.
        """
        return self.emitted - self.forwards

    @property
    def tokens_per_forward(self):
        """emitted / forwards. The paper's call reduction ratio; "mean accepted" in Spec-Bench."""
        return ratio(self.emitted, self.forwards)

    @property
    def accept_rate(self):
        """[d - 1]: P(depth d accepted | depth d - 1 accepted), over steps that drafted depth d."""
        return [ratio(passed, tried) for passed, tried in zip(self.passed, self.tried)]

    @property
    def tokens_per_second(self):
        """emitted / seconds: the prompt and the first token are not in it."""
        return ratio(self.emitted, self.seconds)

    def as_dict(self):
        """All figures as plain numbers, for JSON. Undefined ones are None."""
        names = ("forwards", "emitted", "accepted", "tokens_per_forward", "accept_rate", "drafted",
                 "rows", "seconds", "prompt_seconds", "tokens_per_second")
        return {name: getattr(self, name) for name in names}


@dataclass
class Comparison:
    """Plain against speculative decoding of the same tokens, several alternating runs of each.

    plain, speculative   lists of DecodeStats, run i of one beside run i of the other. Leave the
                         warm-up out, and check first that the ids agree: nothing is gained by a
                         fast wrong output
    Raises: ValueError if the lists are not pairs of runs with equal numbers of tokens.
    """

    plain: list
    speculative: list

    def __post_init__(self):
        counts = [[run.emitted for run in runs] for runs in (self.plain, self.speculative)]
        if not counts[0] or counts[0] != counts[1]:
            raise ValueError(f"runs emitted {counts[0]} (plain) and {counts[1]} (speculative) "
                             "tokens: expected pairs of runs over the same tokens")

    @property
    def tokens_per_forward(self):
        """Of all speculative runs together."""
        return sum(self.speculative, DecodeStats()).tokens_per_forward

    @property
    def cost_ratio(self):
        """Seconds of one speculative step / seconds of one plain step, medians over all steps."""
        plain, speculative = ([seconds for run in runs for seconds in run.step_seconds]
                              for runs in (self.plain, self.speculative))
        return ratio(median(speculative), median(plain)) if plain and speculative else None

    @property
    def predicted_speedup(self):
        """tokens_per_forward / cost_ratio: what typical steps promise.

        With mean instead of median seconds per step this would be the measured speedup by algebra;
        where the two differ, some steps were far from typical.
        """
        return ratio(self.tokens_per_forward, self.cost_ratio)

    @property
    def measured_speedup(self):
        """Median over the runs of plain seconds / speculative seconds."""
        pairs = [ratio(plain.seconds, speculative.seconds)
                 for plain, speculative in zip(self.plain, self.speculative)]
        return None if None in pairs else median(pairs)

    def as_dict(self):
        """The four figures that only make sense side by side."""
        names = ("tokens_per_forward", "cost_ratio", "predicted_speedup", "measured_speedup")
        return {name: getattr(self, name) for name in names}


def ratio(above, below):
    """above / below, or None where that says nothing."""
    return above / below if below and above is not None else None


def add_lists(a, b):
    """Sum of two lists entry by entry, the shorter one continued with zeros."""
    a, b = sorted((a, b), key=len)
    return [x + y for x, y in zip(a, b)] + b[len(a):]
