"""Negative controls of test_lossless.py: each wrong rule, planted alone, makes its comparison fail.

The wrong rules are those that users of similar software met: cache rows cut off instead of kept by
path (H-04), siblings that see each other or sit in a row (H-19), coins drawn per node (H-05).
"""

import importlib
from unittest import mock

import numpy as np
import pytest
from lossless_cases import CASES, difference, make_case, plain_ids, speculative

from minispec import masks
from minispec.cache import KVCache
from minispec.generate import Session
from minispec.model import Model
from minispec.verify import Verdict

generate_module = importlib.import_module("minispec.generate")    # the package exports the function

# cases whose trees have accepted paths among wrong branches
NUMBERS = [n for n in range(CASES) if make_case(n).drafter in ("noisy", "union")]


def always_the_best_child(tree, choices):
    """Accepts the drafter's first guess at every level."""
    path = [0]
    while tree.children(path[-1]):
        path.append(tree.children(path[-1])[0])
    return Verdict(path, tree.token[path[1:]].tolist() + [int(choices[path[-1]])])


def any_child(tree, choices):
    """Looks for the target's choice among all nodes of the next depth, not among the children."""
    path = [0]
    while True:
        found = [n for n in range(len(tree)) if tree.depth[n] == len(path)
                 and tree.token[n] == choices[path[-1]]]
        if not found:
            return Verdict(path, [int(choices[n]) for n in path])
        path.append(found[0])


def coin_per_node(self, logits, depth, choose=Session.choose):
    return choose(self, logits, np.arange(len(depth)))


def one_coin_per_step(self, logits, depth, choose=Session.choose):
    return choose(self, logits, np.zeros_like(depth))


def cut_off_the_tail(self, path):
    self.length += len(path)


def keep_one_row_less(self, path, keep=KVCache.keep):
    keep(self, path)
    self.length -= len(path) > 1


def seen_by_all_after(ancestors, cached):
    return masks.causal(len(ancestors), cached)


def blind_to_the_parent(ancestors, cached):
    mask = masks.causal(1, cached)[0, :cached]
    return np.concatenate([np.tile(mask, (len(ancestors), 1)),
                           np.eye(len(ancestors), dtype=bool)], axis=1)


def positions_in_a_row(self, cache, tree, fused=False, prune=None):
    return self.run(cache, tree.token, masks.tree_context(tree.ancestors, len(cache)),
                    bundles=len(tree) if fused or self.sees_streams else 0, prune=prune, tree=tree)


def streams_beside_the_last_node_alone(self, bundles, sees=Model._sees):
    mask = sees(self, bundles)
    if mask is not None:
        mask[:, :-1] = False
    return mask


def no_compaction(self, kept, layers):
    pass


WRONG = {
    "best child": (generate_module, "walk", always_the_best_child),
    "any node of the depth": (generate_module, "walk", any_child),
    "coin per node": (Session, "choose", coin_per_node),
    "one coin per step": (Session, "choose", one_coin_per_step),
    "truncated cache": (KVCache, "keep", cut_off_the_tail),
    "one row short": (KVCache, "keep", keep_one_row_less),
    "visible siblings": (masks, "tree_context", seen_by_all_after),
    "invisible parents": (masks, "tree_context", blind_to_the_parent),
    "positions in a row": (Model, "step", positions_in_a_row),
    "streams of one node": (Model, "_sees", streams_beside_the_last_node_alone),
    "pruned rows stay": (KVCache, "prune", no_compaction),
}


def differing(numbers):
    cases = [make_case(number) for number in numbers]
    return [case.number for case in cases
            if difference(plain_ids(case), speculative(case).ids) is not None]


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_wrong_rule_is_found(wrong):
    place, name, rule = WRONG[wrong]
    with mock.patch.object(place, name, rule):
        assert any(differing([number]) for number in NUMBERS), f"{wrong}: every id agreed"


def test_the_right_rules_pass():
    assert differing(NUMBERS[:20]) == []


def test_what_a_drafter_is_told_cannot_matter():
    """Positive control: streams of a wrong node make bad drafts, and the same ids."""
    def remember(self, out, node, right=Session.remember):
        right(self, out, 0)

    numbers = [n for n in range(CASES) if make_case(n).drafter == "streams"][:20]
    with mock.patch.object(Session, "remember", remember):
        assert differing(numbers) == []
