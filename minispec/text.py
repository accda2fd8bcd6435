"""From text to ids and back: a tokenizer, and a stream that shows only text that is final.

The idea: a token is not a character. One character may be spread over several tokens, and a
speculative step hands over several tokens at once. `TextStream` turns ids into pieces of text
such that, however the ids arrive, the pieces joined are exactly `decode(all ids)`.

Read first: nothing. Read next: stopping.py. Proven by: tests/test_text.py.
"""

import codecs
import json
import os
import re

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"  # ids 0, 1, 2 in every tokenizer that we train
MIN_VOCAB = 3 + 256  # the special tokens and one token for every byte
# How other models call their end token, tried in this order if no tokenizer_config.json says it.
EOS_NAMES = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>")
PAD_NAMES = (PAD, "[PAD]", "<|pad|>")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # one byte in a SentencePiece-style vocabulary


class Tokenizer:
    """A tokenizer.json in use: `encode` text to ids, `decode` ids to text.

    bos_id, eos_id, pad_id: int or None. bos_id is what the file's own template puts in front of a
    text, never a guess from the model's config. vocab_size: every id is below it.
    """

    def __init__(self, inner, eos_token=None, pad_token=None):
        """inner: a tokenizers.Tokenizer; eos_token, pad_token: their names, where known."""
        inner.no_truncation()  # some files carry a training-time length limit
        inner.no_padding()
        self.inner = inner
        bare = inner.encode("a", add_special_tokens=False).ids
        full = inner.encode("a", add_special_tokens=True).ids
        # NOTE: only what stands in front is used. A template's closing token has no place at the
        # end of a prompt that is to be continued.
        self.front = full[: _find(full, bare)]
        self.bos_id = self.front[0] if self.front else None
        self.eos_id = self._first_id((eos_token,) if eos_token else EOS_NAMES)
        self.pad_id = self._first_id((pad_token,) if pad_token else PAD_NAMES)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    def _first_id(self, names):
        ids = [self.inner.token_to_id(name) for name in names]
        return next((i for i in ids if i is not None), None)

    @classmethod
    def train(cls, texts, vocab_size):
        """Byte-level BPE learned from `texts` (strings); the same texts give the same file.

        Every string can be encoded, and numbers go digit by digit, so that a model can copy one
        it has never seen. The vocabulary is smaller than asked if the texts offer fewer merges.
        Source: Sennrich et al. 2016 (BPE); Radford et al. 2019 (over bytes).
        Raises: ValueError if vocab_size is below 259.
        """
        if vocab_size < MIN_VOCAB:
            raise ValueError(
                f"vocab_size is {vocab_size}, expected at least {MIN_VOCAB} (3 special + 256 bytes)"
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,  # a pair seen once teaches nothing
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, inner.token_to_id(BOS))]
        )
        return cls(inner)

    @classmethod
    def load(cls, path):
        """Read a tokenizer.json; a tokenizer_config.json beside it names the end token.

        Raises: FileNotFoundError or ValueError naming the file.
        """
        path = os.fspath(path)
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: no such file, expected a tokenizer.json")
        names = _special_names(os.path.join(os.path.dirname(path), "tokenizer_config.json"))
        try:
            return cls(tokenizers.Tokenizer.from_file(path), **names)
        except Exception as error:  # the library raises plain Exception for anything it dislikes
            raise ValueError(f"{path}: not a usable tokenizer.json ({error})") from None

    def save(self, path):
        """Write the tokenizer.json."""
        self.inner.save(os.fspath(path))

    def encode(self, text, bos=True):
        """Ids of text, a list of int. With bos, exactly one BOS in front if this tokenizer has one,
        whether or not the text already begins with it.
        Raises: ValueError if text is no str, or one with half of a surrogate pair.
        """
        try:
            ids = self.inner.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ValueError(f"{text!r:.60} is not a str of whole characters") from None
        if bos and ids[: len(self.front)] != self.front:
            return self.front + ids
        return ids

    def decode(self, ids):
        """Text of ids. Special tokens and ids outside the vocabulary leave no trace in it."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)


class TextStream:
    """Ids in, text out, piece by piece: the pieces joined are always tokenizer.decode(all ids).

    A piece never holds a character that later ids could still change, so no U+FFFD appears
    before its bytes are known to be broken. Never raises. Constant cost per id.
    """

    def __init__(self, tokenizer):
        decoder = json.loads(tokenizer.inner.to_str())["decoder"] or {"type": None}
        kinds = [d["type"] for d in decoder.get("decoders", [decoder])]
        self._part = _ByteStream(tokenizer) if kinds == ["ByteLevel"] else _Window(tokenizer, kinds)

    def push(self, ids):
        """Text that has become final by these ids; may be empty."""
        return self._part.push([int(i) for i in ids])

    def finish(self):
        """The rest, once no more ids come: broken or unfinished characters as U+FFFD."""
        return self._part.finish()

    @property
    def pending(self):
        """True while finish() might still return text."""
        return self._part.pending


class _ByteStream:
    """Byte-level vocabularies: tokens are byte strings, so this is incremental UTF-8 decoding."""

    def __init__(self, tokenizer):
        self._inner = tokenizer.inner
        self._special = _special_ids(tokenizer.inner)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids):
        return self._utf8.decode(b"".join(self._bytes(i) for i in ids))

    def finish(self):
        return self._utf8.decode(b"", final=True)

    @property
    def pending(self):
        return bool(self._utf8.getstate()[0])

    def _bytes(self, i):
        token = None if i in self._special else self._inner.id_to_token(i)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF[c] for c in token)
        except KeyError:  # an added token written in plain text
            return token.encode("utf-8")


class _Window:
    """Other decoders: decode a short window of ids and show what is new in it.

    True for every decoder that never changes the text of earlier tokens, byte tokens aside.

    The window is the ids since the last safe point, with the token before that point in front of
    them: decoders treat a first token in a special way (they strip its leading space).
    """

    def __init__(self, tokenizer, kinds):
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer.inner)
        self._lossy = "ByteLevel" in kinds
        self._before = []  # the last token before the window that left a trace
        self._window = []

    def push(self, ids):
        pieces = []
        for i in ids:
            token = None if i in self._special else self._tokenizer.inner.id_to_token(i)
            if token is None:
                continue
            self._window.append(i)
            # The decoder turns a run of byte tokens into text only as a whole: one bad byte at
            # its end makes all of it U+FFFD. So a run is held until it is over.
            if not BYTE_TOKEN.fullmatch(token):
                pieces.append(self._advance(i))
        return "".join(pieces)

    def finish(self):
        known, full = self._texts()
        self._window = []
        return full[len(known) :]

    @property
    def pending(self):
        return bool(self._window)

    def _advance(self, last):
        known, full = self._texts()
        if self._lossy and full.endswith("\ufffd"):
            return ""  # byte-level and something more: the character may still be completed
        self._before, self._window = [last], []
        return full[len(known) :]

    def _texts(self):
        decode = self._tokenizer.decode
        return decode(self._before), decode(self._before + self._window)


def _byte_alphabet():
    """The character that stands for each byte in byte-level vocabularies (Radford et al. 2019):
    printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + n): b for n, b in enumerate(others)})
    return table


BYTE_OF = _byte_alphabet()


def _special_ids(inner):
    return {i for i, token in inner.get_added_tokens_decoder().items() if token.special}


def _find(full, part):
    """First index at which `part` stands in `full`; 0 if it does not."""
    starts = range(len(full) - len(part) + 1)
    return next((s for s in starts if full[s : s + len(part)] == part), 0)


def _special_names(path):
    """{"eos_token": str or None, ...} from a tokenizer_config.json, if there is one."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        names = {key: entries.get(key) for key in ("eos_token", "pad_token")}
        return {k: v["content"] if isinstance(v, dict) else v for k, v in names.items()}
    except (ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: expected a JSON object of token names ({error})") from None
