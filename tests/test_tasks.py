"""The built-in corpus is repeatable, its held-out half is unseen, and copying alone won't do.

The last test is a control. If looking up the last tokens in the prompt already drafted well, the
tasks could not show what streams add; so prompt lookup must stay below 2.5 tokens per forward.
Read before: minispec/words.py, minispec/tasks.py.
"""

import random
import re
import statistics
import string

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minispec import tasks, words

KINDS = ("first", "person", "surname", "place", "brand", "product", "venue", "title")
CUES = {"sql": "SQL:\n", "dialogue": "Summary:\n", "sentence": "Description:\n"}
TRAIN = {task: tasks.examples(task, "train", 4000) for task in tasks.TASKS}
HELDOUT = {task: tasks.examples(task, "heldout", 1000) for task in tasks.TASKS}
SPLITS = {"train": TRAIN, "heldout": HELDOUT}


def all_names(split):
    found = {name for kind in KINDS for name in words.names(kind, split)}
    return found | {name for t in range(len(words.THEMES)) for name, _ in words.tables(t, split)}


NAMES = {split: all_names(split) for split in words.SPLITS}


def word_runs(text):
    """All runs of one to three words in a text: every name is such a run."""
    tokens = re.findall(r"\w+(?:'s)?", text)
    return {" ".join(tokens[i:i + n]) for n in (1, 2, 3) for i in range(len(tokens) - n + 1)}


def pattern(template):
    """A regular expression for the texts that a template can make."""
    parts = string.Formatter().parse(template)
    return re.compile("".join(re.escape(text) + (".+?" if slot is not None else "")
                              for text, slot, _, _ in parts))


def occurs(task, template, prompts):
    if task != "dialogue":
        return any(pattern(template).search(prompt) for prompt in prompts)
    said = (line.split(": ", 1)[1] for prompt in prompts for line in prompt.split("\n")[:-2])
    return any(pattern(template).fullmatch(line) for line in said)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_example_i_depends_on_task_split_seed_and_i_alone(task):
    state = random.getstate()
    assert tasks.examples(task, "train", 20) == TRAIN[task][:20]
    assert tasks.examples(task, "train", 20, seed=1) != TRAIN[task][:20]
    assert tasks.examples(task, "heldout", 20) != TRAIN[task][:20]
    assert random.getstate() == state
    assert tasks.examples(task, "train", 0) == []


def test_first_examples_are_pinned():
    """A shipped model was trained on exactly this text: a changed generator must be noticed."""
    made = [tasks.examples(task, "heldout", 1)[0]["completion"] for task in tasks.TASKS]
    assert made == PINNED


def test_corpus_interleaves_the_tasks():
    corpus = tasks.corpus("train", 5)
    assert [example["task"] for example in corpus] == list(tasks.TASKS) * 5
    assert corpus[1::3] == TRAIN["dialogue"][:5]


@pytest.mark.parametrize("call", (tasks.examples, lambda task, split, n: tasks.corpus(split, n)))
def test_unknown_split_is_one_clear_error(call):
    with pytest.raises(ValueError, match="unknown split 'test': expected one of train, heldout"):
        call("sql", "test", 1)


def test_unknown_task_or_kind_is_one_clear_error():
    with pytest.raises(ValueError, match="unknown task 'poem': expected one of sql, dialogue"):
        tasks.examples("poem", "train", 1)
    with pytest.raises(ValueError, match="unknown kind of name 'river': expected one of first"):
        words.names("river", "train")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        words.part(["a"], "dev")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_no_prompt_is_in_both_splits(task):
    train = {example["prompt"] for example in TRAIN[task]}
    assert not train & {example["prompt"] for example in HELDOUT[task]}
    assert len(train) > 3990


def test_names_are_many_and_each_is_in_one_split():
    assert not NAMES["train"] & NAMES["heldout"]
    for kind in KINDS:
        train, held = (len(set(words.names(kind, split))) for split in words.SPLITS)
        assert train >= 160 and held >= 30, (kind, train, held)
        if kind != "person":    # both halves of a held-out person's name are held out
            assert 0.15 < held / (train + held) < 0.2, (kind, train, held)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_heldout_names_never_occur_in_train(task):
    for example in TRAIN[task]:
        assert not word_runs(example["prompt"] + example["completion"]) & NAMES["heldout"]
    for example in HELDOUT[task]:
        assert word_runs(example["prompt"]) & NAMES["heldout"], example
        assert not word_runs(example["prompt"] + example["completion"]) & NAMES["train"]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_heldout_templates_never_occur_in_train(task):
    prompts = {split: [example["prompt"] for example in SPLITS[split][task]] for split in SPLITS}
    for which, entries in tasks.MODULES[task].TEMPLATES.items():
        train, held = (tasks.templates(task, which, split) for split in words.SPLITS)
        assert set(train) | set(held) == set(entries) and 0.15 < len(held) / len(entries) < 0.2
        for template in held:
            assert not occurs(task, template, prompts["train"]), (which, template)
            assert occurs(task, template, prompts["heldout"]), (which, template)


