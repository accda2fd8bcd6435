"""Named training runs: what `python train.py --preset NAME` does.

Read first: config.py. Proven by: tests/test_config.py, tests/test_params.py.
"""

from dataclasses import dataclass

from .config import ModelConfig, StreamConfig, TrainConfig


@dataclass(frozen=True)
class Preset:
    """A named training run: model, streams, training, and its data (examples per task).

    Without `model` it trains an adapter for a model that exists.
    """

    model: ModelConfig
    streams: StreamConfig
    train: TrainConfig
    tasks: tuple
    examples: int


PRESETS = {
    # what `python train.py` does: minutes, to watch streams learn
    "demo": Preset(
        ModelConfig(vocab_size=512, width=128, layers=4, heads=4, kv_heads=2, head_dim=32,
                    mlp_width=320),
        StreamConfig(count=3, layers=2, transition_rank=64),
        TrainConfig(steps=400, batch=16, lr=4e-3, warmup=50, stream_weight=0.2,
                    transition_weight=0.2),
        tasks=("sentence",), examples=4000),
    # how weights/tiny was made: about an hour
    "tiny": Preset(
        ModelConfig(), StreamConfig(count=3, layers=2, transition_rank=96),
        TrainConfig(steps=6000, batch=16, lr=3e-3, warmup=100, stream_weight=0.2,
                    transition_weight=0.2, checkpoint_every=250),
        tasks=("sql", "dialogue", "sentence"), examples=32000),
    # what `python train.py --model DIR` does: an adapter for an open model
    "adapter": Preset(
        None, StreamConfig(count=4, layers=6, lora_rank=16, lora_alpha=32.0, transition_rank=128,
                           draft_vocab=4096),
        TrainConfig(epochs=4, batch=8, lr=3e-3, min_lr=1e-4, warmup=30, stream_weight=0.2,
                    transition_weight=0.2, checkpoint_every=50),
        tasks=("sql", "dialogue", "sentence"), examples=2000),
}
