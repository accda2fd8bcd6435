"""The built-in synthetic corpus: structured queries, dialogue summaries, meaning representations.

The idea: the paper fine-tunes on three tasks whose answers mix set phrases, which streams can
learn to foresee, with names copied from far back in the prompt, which they can't know beforehand.
These generators make endless small examples of the same three shapes. The answer follows from the
prompt (a little free wording aside), so a tiny model can learn it. Held-out examples use names and
prompt templates that training never shows.

Read first: words.py. Read next: one of task_sql.py, task_dialogue.py, task_sentence.py.
Paper: Speculative Streaming, section 4 (its tasks; the text here is our own).
Proven by: tests/test_tasks.py.
"""

import random
from functools import lru_cache

from minispec import task_dialogue, task_sentence, task_sql, words

TASKS = ("sql", "dialogue", "sentence")
MODULES = {"sql": task_sql, "dialogue": task_dialogue, "sentence": task_sentence}


@lru_cache(maxsize=None)
def name_pool(kind, split):
    """Names of one kind that examples of this split may use (kinds: see words.names)."""
    return tuple(words.names(kind, split))


@lru_cache(maxsize=None)
def table_pool(theme, split):
    """(name, what its rows are called) of the tables about words.THEMES[theme]."""
    return tuple(words.tables(theme, split))


@lru_cache(maxsize=None)
def templates(task, which, split):
    """Prompt templates of one split; `which` is a key of MODULES[task].TEMPLATES."""
    return tuple(words.part(MODULES[task].TEMPLATES[which], split))


class Draw:
    """Random choices for one example: names and templates of one split, words of either."""

    def __init__(self, rng, task, split):
        self.rng, self.task, self.split = rng, task, split

    def pick(self, entries):
        return entries[int(self.rng.random() * len(entries))]

    def some(self, entries, count):
        return self.rng.sample(entries, count)

    def chance(self, share):
        return self.rng.random() < share

    def pool(self, kind):
        return name_pool(kind, self.split)

    def name(self, kind):
        return self.pick(self.pool(kind))

    def table(self, theme):
        return self.pick(table_pool(theme, self.split))

    def word(self, kind):
        return self.pick(words.LISTS[kind])

    def template(self, which):
        return self.pick(templates(self.task, which, self.split))

    def line(self, which, **slots):
        return self.template(which).format(**slots)


def examples(task, split, count, seed=0):
    """`count` examples as dicts with keys "task", "prompt" and "completion".

    Example i depends on (task, split, seed, i) alone.
    Raises ValueError for an unknown task or split.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join(TASKS)}")
    if split not in words.SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(words.SPLITS)}")
    made = []
    for i in range(count):
        draw = Draw(random.Random(f"{task}/{split}/{seed}/{i}"), task, split)
        prompt, completion = MODULES[task].make(draw)
        made.append({"task": task, "prompt": prompt, "completion": completion})
    return made


def corpus(split, count_per_task, seed=0):
    """`count_per_task` examples of every task, interleaved in the order of TASKS."""
    rows = zip(*(examples(task, split, count_per_task, seed) for task in TASKS))
    return [example for row in rows for example in row]
