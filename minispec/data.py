"""Prompts and completions -> batches with targets per stream.

Only completions are trained. Position t of a text carries a target for stream g (0 is the main
row) if token t+1+g belongs to the completion of the same document and t itself predicts a
completion token. Prompts and padding never count, and nothing is ever predicted across the end of
a document.

Batches are padded on the left, so that the completions of a batch line up at its end and streams
are needed only in the last positions (`Batch.streams_from`).

Read first: tasks.py, loss.py. Proven by: tests/test_data.py (cases H-36, H-37).
"""

import json
from dataclasses import dataclass

import numpy as np

NO_TARGET = -1


@dataclass(frozen=True)
class Document:
    """One training text: prompt and completion as one list of ids; `start` is the completion's
    first index."""

    ids: list
    start: int


@dataclass
class Batch:
    """Host arrays of one micro-batch.

    ids        (B, T) int   input tokens; padding holds 0
    positions  (B, T) int   position of each token in its own document
    documents  (B, T) int   which document of its row a token belongs to, -1: padding
    targets    (B, T, 1+G)  int, target of the main row and of the streams, -1: not trained
    hidden     (B, T, C)    states at layer L-A if a frozen trunk has computed them (trunk.py)
    """

    ids: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    targets: np.ndarray
    hidden: np.ndarray = None

    @property
    def streams_from(self):
        """First position where any row has a target; T if none has."""
        trained = (self.targets[..., 0] != NO_TARGET).any(axis=0)         # (T,)
        return int(trained.argmax()) if trained.any() else self.ids.shape[1]

    @property
    def counts(self):
        """(1+G,) trained targets of the main row and of each stream."""
        return (self.targets != NO_TARGET).sum(axis=(0, 1))       # (1+G,)

    @property
    def tokens(self):
        """Input tokens, padding not counted."""
        return int((self.documents >= 0).sum())

    def split(self, parts):
        """The batch cut into at most `parts` smaller ones by examples; padding that all rows of a
        part share is dropped."""
        edges = np.linspace(0, len(self.ids), min(parts, len(self.ids)) + 1).astype(int)
        pieces = []
        for a, b in zip(edges, edges[1:]):
            used = (self.documents[a:b] >= 0).any(axis=0)         # (T,)
            first = int(used.argmax())
            arrays = (self.ids, self.positions, self.documents, self.targets, self.hidden)
            pieces.append(Batch(*(None if x is None else x[a:b, first:] for x in arrays)))
        return pieces


def stream_targets(document, streams, draft_index=None):
    """(T, 1+G) targets of one document whose last id is not an input (T = len(ids) - 1).

    draft_index (V,): -1 for ids that streams cannot guess; as targets of streams these are left
    out (draft_vocab.py).
    """
    ids = np.asarray(document.ids)                        # (T+1,)
    rows = len(ids) - 1
    targets = np.full((rows, 1 + streams), NO_TARGET)     # (T, 1+G)
    first = max(document.start - 1, 0)                    # the row that predicts completion[0]
    for g in range(min(1 + streams, rows)):
        wanted = ids[1 + g:]                              # (rows - g,)  row t -> token t + 1 + g
        targets[first:rows - g, g] = wanted[first:]
    if draft_index is not None:
        known = draft_index[targets[:, 1:]] >= 0          # (T, G)
        targets[:, 1:][~known] = NO_TARGET
    return targets


def pad_batch(documents, streams, draft_index=None):
    """One document per row, padded on the left.   list of Document -> Batch."""
    return pack_batch([[d] for d in documents], streams, draft_index)


def pack_batch(rows, streams, draft_index=None):
    """Several documents per row, one after the other, then padded on the left.

    rows: list of lists of Document -> Batch. Each document keeps its own positions and is seen by
    no other (masks.causal_documents).
    """
    width = max(sum(len(d.ids) - 1 for d in row) for row in rows)
    shape = (len(rows), width)
    batch = Batch(np.zeros(shape, np.int64), np.zeros(shape, np.int64),
                  np.full(shape, -1, np.int64), np.full((*shape, 1 + streams), NO_TARGET))
    for b, row in enumerate(rows):
        at = width - sum(len(d.ids) - 1 for d in row)
        for number, document in enumerate(row):
            size = len(document.ids) - 1
            span = slice(at, at + size)
            batch.ids[b, span] = document.ids[:-1]
            batch.positions[b, span] = np.arange(size)
            batch.documents[b, span] = number
            batch.targets[b, span] = stream_targets(document, streams, draft_index)
            at += size
    return batch


