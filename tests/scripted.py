"""Drafters for the tests: they know the answer, or nothing, or the answer among wrong branches."""

from minispec.drafters import Drafter
from minispec.growing import chain, union
from minispec.tree import Tree


class Oracle(Drafter):
    """A chain of the next `depth` ids of the answer: all of them are right."""

    def __init__(self, prompt, answer, depth=4):
        self.start, self.answer, self.depth = len(prompt), list(answer), depth

    def upcoming(self, ids, count):
        at = len(ids) - self.start
        return self.answer[at:at + count]

    def draft(self, ids, streams, room):
        return chain(ids[-1], self.upcoming(ids, self.depth))


class Scripted(Oracle):
    """Right for counts[step] tokens, then wrong, `depth` in all; a wrong sibling comes before
    every right token, so that no accepted path is contiguous."""

    def __init__(self, prompt, answer, counts, depth, vocab):
        super().__init__(prompt, answer, depth)
        self.counts, self.vocab = list(counts), vocab

    def draft(self, ids, streams, room):
        count, right = self.counts.pop(0), self.upcoming(ids, self.depth)
        parent, token, above = [-1], [ids[-1]], 0
        for d, word in enumerate(right):
            parent += [above, above]
            token += [(word + 1) % self.vocab, word if d < count else (word + 2) % self.vocab]
            above = len(parent) - 1
        return Tree(parent, token)


class Noisy(Oracle):
    """The answer's path, for a random length, among random branches in random node order."""

    def __init__(self, prompt, answer, rng, vocab, nodes=9, right=0.5):
        super().__init__(prompt, answer)
        self.rng, self.vocab, self.nodes, self.right = rng, vocab, nodes, right

    def draft(self, ids, streams, room):
        return Tree(*self.branches(ids[-1], self.upcoming(ids, self.nodes)))

    def branches(self, root, answer):
        parent, token, number, on, left = [-1], [root], {}, 0, list(answer)
        for _ in range(int(self.rng.integers(self.nodes + 1))):
            follow = bool(left) and self.rng.random() < self.right
            pair = ((on, left.pop(0)) if follow else
                    (int(self.rng.integers(len(parent))), int(self.rng.integers(self.vocab))))
            if pair not in number:
                number[pair] = len(parent)
                parent.append(pair[0])
                token.append(pair[1])
            if follow:
                on = number[pair]
        return parent, token


class RandomTrees(Noisy):
    """Trees of random tokens in random shapes."""

    def __init__(self, rng, vocab, nodes=9):
        super().__init__((), (), rng, vocab, nodes)


class Garbage(Drafter):
    """A chain that is never right: every id is the answer's plus one."""

    def __init__(self, prompt, answer, depth, vocab):
        self.oracle, self.vocab = Oracle(prompt, answer, depth), vocab

    def draft(self, ids, streams, room):
        right = self.oracle.upcoming(ids, self.oracle.depth)
        return chain(ids[-1], [(word + 1) % self.vocab for word in right])


class Union(Drafter):
    """The trees of several drafters merged, shared prefixes once."""

    def __init__(self, drafters, budget=None):
        self.drafters, self.budget = drafters, budget
        self.needs_streams = any(d.needs_streams for d in drafters)

    def begin(self, prompt_ids):
        for drafter in self.drafters:
            drafter.begin(prompt_ids)

    def draft(self, ids, streams, room):
        trees = [d.draft(ids, streams if d.needs_streams else None, room) for d in self.drafters]
        return union(trees, self.budget)
