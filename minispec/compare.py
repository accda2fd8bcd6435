"""Plain beside speculative decoding: are the ids the same, and what does speculation gain?

Runs alternate prompt by prompt, so that a machine that changes its speed changes it for both. A
speed is reported only for a comparison in which every id agreed. In float32 two logits can be so
close that one row and nine rows of a matmul order them differently; such a difference is never
hidden: it is reported with its margin.

Read first: generate.py, stats.py. Proven by: tests/test_compare.py, tests/test_cli.py.
"""

from dataclasses import dataclass

from .backend import to_host
from .generate import generate, prompt_ids
from .growing import chain
from .stats import Comparison, DecodeStats


@dataclass
class Difference:
    """First place where two outputs differ.

    index: in the new ids; plain_id, speculative_id: None past the end of the shorter output;
    margin: how far apart the logits of the two ids are (recomputed), None without both.
    """

    index: int
    plain_id: int
    speculative_id: int
    margin: float


@dataclass
class Pair:
    """One prompt decoded both ways: two `Output`s and where they differ (None: nowhere)."""

    prompt: object
    plain: object
    speculative: object
    difference: Difference


@dataclass
class Result:
    """All prompts, each by its first run or by the first that differs.

    comparison: the speeds, None unless all ids of all runs agree.
    """

    pairs: list
    comparison: Comparison

    @property
    def identical(self):
        return all(pair.difference is None for pair in self.pairs)

    @property
    def speculative(self):
        """DecodeStats over all prompts."""
        return sum((pair.speculative.stats for pair in self.pairs), DecodeStats())

    @property
    def plain(self):
        return sum((pair.plain.stats for pair in self.pairs), DecodeStats())

    def as_dict(self):
        """The figures as plain numbers, for `decode.py --json`."""
        stats = self.speculative
        speeds = dict.fromkeys(("cost_ratio", "predicted_speedup", "measured_speedup",
                                "plain_tokens_per_second", "speculative_tokens_per_second"))
        if self.comparison:
            speeds.update(self.comparison.as_dict(),
                          plain_tokens_per_second=self.plain.tokens_per_second,
                          speculative_tokens_per_second=stats.tokens_per_second)
        return {"identical": self.identical, **speeds,
                "tokens_per_forward": stats.tokens_per_forward, "accept_rate": stats.accept_rate}


def logits_after(model, prompt, new_ids):
    """The logits that plain decoding of `prompt` sees after it has emitted `new_ids`.   -> (V,)"""
    cache = model.new_cache()
    out = model.prefill(cache, prompt_ids(model, prompt))
    for token in new_ids:
        out = model.step(cache, chain(token, []))
        cache.keep([0])
    return to_host(out.logits[-1])                        # (V,)


def first_difference(model, prompt, plain, speculative):
    """Difference of two id lists, or None if they are equal."""
    longest = max(len(plain), len(speculative))
    a = plain + [None] * (longest - len(plain))
    b = speculative + [None] * (longest - len(speculative))
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            margin = None
            if x is not None and y is not None:
                row = logits_after(model, prompt, plain[:index])  # (V,)
                margin = abs(float(row[x]) - float(row[y]))
            return Difference(index, x, y, margin)
    return None


def compare(model, prompts, runs=3, drafter="streams", tree=None, progress=None, **settings):
    """Decode every prompt plainly and speculatively, `runs` times in turn -> Result.

    settings: those of `generate` but for drafter and tree. progress: called after every prompt.
    Raises ValueError for no prompts or no runs, and what `generate` raises.
    """
    if not prompts or runs < 1:
        raise ValueError(f"{len(prompts)} prompts and {runs} runs, expected 1 or more of each")
    pairs, plain_runs, speculative_runs = [], [], []
    # warm-up, not counted: first calls allocate and fill caches
    generate(model, prompts[0], drafter=drafter, tree=tree, **settings)
    generate(model, prompts[0], **settings)
    for number in range(runs):
        plain_stats, speculative_stats = DecodeStats(), DecodeStats()
        for i, prompt in enumerate(prompts):
            plain = generate(model, prompt, **settings)
            speculative = generate(model, prompt, drafter=drafter, tree=tree, **settings)
            plain_stats, speculative_stats = (plain_stats + plain.stats,
                                              speculative_stats + speculative.stats)
            pair = Pair(prompt, plain, speculative, first_difference(
                model, prompt, plain.ids, speculative.ids))
            if number == 0:
                pairs.append(pair)
            elif pair.difference is not None and pairs[i].difference is None:
                pairs[i] = pair                           # a machine that computes otherwise now
            if progress:
                progress()
        plain_runs.append(plain_stats)
        speculative_runs.append(speculative_stats)
    agree = all(pair.difference is None for pair in pairs)
    return Result(pairs, Comparison(plain_runs, speculative_runs) if agree else None)
