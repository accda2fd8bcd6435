"""Batches: which position learns which token, and that nothing else is ever learned.

Claims (cases H-36, H-37): stream g at t learns token t+1+g of the same document's completion, or
nothing; prompts, padding and the ends of documents teach nothing and nothing wraps round; a row's
loss does not depend on the other rows; the order of batches depends on (seed, number) alone; bad
data files get one error with file and line.
"""

import numpy as np
import pytest
from tiny_models import STREAMS, texts, tiny_model

from minispec.config import ModelConfig
from minispec.data import (NO_TARGET, Batch, Document, Loader, encode_examples, pack_batch,
                           pad_batch, read_jsonl, stream_targets)
from minispec.objective import Pass
from minispec.text import Tokenizer

X = NO_TARGET


# --- targets ------------------------------------------------------------------------------------

def test_labels_of_the_main_row_and_two_streams():
    """H-37. The last token is no input, so its column, untrained everywhere, is not there."""
    targets = stream_targets(Document([10, 11, 12, 13, 14, 15], 1), 2)
    assert targets.T.tolist() == [[11, 12, 13, 14, 15], [12, 13, 14, 15, X], [13, 14, 15, X, X]]


def test_packed_documents_never_reach_into_each_other():
    """H-36: documents of 4 and 3 tokens train 111(0) 11(0) and 110(0) 10(0)."""
    batch = pack_batch([[Document([3, 4, 5, 6], 1), Document([7, 8, 9], 1)]], 1)
    assert batch.ids.tolist() == [[3, 4, 5, 7, 8]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.targets[0, :, 0].tolist() == [4, 5, 6, 8, 9]
    assert batch.targets[0, :, 1].tolist() == [5, 6, X, 9, X]


def slow_targets(document, streams):
    """The definition, cell by cell."""
    ids, start = document.ids, document.start
    rows = []
    for t in range(len(ids) - 1):
        row = [X] * (1 + streams)
        for g in range(1 + streams):
            wanted = t + 1 + g
            predicts_completion = t + 1 >= start
            if wanted < len(ids) and wanted >= start and predicts_completion:
                row[g] = ids[wanted]
        rows.append(row)
    return rows


@pytest.mark.parametrize("streams", [0, 1, 3, 9])
def test_targets_follow_the_definition(streams):
    """For every length and every start, also with more streams than tokens (H-27)."""
    for size in range(2, 8):
        for start in range(size + 1):
            document = Document(list(range(20, 20 + size)), start)
            assert stream_targets(document, streams).tolist() == slow_targets(document, streams)


def test_a_prompt_is_never_a_target():
    prompt, completion = [50, 51, 52, 53], [60, 61, 62]
    batch = pad_batch([Document(prompt + completion, 4)], 4)
    taught = set(batch.targets[batch.targets != X].tolist())
    assert taught == set(completion)
    assert (batch.targets[0, :3] == X).all()              # rows that predict the prompt's tokens
    assert batch.targets[0, 3].tolist() == [60, 61, 62, X, X]
    assert batch.streams_from == 3


# --- padding and packing ------------------------------------------------------------------------

def test_rows_are_padded_on_the_left():
    batch = pad_batch([Document([5, 6, 7, 8], 2), Document([9, 8], 1)], 1)
    assert batch.ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert batch.documents.tolist() == [[0, 0, 0], [-1, -1, 0]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.targets.tolist() == [[[X, X], [7, 8], [8, X]], [[X, X], [X, X], [8, X]]]
    assert batch.streams_from == 1 and batch.tokens == 4
    assert batch.counts.tolist() == [3, 1]


def test_packed_rows_hold_the_same_targets_as_single_rows():
    documents = texts(6, seed=4)
    packed = pack_batch([documents[:3], documents[3:4], documents[4:]], 3)
    single = pad_batch(documents, 3)
    assert packed.counts.tolist() == single.counts.tolist()
    assert packed.tokens == single.tokens == sum(len(d.ids) - 1 for d in documents)
    for b, row in enumerate((documents[:3], documents[3:4], documents[4:])):
        at = packed.ids.shape[1] - sum(len(d.ids) - 1 for d in row)
        assert (packed.documents[b, :at] == -1).all() and (packed.targets[b, :at] == X).all()
        for number, document in enumerate(row):
            span = slice(at, at + len(document.ids) - 1)
            assert packed.ids[b, span].tolist() == document.ids[:-1]
            assert packed.targets[b, span].tolist() == slow_targets(document, 3)
            assert (packed.documents[b, span] == number).all()
            at = span.stop


def test_a_batch_without_targets_has_no_streams():
    batch = pad_batch([Document([5, 6, 7], 3), Document([5, 6], 2)], 2)
    assert batch.counts.tolist() == [0, 0, 0] and batch.streams_from == batch.ids.shape[1] == 2


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_split_loses_nothing(parts):
    batch = pad_batch(texts(5, seed=2), 2)
    pieces = batch.split(parts)
    assert len(pieces) == min(parts, 5)
    assert sum(p.counts for p in pieces).tolist() == batch.counts.tolist()
    assert sum(p.tokens for p in pieces) == batch.tokens
    rows = [(row[keep].tolist(), target[keep].tolist()) for part in [batch, *pieces]
            for row, target, keep in zip(part.ids, part.targets, part.documents >= 0)]
    assert rows[:5] == rows[5:]
    assert all((p.documents[:, 0] >= 0).any() for p in pieces)    # no column of padding alone


def losses(model, batch):
    """Loss of the batch as a whole, per kind."""
    weights = {"main": 1.0, "stream": 1.0, "next": 1.0, "counts": batch.counts}
    metrics = Pass(model, batch, {}, weights).run()
    return {kind: metrics.loss[kind] for kind in metrics.loss}


@pytest.mark.parametrize("sees", [False, True])
def test_a_rows_loss_does_not_move_when_another_row_changes(sees):
    """H-37. Also: packing and padding change nothing (H-36), padded rows stay finite (H-38)."""
    model = tiny_model(streams=STREAMS.replace(main_sees_streams=sees))
    a, b, c = texts(3, seed=5, shortest=4)
    alone = {d.ids[0]: losses(model, pad_batch([d], 2)) for d in (a, b, c)}
    for other in (b, c, Document(b.ids * 2, b.start)):
        together = losses(model, pad_batch([a, other], 2))
        rest = losses(model, pad_batch([other], 2))
        for kind, value in alone[a.ids[0]].items():
            assert together[kind] - rest[kind] == pytest.approx(value, rel=1e-10)
    packed = losses(model, pack_batch([[a, b], [c]], 2))
    for kind, value in packed.items():
        assert value == pytest.approx(sum(alone[d.ids[0]][kind] for d in (a, b, c)), rel=1e-10)


# --- the loader ---------------------------------------------------------------------------------

def same(one, two):
    return all(np.array_equal(getattr(one, n), getattr(two, n))
               for n in ("ids", "positions", "documents", "targets"))


def test_a_batch_depends_on_seed_and_number_alone():
    documents = texts(23, seed=1)
    straight = [Loader(documents, 4, 2, 7)[n] for n in range(12)]
    loader = Loader(documents, 4, 2, 7)
    for n in (11, 3, 0, 7, 3, 11, 5):                     # back and forth over epochs
        assert same(loader[n], straight[n])
    assert not all(same(Loader(documents, 4, 2, 8)[n], straight[n]) for n in range(5))


def test_an_epoch_shows_every_document_at_most_once():
    documents = [Document([n + 2, n + 3, n + 4], 1) for n in range(22)]
    loader = Loader(documents, 4, 1, 0)
    assert len(loader) == 5
    for epoch in range(3):
        seen = [int(i) for n in range(5) for i in loader[5 * epoch + n].ids[:, 0]]
        assert len(seen) == 20 == len(set(seen))
    epochs = [[loader[5 * e + n].ids[:, 0].tolist() for n in range(5)] for e in range(2)]
    assert epochs[0] != epochs[1]


def test_fewer_documents_than_a_batch():
    loader = Loader(texts(3), 8, 1, 0)
    assert len(loader) == 1 and len(loader[0].ids) == len(loader[4].ids) == 3


def test_like_lengths_share_a_batch():
    rng = np.random.default_rng(0)
    documents = [Document([2] * int(n), 1) for n in rng.integers(2, 60, 128)]
    loader = Loader(documents, 8, 1, 0)
    padding = sum(int((loader[n].documents < 0).sum()) for n in range(len(loader)))
    tokens = sum(loader[n].tokens for n in range(len(loader)))
    assert padding < 0.1 * tokens


# --- from files ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["one two three"] * 3, 270)


def test_examples_become_documents(tokenizer):
    config = ModelConfig(vocab_size=270, max_positions=64, eos_ids=(1,))
    document, = encode_examples([{"prompt": "one ", "completion": "two"}], tokenizer, config)
    assert document.ids[0] == tokenizer.bos_id and document.ids[-1] == 1
    assert tokenizer.decode(document.ids[:document.start]) == "one "
    assert tokenizer.decode(document.ids[document.start:]) == "two"
    assert document.ids.count(tokenizer.bos_id) == 1


def test_long_examples_are_cut_at_the_context(tokenizer):
    config = ModelConfig(vocab_size=270, max_positions=6)
    examples = [{"prompt": "xyz", "completion": "0123456789"}, {"prompt": "x" * 9,
                                                                "completion": "y"}]
    document, = encode_examples(examples, tokenizer, config)      # the second leaves nothing
    assert len(document.ids) == 7                         # 6 inputs, each with its target
    with pytest.raises(ValueError, match="nothing to train on: in all 1 examples the prompt.* 6 "):
        encode_examples(examples[1:], tokenizer, config)


@pytest.mark.parametrize("text, words", [
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', ("line 2", '"completion"')),
    (b'\n\n{"prompt": "a", "completion": 3}\n', ("line 3", '"completion"')),
    (b'{"prompt": null, "completion": "b"}\n', ("line 1", '"prompt"')),
    (b'["prompt", "completion"]\n', ("line 1", '"prompt"')),
    (b'{"prompt": "a", "completion": "b"}\n{"prompt": \n', ("line 2", "not JSON")),
    (b'{"prompt": "\xff\xfe", "completion": "b"}\n', ("line 1", "not JSON")),
    (b"", ("no examples",)), (b"\n \n", ("no examples",))])
def test_a_broken_data_file_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert str(path) in message and all(w in message for w in words) and "\n" not in message


def test_a_data_file_that_is_fine(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"prompt": "Grüße\u2028", "completion": "b", "more": 1}\r\n\r\n'
                     '{"prompt": "", "completion": "c"}'.encode())
    assert [e["prompt"] for e in read_jsonl(path)] == ["Grüße\u2028", ""]
    assert len(read_jsonl(path, keys=("prompt",))) == 2
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "nosuch.jsonl")


def test_a_text_of_one_token_teaches_nothing(tokenizer):
    """Its only token has nothing before it; the batch would be empty."""
    class NoBos:
        def encode(self, text, bos=True):
            return tokenizer.encode(text, bos=False)

    config = ModelConfig(vocab_size=270, eos_ids=())
    with pytest.raises(ValueError, match="nothing to train on"):
        encode_examples([{"prompt": "", "completion": "a"}], NoBos(), config)
    assert isinstance(pad_batch([Document([4, 5], 0)], 1), Batch)
