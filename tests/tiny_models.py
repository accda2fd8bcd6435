"""Small models, texts and loaders that several tests share. Nothing here is tested by itself."""

import numpy as np

from minispec.config import ModelConfig, StreamConfig
from minispec.data import Document, pad_batch
from minispec.model import Model
from minispec.parameters import init_params

CONFIG = ModelConfig(vocab_size=23, width=16, layers=3, heads=4, kv_heads=2, head_dim=6,
                     mlp_width=20, max_positions=40)
STREAMS = StreamConfig(count=2, layers=2, prune_rank=3, transition_rank=4)
LAYERNORM = dict(norm="layer", positions="learned", activation="gelu", gated=False, qkv_bias=True,
                 out_bias=True, mlp_bias=True, tied=False)


def tiny_model(config=CONFIG, streams=STREAMS, dtype="float64", hot=0.3, seed=0):
    """A model with noise of std `hot` on every parameter, so that none is zero and streams guess
    well sometimes and badly sometimes."""
    params = init_params(config, streams, seed, "float64")
    rng = np.random.default_rng(seed + 1)
    noisy = {n: (p + hot * rng.standard_normal(p.shape)).astype(dtype) for n, p in params.items()}
    return Model(config, noisy, streams)


def texts(count, seed=0, shortest=5, longest=12, vocab=CONFIG.vocab_size):
    """`count` documents of random ids; each has a prompt of 1 to 3 tokens."""
    rng = np.random.default_rng(seed)
    return [Document([int(i) for i in rng.integers(2, vocab, rng.integers(shortest, longest + 1))],
                     int(rng.integers(1, 4))) for _ in range(count)]


class FixedLoader:
    """The same micro-batches again and again, in place of data.Loader."""

    def __init__(self, groups, streams=STREAMS.count):
        """groups: a list of lists of documents, one list per micro-batch."""
        self.documents = [d for group in groups for d in group]
        self.batches = [pad_batch(group, streams) for group in groups]

    def __getitem__(self, number):
        return self.batches[number % len(self.batches)]
