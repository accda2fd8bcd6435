"""Text: every id sequence streams to exactly decode(all ids); BOS once; bad files say so."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from minispec.text import BYTE_OF, TextStream, Tokenizer

STORIES = Path("/work/shared/models/stories260K/tokenizer.json")
CORPUS = [
    f"The quick brown fox {n} says ha ha ha: SELECT name FROM t WHERE id = {n}" for n in range(99)
]


def byte_level(extra=()):
    """One token for each byte and no merges; ids 0..255 are the bytes, then the added tokens."""
    vocab = {c: b for c, b in BYTE_OF.items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens(list(extra))
    return Tokenizer(inner)


def sentencepiece_like():
    """Byte fallback and a leading space that the decoder strips, as in Llama 2."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁", "a", "b", "▁a", "▁▁", "é", "\ufffd", "<0x4>"]
    spec = {
        "version": "1.0",
        "added_tokens": [
            dict(id=i, content=words[i], special=True, single_word=False, lstrip=False,
                 rstrip=False, normalized=False)
            for i in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True,
                  "vocab": {w: i for i, w in enumerate(words)}, "merges": [["▁", "a"]]},
    }  # fmt: skip
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))


def other_decoder(decoder):
    words = ["a", "b</w>", "##c", "▁d", "e", ",", "n't", "<0xE6>", "Ġf", "æ", "Ĺ"]
    inner = tokenizers.Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a")
    )
    if decoder is not None:
        inner.decoder = decoder
    return Tokenizer(inner)


TRAINED = Tokenizer.train(CORPUS, 330)
TOKENIZERS = {
    "bytes": byte_level(["<tool>", "ein wörd", "日"]),
    "trained": TRAINED,
    "sentencepiece": sentencepiece_like(),
    "no decoder": other_decoder(None),
    "wordpiece": other_decoder(decoders.WordPiece()),
    "metaspace": other_decoder(decoders.Metaspace()),
    "bpe suffix": other_decoder(decoders.BPEDecoder()),
    "ctc": other_decoder(decoders.CTC(pad_token="a", word_delimiter_token="e")),
    "bytes in a sequence": other_decoder(
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    ),
}
if STORIES.exists():
    TOKENIZERS["stories260K"] = Tokenizer.load(STORIES)


def pieces_of(tokenizer, ids, cut=lambda: 1):
    stream, pieces, start = TextStream(tokenizer), [], 0
    while start < len(ids):
        stop = start + cut()
        pieces.append(stream.push(ids[start:stop]))
        start = stop
    return pieces + [stream.finish()]


# ---- the stream


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_joined_equal_decode_for_random_ids(name):
    tokenizer, rng = TOKENIZERS[name], random.Random(7)
    for n in range(600):
        top = (tokenizer.vocab_size + 4, min(270, tokenizer.vocab_size))[n % 2]  # some unknown ids
        ids = [rng.randrange(top) for _ in range(rng.randrange(51))]
        pieces = pieces_of(tokenizer, ids, cut=lambda: rng.randrange(1, 7))
        assert "".join(pieces) == tokenizer.decode(ids), ids


@given(st.lists(st.sampled_from([0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x94, 0xED, 0xA0, 0xEF, 0xBF,
                                 0xBD, 0xC3, 0x41, 0xFF, 256, 257, 258]), max_size=14),
       st.sampled_from(["bytes", "sentencepiece", "bytes in a sequence"]))  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_broken_utf8_streams_as_it_decodes(ids, name):
    tokenizer = TOKENIZERS[name]
    shift = 3 if name == "sentencepiece" else 0
    ids = [i + shift if i < 256 else i for i in ids]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_replacement_character_before_the_bytes_are_known_to_be_broken():
    tokenizer = TOKENIZERS["bytes"]
    ids = list("hé🔥 日".encode())
    assert len(ids) == 11
    pieces = pieces_of(tokenizer, ids)
    assert [p for p in pieces if p] == ["h", "é", "🔥", " ", "日"]
    assert pieces[2] == "é" and pieces[6] == "🔥"  # shown with the very id that completes them
    cut = list("a🔥".encode())[:-1]
    assert pieces_of(tokenizer, cut) == ["a", "", "", "", "\ufffd"]
    assert tokenizer.decode(cut) == "a\ufffd"


def test_special_token_inside_a_character_leaves_no_trace():
    tokenizer = TOKENIZERS["bytes"]
    assert pieces_of(tokenizer, [0xC3, 257, 0xA9]) == ["", "", "é", ""]


def test_leading_space_is_stripped_once_at_the_start_only():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("a a", bos=False)
    assert tokenizer.decode(ids) == "a a"
    assert "".join(pieces_of(tokenizer, [1, 2] + ids)) == "a a"


