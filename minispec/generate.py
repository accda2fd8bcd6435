"""Decoding: one loop for plain and speculative, over one set of stop rules.

A step drafts a tree, runs it through the model once, lets the model choose a token at every node,
walks the tree along those choices and keeps the walked rows in the cache. Plain decoding is the
same step with a tree of one node, so both emit the same ids: the model's choice at a position
depends on the text before it and on the coin of (seed, position), never on the drafter.

    draft -> model.step -> choose_token -> verify.walk -> StopRules.push -> cache.keep

Read first: model.py, tree.py, verify.py, stopping.py. Proven by: tests/test_lossless.py,
tests/test_generate.py.
"""

import time
from dataclasses import dataclass

import numpy as np

from . import pruning
from .backend import synchronize, to_host
from .config import TreeConfig
from .drafters import Drafter
from .drafters.prompt_lookup import PromptLookup
from .drafters.streams import Streams
from .growing import chain
from .model import StreamStates
from .sampling import check_sampling, choose_token, coins, filter_probs
from .stats import DecodeStats, Step
from .stopping import StopRules
from .verify import typical_inputs, typical_walk, walk


@dataclass
class Output:
    """What `generate` returns.

    ids            new ids only; a final end-of-text id is among them
    text           their text, cut before a stop string
    finish_reason  "stop" (end id or stop string) or "length"
    stats, steps   stats.DecodeStats and the list of stats.Step behind it
    """

    ids: list
    text: str
    finish_reason: str
    stats: DecodeStats
    steps: list


def resolve_drafter(drafter, model, tree):
    """A Drafter, or None for plain decoding, from what the caller passed.

    Raises ValueError for an unknown name, or for streams from a model that has none.
    """
    if drafter is None:
        return None
    if isinstance(drafter, str):
        known = {"streams": lambda: Streams(tree), "prompt_lookup": PromptLookup}
        if drafter not in known:
            raise ValueError(f"unknown drafter {drafter!r}, expected None, "
                             f"{', '.join(map(repr, known))} or a Drafter")
        drafter = known[drafter]()
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter is a {type(drafter).__name__}, expected None, a name or a "
                         "Drafter")
    if drafter.needs_streams and model.streams is None:
        raise ValueError(f"drafter {type(drafter).__name__} needs streams, this model has none")
    return drafter


def prompt_ids(model, prompt):
    """Ids of a prompt given as text or as ids.

    Raises ValueError for an empty prompt, ids outside the vocabulary, or more than the context.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError("the prompt is text, but this model has no tokenizer; pass ids")
        prompt = model.tokenizer.encode(prompt)
    ids = [int(i) for i in model.check_ids(np.asarray(prompt, dtype=None if len(prompt) else int))]
    if not ids:
        raise ValueError("the prompt is empty and this model puts no BOS id in front: there is "
                         "nothing to continue; give at least one token")
    if len(ids) > model.config.max_positions:
        raise ValueError(f"the prompt has {len(ids)} tokens, the model's context is "
                         f"{model.config.max_positions}")
    return ids


class Session:
    """One generation in progress: the ids so far, the cache, and where the next streams start."""

    def __init__(self, model, ids, rules, drafter, tree, sampling, seed):
        self.model, self.ids, self.rules, self.drafter = model, ids, rules, drafter
        self.tree, self.sampling, self.seed = tree, sampling, seed
        self.wants_streams = drafter is not None and drafter.needs_streams
        self.fused = self.wants_streams and tree.fused
        room = min(len(ids) + rules.room, model.config.max_positions)
        self.cache = model.new_cache(room + 64)
        self.hidden = self.states = None

    def choose(self, logits, depth):
        """The model's choices after nodes at these depths.   logits (N, V), depth (N,) -> (N,)."""
        coin = 0.0                                        # greedy choices need none
        if self.sampling[0] > 0:
            coin = coins(self.seed, len(self.ids), int(depth.max()) + 1)[depth]   # (N,)
        return to_host(choose_token(logits, coin, *self.sampling))

    def prompt_step(self):
        """Prefill, and the first token."""
        start = time.perf_counter()
        if self.drafter is not None:
            self.drafter.begin(self.ids)
        out = self.model.prefill(self.cache, self.ids, streams=self.fused)
        choice = self.choose(out.logits, np.zeros(1, dtype=int))
        self.remember(out, 0)
        ids, text, _ = self.rules.push(choice)
        self.ids.append(int(choice[0]))
        return Step(ids, text, emitted=1, rows=out.rows, prompt=True,
                    seconds=time.perf_counter() - start)

    def step(self):
        """Draft, verify, keep."""
        start = time.perf_counter()
        tree = drafted = self.draft()
        out = self.model.step(self.cache, tree, self.fused, self.pruner(tree))
        if out.kept is not None:
            tree = tree.take(out.kept)
        verdict = self.verify(tree, out.logits)
        before = self.rules.taken
        ids, text, _ = self.rules.push(verdict.emitted)
        emitted = self.rules.taken - before
        path = verdict.path[:emitted]                     # a stop rule may cut an accepted run
        self.cache.keep(path)
        self.remember(out, path[-1])
        self.ids.extend(verdict.emitted[:emitted])
        synchronize(self.model.xp)
        return Step(ids, text, emitted=emitted, tree=tree, path=verdict.path,
                    drafted=len(drafted) - 1, rows=out.rows, seconds=time.perf_counter() - start)

    def draft(self):
        """This step's tree. A tree one deeper than `room - 1` could not be emitted in full."""
        room = self.rules.room - 1
        if self.drafter is None:
            return chain(self.ids[-1], [])
        streams = None
        if self.wants_streams:
            if self.states is None:                       # deferred: only now, when they are needed
                self.states = self.model.deferred_streams(self.cache, self.hidden)
            streams = StreamStates(self.model, self.states)
        tree = self.drafter.draft(self.ids, streams, room)
        if tree.token[0] != self.ids[-1]:
            raise ValueError(f"drafter {type(self.drafter).__name__} returned a tree with root "
                             f"{tree.token[0]}, expected the last token {self.ids[-1]}")
        self.model.check_ids(tree.token)
        return tree if tree.max_depth <= room else tree.cut(room)

    def pruner(self, tree):
        """The function that drops tree nodes at layer L-A, or None."""
        if not self.tree.prunes or self.drafter is None:
            return None
        return lambda scores: pruning.survivors(tree, scores, self.tree.prune_threshold,
                                                self.tree.prune_budget)

    def verify(self, tree, logits):
        """Walk the tree with the model's choices.   logits (N, V) -> verify.Verdict."""
        choices = self.choose(logits, tree.depth)         # (N,)
        if self.tree.acceptance == "exact" or self.drafter is None:
            return walk(tree, choices)
        temperature, top_k, top_p = self.sampling
        probs = filter_probs(logits, temperature or 1.0, top_k, top_p)    # (N, V)
        return typical_walk(tree, *typical_inputs(tree, probs), choices)

    def remember(self, out, node):
        """Keep what the next tree grows from: the streams beside `node`, or its hidden state."""
        self.states = None
        if self.wants_streams:
            self.hidden = out.hidden[node]                # (C,)
            if out.streams is not None:
                self.states = out.streams[node]           # (G, C)


