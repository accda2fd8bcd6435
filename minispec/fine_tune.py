"""Fine-tuning an open model: from its folder and some texts to a model, batches and a Trainer.

Stream embeddings are all that tells a stream from its main row, and they must grow to the size of
the hidden states (15 a channel in SmolLM2's layer 24) within some hundred steps, each of which
moves an entry by about the learning rate. So they are kept in units of EMBED_SCALE times that size
(StreamConfig.embed_scale), and start as small as they do in a model that is trained from scratch.
On 320 E2E examples, two epochs, this took the held-out loss of stream 1 from 4.18 to 3.94 and that
of the main row from 1.90 to 1.77.

Read first: adapter.py, trunk.py, training.py. Proven by: tests/test_fine_tune.py.
"""

import os
from dataclasses import dataclass

from .adapter import attach, base_hash
from .data import Loader, encode_examples
from .draft_vocab import choose_draft_ids
from .training import Trainer
from .trunk import Trunk, hidden_size

EMBED_SCALE = 5.0                   # of stream embeddings, in units of the hidden states' size


@dataclass
class FineTuning:
    """What `prepare` gives: a Trainer (its model is the base with a fresh adapter), how many
    examples were left out because their prompt is too long, and how many completions were cut."""

    trainer: Trainer
    skipped: int
    cut: int


def prepare(base, examples, streams, train, folder, max_tokens=0):
    """A Trainer for an adapter on `base` (a plain Model) -> FineTuning.

    examples: dicts with prompt and completion. streams: StreamConfig; its embed_scale is set to the
    size of the base's hidden states. train: TrainConfig.
    folder: of the trunk and the checkpoints. max_tokens: longest text, 0: the model's context.
    Raises ValueError if nothing can be trained.
    """
    if base.tokenizer is None:
        raise ValueError("the base model has no tokenizer.json, so no text can be trained on")
    base.unpack()                                         # decoding's copy of the head
    documents = encode_examples(examples, base.tokenizer, base.config, max_tokens)
    longest = min(base.config.max_positions, max_tokens or base.config.max_positions) + 1
    cut = sum(len(d.ids) == longest and d.ids[-1] not in base.config.eos_ids for d in documents)
    draft_ids = None
    if streams.draft_vocab:
        draft_ids = choose_draft_ids(documents, streams.draft_vocab, base.config.eos_ids)
    model = attach(base, streams, train.seed, draft_ids)
    streams = streams.replace(embed_scale=round(EMBED_SCALE * hidden_size(model, documents), 4))
    model = attach(base, streams, train.seed, draft_ids)
    if streams.kind == "embedding":
        model.params["streams.embed"] /= EMBED_SCALE      # (G, C)
    origin, trunk = base_hash(base), None
    if not streams.lora_all_layers:
        trunk = Trunk(model, origin, documents, os.path.join(folder, "trunk"),
                      workers=train.workers)
    loader = Loader(documents, train.batch, streams.count, train.seed, model.draft_index, trunk)
    trainer = Trainer(model, loader, train, folder, origin)
    return FineTuning(trainer, len(examples) - len(documents), cut)
