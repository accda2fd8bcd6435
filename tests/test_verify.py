"""verify.py: sample and match emits what plain decoding emits, whatever the tree. Wrong rules fail.

The target here is a small random table: its choice after a sequence depends on the last two ids, on
the position and (sampling) on the coin of that position. test_lossless.py has real models.
"""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minispec.stats import DecodeStats, Step
from minispec.growing import chain
from minispec.tree import Tree
from minispec.verify import Verdict, typical_inputs, typical_walk, walk

VOCAB = 5


class Target:
    """Next-token distributions (V, V, V) indexed by the last two ids, and one coin a position."""

    def __init__(self, seed, sample):
        rng = np.random.default_rng(seed)
        self.table = rng.dirichlet(np.ones(VOCAB) * 0.5, (VOCAB, VOCAB))      # (V, V, V)
        self.coins, self.sample = rng.random(100), sample

    def choice(self, ids):
        probs = self.table[ids[-2], ids[-1]]                      # (V,)
        if not self.sample:
            return int(probs.argmax())
        return int((probs.cumsum() <= self.coins[len(ids)]).sum().clip(0, VOCAB - 1))

    def plain(self, ids, count):
        ids = list(ids)
        for _ in range(count):
            ids.append(self.choice(ids))
        return ids

    def choices(self, tree, ids):
        """The target's choice at every node of a tree whose root is ids[-1]."""
        return [self.choice([*ids[:-1], *tree.token[tree.path(n)].tolist()])
                for n in range(len(tree))]


def random_tree(rng, root, oracle=()):
    """Random nodes, some of them the continuation that the target will choose."""
    parent, token = [-1], [root]
    for word in oracle[:rng.integers(0, len(oracle) + 1)]:
        parent.append(len(parent) - 1)
        token.append(word)
    for _ in range(rng.integers(0, 8)):
        pair = (int(rng.integers(0, len(parent))), int(rng.integers(0, VOCAB)))
        if pair not in zip(parent, token):
            parent.append(pair[0])
            token.append(pair[1])
    return Tree(parent, token)


def decode(target, rng, length, rule=walk):
    ids = [0, 1]
    while len(ids) < length:
        tree = random_tree(rng, ids[-1], target.plain(ids, 3)[len(ids):])
        ids += rule(tree, target.choices(tree, ids)).emitted
    return ids[:length]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_any_tree_gives_the_ids_of_plain_decoding(seed, sample):
    target = Target(seed, sample)
    assert decode(target, np.random.default_rng(seed), 32) == target.plain([0, 1], 30)


def first_child_wins(tree, choices):
    """A wrong rule: accept the first child without asking the target."""
    path = [0, *tree.children(0)[:1]]
    return Verdict(path, tree.token[path[1:]].tolist() + [choices[path[-1]]])


def parents_choice_forgotten(tree, choices):
    """A wrong rule: the bonus token comes from the root instead of the last accepted node."""
    verdict = walk(tree, choices)
    return Verdict(verdict.path, verdict.emitted[:-1] + [choices[0]])


@pytest.mark.parametrize("rule", [first_child_wins, parents_choice_forgotten])
def test_negative_control_wrong_rules_are_seen(rule):
    wrong = 0
    for seed in range(20):
        target = Target(seed, sample=True)
        wrong += decode(target, np.random.default_rng(seed), 32, rule) != target.plain([0, 1], 30)
    assert wrong >= 15


def test_an_oracle_gains_its_depth_and_garbage_gains_nothing():
    target = Target(0, sample=False)
    ids = target.plain([0, 1], 5)
    tree = chain(ids[-1], target.plain(ids, 4)[len(ids):])
    assert walk(tree, target.choices(tree, ids)).path == [0, 1, 2, 3, 4]
    right = target.choice(ids)
    tree = Tree([-1, 0, 1], [ids[-1], (right + 1) % VOCAB, right])
    assert walk(tree, target.choices(tree, ids)) == ([0], [right])


def test_h04_path_of_nodes_that_do_not_lie_in_a_row():
    tree = Tree([-1, 0, 0, 2], [10, 11, 12, 13])
    verdict = walk(tree, np.array([12, 99, 13, 14]))
    assert verdict.path == [0, 2, 3]
    assert verdict.emitted == [12, 13, 14]
    assert tree.token[verdict.path].tolist() == [10, 12, 13]              # the rows to keep
    assert tree.positions(50)[verdict.path].tolist() == [50, 51, 52]      # as if fed one by one
    assert all(type(x) is int for x in verdict.path + verdict.emitted)    # JSON can hold them