def start(model, prompt, max_new_tokens, drafter, temperature, top_k, top_p, seed, stop, tree):
    """A checked Session. Raises ValueError for anything that cannot be decoded."""
    tree = TreeConfig() if tree is None else tree
    check_sampling(temperature, top_k, top_p)
    coins(seed, 0, 0)                                     # raises for an impossible seed
    if tree.prunes and drafter is not None and "prune.down" not in model.params:
        raise ValueError("the tree is to be pruned, but this model has no pruning map")
    ids = prompt_ids(model, prompt)
    rules = StopRules(max_new_tokens, model.config.eos_ids, stop, model.tokenizer,
                      model.config.max_positions - len(ids))
    drafter = resolve_drafter(drafter, model, tree)
    return Session(model, ids, rules, drafter, tree, (temperature, top_k, top_p), seed)


def run(session):
    """Steps of a session until a stop rule ends it."""
    if session.rules.finish_reason is None:
        yield session.prompt_step()
    while session.rules.finish_reason is None:
        yield session.step()


def stream(model, prompt, max_new_tokens=128, drafter=None, temperature=0.0, top_k=0, top_p=1.0,
           seed=0, stop=(), tree=None):
    """Decode step by step -> iterator of stats.Step; the arguments are those of `generate`.

    The `.text` of all steps joined is the text, the `.ids` joined are the ids. The first step is
    the prompt's pass. Errors are raised here, not at the first step.
    """
    return run(start(model, prompt, max_new_tokens, drafter, temperature, top_k, top_p, seed, stop,
                     tree))


def generate(model, prompt, max_new_tokens=128, drafter=None, temperature=0.0, top_k=0, top_p=1.0,
             seed=0, stop=(), tree=None):
    """Decode a prompt -> Output. The ids are the same for every drafter and tree.

    model           from `load`
    prompt          text, or a sequence of ids
    max_new_tokens  most ids to return, exact; 0 runs nothing
    drafter         None (one token per pass), "streams", "prompt_lookup", or a Drafter
    temperature     0: greedy; top_k, top_p: 0 and 1.0 turn the filters off
    seed            with the position it fixes the coin of every token
    stop            a stop string, or several
    tree            config.TreeConfig: shape, budget, pruning, fused or deferred streams
    Raises ValueError for an empty or too long prompt, an unknown drafter, or settings out of range.
    """
    session = start(model, prompt, max_new_tokens, drafter, temperature, top_k, top_p, seed, stop,
                    tree)
    steps = list(run(session))
    return Output(session.rules.ids, session.rules.text, session.rules.finish_reason,
                  DecodeStats.of(steps), steps)