def test_a_byte_run_is_held_until_it_is_over():
    tokenizer = TOKENIZERS["sentencepiece"]  # byte b has id b + 3; one bad byte spoils its run
    ids = [b + 3 for b in "日".encode()]
    assert pieces_of(tokenizer, ids) == ["", "", "", "日"]
    assert pieces_of(tokenizer, ids + [260]) == ["", "", "", "日a", ""]
    assert tokenizer.decode(ids + [0xFF + 3]) == "\ufffd" * 4


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_cost_per_id_does_not_grow(name, monkeypatch):
    tokenizer, decoded = TOKENIZERS[name], []
    real = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or real(self, ids)
    )
    stream, rng = TextStream(tokenizer), random.Random(0)
    for _ in range(2000):
        stream.push([rng.randrange(200, tokenizer.vocab_size)])
    stream.finish()
    assert sum(decoded) < 5 * 2000


def test_finish_may_be_called_twice():
    stream = TextStream(TOKENIZERS["bytes"])
    stream.push([0xC3])
    assert (stream.pending, stream.finish(), stream.finish()) == (True, "\ufffd", "")
    assert not stream.pending


def test_the_byte_alphabet_is_that_of_the_library():
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


# ---- the tokenizer


def test_training_is_deterministic_across_processes():
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_text import CORPUS, Tokenizer;"
        "print(hash(0), Tokenizer.train(CORPUS, 330).inner.to_str())"
    )
    root = Path(__file__).parent.parent
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    ).stdout
    assert out.split(" ", 1)[1].strip() == TRAINED.inner.to_str().strip()


def test_trained_ids_and_round_trip():
    assert (TRAINED.bos_id, TRAINED.eos_id, TRAINED.pad_id) == (0, 1, 2)
    assert 259 < TRAINED.vocab_size <= 330
    assert len(TRAINED.encode(" fox", bos=False)) == 1  # it did learn merges
    for text in ["", " ", "  x\n\n", "hé🔥 日", "".join(map(chr, range(1, 300))), "\x00"]:
        ids = TRAINED.encode(text)
        assert TRAINED.decode(ids) == text and ids[0] == 0 and all(type(i) is int for i in ids)


def test_numbers_are_split_digit_by_digit():
    same = [TRAINED.encode(d, bos=False) for d in "1111"]
    assert TRAINED.encode("1111", bos=False) == sum(same, [])
    joined = Tokenizer.train(["year 2024 "] * 50, 400)
    assert len(joined.encode("2024", bos=False)) == 4


def test_exactly_one_bos():
    for tokenizer, bos in [(TRAINED, "<bos>"), (TOKENIZERS["sentencepiece"], "<s>")]:
        plain = tokenizer.encode("hi", bos=False)
        for text in ("hi", bos + "hi"):
            ids = tokenizer.encode(text)
            assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
        assert tokenizer.encode("hi") == [tokenizer.bos_id] + plain
        assert tokenizer.bos_id not in plain
    assert TOKENIZERS["sentencepiece"].eos_id not in TOKENIZERS["sentencepiece"].encode("hi")


def test_no_bos_where_the_template_adds_none():
    tokenizer = TOKENIZERS["bytes"]  # it has a token <s>, but nothing puts it in front
    assert tokenizer.bos_id is None and tokenizer.encode("hi") == [ord("h"), ord("i")]


@pytest.mark.skipif(not STORIES.exists(), reason="stories260K is not on this machine")
def test_stories260k_bos_and_eos():
    tokenizer = TOKENIZERS["stories260K"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 512)
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert tokenizer.encode("hi")[0] == 1 and 1 not in tokenizer.encode("hi")[1:]


def test_saved_equals_loaded(tmp_path):
    path = tmp_path / "tokenizer.json"
    TRAINED.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.inner.to_str() == TRAINED.inner.to_str()
    assert (loaded.bos_id, loaded.eos_id, loaded.pad_id) == (0, 1, 2)
    assert loaded.encode("The fox 12") == TRAINED.encode("The fox 12")


def test_length_limit_and_padding_of_the_file_are_not_applied(tmp_path):
    inner = byte_level().inner
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path / "tokenizer.json").encode("123456")) == 6


@pytest.mark.parametrize("entry", ["</s>", {"content": "</s>"}])
def test_end_token_comes_from_tokenizer_config(tmp_path, entry):
    byte_level(["<|endoftext|>"]).save(tmp_path / "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": entry, "pad_token": None}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_id == 257
    config.write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_id == 258


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError, match=str(path)):
        Tokenizer.load(path)
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)  # a folder
    for content in ["", "{}", "[1]", "not json", '{"model": {"type": "BPE"}}', "\x00"]:
        path.write_text(content)
        with pytest.raises(ValueError, match=str(path)):
            Tokenizer.load(path)
    byte_level().save(path)
    for content in ["", "[1]", '{"eos_token": {}}']:
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match="tokenizer_config.json"):
            Tokenizer.load(path)


def test_vocab_size_must_hold_every_byte():
    with pytest.raises(ValueError, match="258.*259"):
        Tokenizer.train(["x"], 258)
    assert Tokenizer.train([], 259).vocab_size == 259