def test_h05_one_draw_per_node_however_many_paths_share_it():
    """Root -> a, e; a -> b, c, d; e -> f. The target likes a and e equally."""
    a, b, c, d, e, f = range(1, 7)
    tree = Tree([-1, 0, 0, 1, 1, 1, 2], [0, a, e, b, c, d, f])
    trials = 100_000
    rng = np.random.default_rng(5)
    at_root = np.where(rng.random(trials) < 0.5, a, e).tolist()
    below = rng.integers(b, d + 1, trials).tolist()
    first = [walk(tree, [at_root[i], below[i], f, 9, 9, 9, 9]).emitted[0] for i in range(trials)]
    assert abs(first.count(a) / trials - 0.5) < 0.01              # noise: 0.0016
    # Negative control: a fresh draw for each of the three paths through a accepts a too often.
    per_path = (rng.random((trials, 3)) < 0.5).any(axis=1).mean()
    assert abs(per_path - 0.875) < 0.01


@pytest.mark.parametrize("accept", range(5))
def test_h12_every_accept_count_leaves_prompt_plus_emitted_minus_one_rows(accept):
    """k = 4, a scripted target that accepts 0..k, three rounds; the cache is a list of tokens."""
    prompt, ids = [1, 2, 3], [1, 2, 3, 100]       # 100: the first token, from the prompt's pass
    cache, steps = list(prompt), []
    for turn in range(3):
        drafts = [200 + 10 * turn + d for d in range(4)]
        tree = chain(ids[-1], drafts)
        script = [*drafts[:accept], 300 + turn]   # agrees `accept` times, then differs
        verdict = walk(tree, script + [0] * (5 - len(script)))
        assert verdict.path == list(range(accept + 1))
        assert verdict.emitted == script
        cache += tree.token[verdict.path].tolist()                # cache.keep(path)
        ids += verdict.emitted
        steps.append(Step(verdict.emitted, tree=tree, path=verdict.path))
        emitted = len(ids) - len(prompt)
        assert len(cache) == len(prompt) + emitted - 1
        assert cache == ids[:-1]
    stats = DecodeStats.of(steps)
    assert stats.accepted == 3 * accept
    assert stats.accept_rate == ([1.0] * accept + [0.0])[:4]


def test_walk_refuses_the_wrong_number_of_choices():
    with pytest.raises(ValueError, match=r"choices has shape \(3,\), expected .*\(2,\)"):
        walk(chain(1, [2]), [5, 6, 7])


# --- typical acceptance (lossy) ------------------------------------------------------------------

def typical_by_hand(tree, probs, choices, epsilon, delta):
    """The definition, path by path."""
    best = None
    for n in range(len(tree)):
        path, likelihood, accepted = tree.path(n), 1.0, True
        for parent, child in zip(path, path[1:]):
            row = probs[parent]
            entropy = -sum(p * np.log(p) for p in row if p > 0)
            chance = row[tree.token[child]]
            accepted &= chance > min(epsilon, delta * np.exp(-entropy))
            likelihood *= chance
        if accepted and (best is None or (len(path), likelihood) > best[:2]):
            best = (len(path), likelihood, path)
    path = best[2]
    return path, [int(tree.token[n]) for n in path[1:]] + [choices[path[-1]]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 0.09, 0.5]),
       st.sampled_from([0.05, 0.3, 1.0]))
def test_typical_walk_equals_its_definition(seed, epsilon, delta):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 2)
    probs = rng.dirichlet(np.ones(VOCAB) * 0.5, len(tree))        # (N, V)
    choices = probs.argmax(axis=1).tolist()
    verdict = typical_walk(tree, *typical_inputs(tree, probs), choices, epsilon, delta)
    assert verdict == typical_by_hand(tree, probs, choices, epsilon, delta)
    assert len(verdict.emitted) == len(verdict.path)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_typical_walk_on_one_hot_distributions_is_the_exact_walk(seed):
    """Greedy decoding has nothing typical about it: the chosen token is the only possible one."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 2)
    choices = rng.integers(0, VOCAB, len(tree)).tolist()
    probs = np.eye(VOCAB)[choices]                                # (N, V)
    child_prob, entropy = typical_inputs(tree, probs)
    assert not entropy.any()
    assert typical_walk(tree, child_prob, entropy, choices) == walk(tree, choices)


def test_typical_walk_is_lossy_and_breaks_ties_by_likelihood():
    tree = Tree([-1, 0, 0], [0, 1, 2])
    probs = np.tile([0.5, 0.2, 0.3], (3, 1))                      # (N, V)
    verdict = typical_walk(tree, *typical_inputs(tree, probs), choices=[0, 0, 0])
    assert verdict == ([0, 2], [2, 0])            # plain decoding emits 0, which nobody drafted
    assert walk(tree, [0, 0, 0]) == ([0], [0])
    assert "LOSSY" in typical_walk.__doc__


def test_typical_walk_refuses_nonsense():
    tree = chain(1, [2])
    with pytest.raises(ValueError, match="child_prob has shape"):
        typical_walk(tree, [1.0], [0.0, 0.0], [1, 1])
    with pytest.raises(ValueError, match="epsilon is -0.1"):
        typical_walk(tree, [1.0, 1.0], [0.0, 0.0], [1, 1], epsilon=-0.1)