# --- from text ----------------------------------------------------------------------------------

def read_jsonl(path, keys=("prompt", "completion")):
    """List of objects with text under `keys` from a JSON-lines file.

    Raises ValueError naming file and line for broken JSON or a missing key, FileNotFoundError.
    """
    examples = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
            except ValueError as error:                   # JSONDecodeError, or no UTF-8
                why = getattr(error, "msg", error)
                raise ValueError(f"{path} line {number}: not JSON ({why})") from None
            for key in keys:
                if not isinstance(example, dict) or not isinstance(example.get(key), str):
                    form = ", ".join(f'"{k}": "..."' for k in keys)
                    raise ValueError(f'{path} line {number}: no text under "{key}"; each line '
                                     f'needs {{{form}}}')
            examples.append(example)
    if not examples:
        raise ValueError(f"{path} holds no examples")
    return examples


def encode_examples(examples, tokenizer, config, max_tokens=0):
    """Documents from examples: BOS + prompt + completion + EOS, cut at the model's context, or at
    `max_tokens` if that is less. Those whose prompt alone fills it are left out.

    Raises ValueError if no completion token is left in any of them.
    """
    documents, context = [], min(config.max_positions, max_tokens or config.max_positions)
    for example in examples:
        prompt = tokenizer.encode(example["prompt"])
        completion = tokenizer.encode(example["completion"], bos=False) + list(config.eos_ids[:1])
        ids = (prompt + completion)[:context + 1]
        documents.append(Document(ids, len(prompt)))
    # the first token of a text has nothing before it that could predict it
    kept = [d for d in documents if len(d.ids) > max(d.start, 1)]
    if not kept:
        raise ValueError(f"nothing to train on: in all {len(documents)} examples the prompt alone "
                         f"fills the context of {context} tokens")
    return kept


class Loader:
    """Endless batches in an order that depends on (seed, step) alone, so that resuming needs no
    saved state. Documents of like length share a batch, which keeps padding short.

    draft_index: of a draft vocabulary (`stream_targets`). trunk: hidden states (T, C) of every
    document by its index (trunk.Trunk), which the batches then carry.
    """

    POOL = 16                       # batches sorted by length together

    def __init__(self, documents, batch, streams, seed, draft_index=None, trunk=None):
        self.documents, self.batch, self.streams, self.seed = documents, batch, streams, seed
        self.draft_index, self.trunk = draft_index, trunk
        self.epoch, self.order = None, None

    def __len__(self):
        """Batches per epoch."""
        return max(1, len(self.documents) // self.batch)

    def __getitem__(self, number):
        """Batch `number`, 0, 1, ... without end."""
        epoch, at = divmod(number, len(self))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.shuffle(epoch)
        chosen = self.order[at]
        batch = pad_batch([self.documents[i] for i in chosen], self.streams, self.draft_index)
        if self.trunk is not None:
            states = [self.trunk[i] for i in chosen]      # (T of each, C)
            shape = (*batch.ids.shape, states[0].shape[1])
            batch.hidden = np.zeros(shape, states[0].dtype)       # (B, T, C)
            for b, state in enumerate(states):
                batch.hidden[b, shape[1] - len(state):] = state
        return batch

    def shuffle(self, epoch):
        """This epoch's batches: lists of document indices."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.documents))      # (documents,)
        batches = []
        for at in range(0, len(order), self.POOL * self.batch):
            pool = sorted(order[at:at + self.POOL * self.batch],
                          key=lambda i: len(self.documents[i].ids))
            batches += [pool[i:i + self.batch] for i in range(0, len(pool), self.batch)]
        full = [b for b in batches if len(b) == self.batch] or batches
        return [full[i] for i in rng.permutation(len(full))]