@pytest.mark.parametrize("split", words.SPLITS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_text_is_clean_and_names_are_copied_from_the_prompt(task, split):
    copied = 0
    for example in SPLITS[split][task]:
        prompt, completion = example["prompt"], example["completion"]
        assert example["task"] == task and prompt.endswith("\n" + CUES[task])
        assert completion and completion.isprintable() and completion == completion.strip()
        assert prompt.replace("\n", "").isprintable() and "{" not in completion
        names = word_runs(completion) & NAMES[split]
        assert names <= word_runs(prompt), example
        assert set(re.findall(r"\d+", completion)) <= set(re.findall(r"\d+", prompt)), example
        copied += len(names)
    assert copied >= len(SPLITS[split][task])


@pytest.mark.parametrize("split", words.SPLITS)
def test_queries_use_tables_columns_and_values_of_the_prompt(split):
    for example in SPLITS[split]["sql"]:
        prompt, query = example["prompt"], example["completion"]
        table = re.search(r"FROM (\w+)", query).group(1)
        columns = re.search(rf"CREATE TABLE {table} \((.*)\)", prompt).group(1)
        columns = {column.split()[0] for column in columns.split(", ")}
        for value in re.findall(r"'([^']*)'", query):
            assert value in prompt
        used = set(re.findall(r"[a-z_]+", re.sub(r"'[^']*'", "", query))) - {table}
        assert used <= columns, example


# ---- figures under a small tokenizer


@pytest.fixture(scope="module")
def encode():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2048, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    corpus = [example for task in tasks.TASKS for example in TRAIN[task][:1500]]
    tokenizer.train_from_iterator((e["prompt"] + e["completion"] for e in corpus), trainer)
    return lambda text: tokenizer.encode(text).ids


@pytest.mark.parametrize("split", words.SPLITS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_lengths(task, split, encode):
    rows = SPLITS[split][task][:1000]
    prompts = [len(encode(example["prompt"])) for example in rows]
    completions = [len(encode(example["completion"])) for example in rows]
    assert 50 <= statistics.median(prompts) <= 120
    assert 20 <= statistics.median(completions) <= 45 and min(completions) >= 12
    assert max(p + c for p, c in zip(prompts, completions)) < 240


def test_heldout_names_are_few_pieces(encode):
    for kind in ("first", "surname", "place", "brand"):
        pieces = [len(encode(" " + name)) for name in words.names(kind, "heldout")]
        assert statistics.mean(pieces) < 3, kind


def lookup_draft(ids, count=10):
    """What followed the latest earlier occurrence of the last three, two or one tokens."""
    for n in (3, 2, 1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start:start + n] == ids[-n:]:
                return ids[start + n:start + n + count]
    return []


def lookup_passes(prompt, completion):
    """Target passes that prompt lookup needs to emit a completion it doesn't know."""
    passes, done = 0, 0
    while done < len(completion):
        draft = lookup_draft(prompt + completion[:done])
        rest, accepted = completion[done:], 0
        while accepted < len(draft) and draft[:accepted + 1] == rest[:accepted + 1]:
            accepted += 1
        done, passes = done + accepted + 1, passes + 1
    return passes


def test_lookup_control_itself():
    """Text seen before costs one pass per eleven tokens; unseen text costs one pass a token."""
    assert lookup_passes([0, *range(1, 40), 0], [*range(1, 34)]) == 3
    assert lookup_passes([0], [*range(1, 34)]) == 33


@pytest.mark.parametrize("split", words.SPLITS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_prompt_lookup_alone_is_not_enough(task, split, encode):
    emitted = passes = 0
    for example in SPLITS[split][task][:200]:
        completion = encode(example["completion"])
        emitted += len(completion)
        passes += lookup_passes(encode(example["prompt"]), completion)
    assert 1.1 < emitted / passes < 2.5


PINNED = [
    "SELECT singer, COUNT(*) FROM summer_albums GROUP BY singer HAVING COUNT(*) > 2 ORDER BY "
    "COUNT(*) DESC",
    "Julmond asked whether Vallia could speak to the sister on Thursday. Vallia was busy on "
    "Thursday and suggested Saturday instead, which Julmond accepted.",
    "Fading Road is a play that takes place at The Dusty Wheel in Moonburgh on Tuesday at "
    "1:15 pm. Tickets cost £4 and must be booked in advance.",
]
