"""The random cases of test_lossless.py: case `number` is always the same, whoever asks."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scripted import Garbage, Noisy, Oracle, RandomTrees, Union
from tiny import ARCHITECTURES, STREAMS, random_ids, tiny_model

from minispec.config import TreeConfig
from minispec.drafters.prompt_lookup import PromptLookup
from minispec.drafters.streams import Streams
from minispec.generate import generate

CASES = 320
VOCAB = 19
SAMPLING = {
    "greedy": {}, "temperature": dict(temperature=2.0),
    "top-k": dict(temperature=3.0, top_k=4), "top-p": dict(temperature=2.5, top_p=0.8),
    "both": dict(temperature=3.0, top_k=7, top_p=0.9)}
DRAFTERS = ("streams", "prompt_lookup", "oracle", "noisy", "random", "garbage", "union")


@dataclass(frozen=True)
class Case:
    number: int
    arch: str
    streams: object
    eos: tuple
    context: int
    length: int          # of the prompt
    drafter: str
    sampling: str
    tree: TreeConfig

    @property
    def model(self):
        return model_of(self.arch, self.streams, self.eos, self.context)

    @property
    def rng(self):
        return np.random.default_rng([99, self.number])

    @property
    def prompt(self):
        return random_ids(self.rng, self.length, 8)       # few ids: prompts repeat themselves

    @property
    def settings(self):
        return dict(max_new_tokens=18, seed=self.number, **SAMPLING[self.sampling])


@lru_cache(maxsize=None)
def model_of(arch, streams, eos, context):
    even = {"head_dim": 6} if streams == "rotation" else {}       # it turns pairs of channels
    return tiny_model(arch, streams, seed=2, std=0.5, eos_ids=eos, max_positions=context, **even)


def make_case(number):
    """Case `number` of the list; the drafter goes round so that each has its share."""
    rng = np.random.default_rng([7, number])

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    streams = pick(*STREAMS, None, None)
    drafter = DRAFTERS[number % len(DRAFTERS)]
    if streams is None and drafter == "streams":
        streams = "conditional"
    prunable = streams not in (None, "paper")
    tree = TreeConfig(
        shape=pick("full", "best_first"), conditional=pick(True, False), k=pick(1, 2, 3),
        depth=pick(0, 1, 2, 3), budget=pick(2, 5, 9), fused=pick(True, False),
        prune_threshold=pick(0.0, 0.0, 0.05, 0.4, 1.0) if prunable else 0.0,
        prune_budget=pick(0, 0, 1, 4) if prunable else 0)
    return Case(number, pick(*ARCHITECTURES), streams, pick((), (), (4, 11, 2, 7)),
                pick(20, 64, 64), pick(1, 2, 4, 7), drafter, pick("greedy", *SAMPLING), tree)


@lru_cache(maxsize=None)
def plain_ids(case):
    return generate(case.model, case.prompt, **case.settings).ids


@lru_cache(maxsize=None)
def answer_of(case):
    """What a drafter in the know drafts from: the answer, past any end id."""
    model = model_of(case.arch, case.streams, (), case.context)
    return generate(model, case.prompt, **{**case.settings, "max_new_tokens": 30}).ids


def drafter_of(case):
    prompt, rng = case.prompt, case.rng
    if case.drafter in ("streams", "prompt_lookup"):
        return case.drafter
    if case.drafter == "random":
        return RandomTrees(rng, VOCAB)
    if case.drafter == "garbage":
        return Garbage(prompt, answer_of(case), 3, VOCAB)
    if case.drafter == "oracle":
        return Oracle(prompt, answer_of(case), 4)
    noisy = Noisy(prompt, answer_of(case), rng, VOCAB)
    if case.drafter == "noisy":
        return noisy
    own = [Streams(case.tree)] if case.streams else []
    return Union([PromptLookup(), noisy, *own])


def speculative(case):
    return generate(case.model, case.prompt, drafter=drafter_of(case), tree=case.tree,
                    **case.settings)


def difference(plain, ids):
    """None, or in words where two id lists differ first; the lengths are looked at first."""
    if len(plain) != len(ids):
        return f"{len(ids)} ids, expected {len(plain)}: {ids} and {plain}"
    for n, (a, b) in enumerate(zip(plain, ids)):
        if a != b:
            return f"id {n} is {b}, expected {a}: {ids} and {plain}"
    return None
