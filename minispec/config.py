"""Settings as dataclasses, and the command-line flags made from their fields.

The letters of the whole code base (also in the README):

    B  batch                      T  positions in this call      P  positions already cached
    C  width of the model         H  query heads                 Hkv  key/value heads
    D  width of one head          F  width of the MLP            V  vocabulary
    L  layers                     A  top layers with streams (the paper's N_s)
    G  streams per position (the paper's gamma)
    N  nodes of this step's draft tree, root included            R  rank of a low-rank map

Read first: nothing. Proven by: tests/test_config.py.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field


def setting(default, help, choices=None):
    """A dataclass field that knows its help text and its allowed values."""
    return field(default=default, metadata={"help": help, "choices": choices})


class Checked:
    """Base of the settings: every value is checked against its field's `choices` and bounds."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata.get("choices")
            if choices and value not in choices:
                raise ValueError(f"{type(self).__name__}.{f.name} is {value!r}, "
                                 f"expected one of {', '.join(map(repr, choices))}")
            if isinstance(value, (int, float)) and value != value:
                raise ValueError(f"{type(self).__name__}.{f.name} is not a number")
        self.check()

    def check(self):
        """Relations between fields; overridden."""

    def need(self, condition, text):
        """Raise ValueError(text) with the class name in front unless `condition` holds."""
        if not condition:
            raise ValueError(f"{type(self).__name__}: {text}")

    @classmethod
    def from_dict(cls, values):
        """Settings from a dict as JSON gives it. Raises ValueError for a key that does not exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)

    def as_dict(self):
        return dataclasses.asdict(self)

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Shape of the transformer. The defaults are those of the shipped model, weights/tiny."""

    vocab_size: int = setting(1024, "V, entries of the vocabulary")
    width: int = setting(192, "C, width of the model")
    layers: int = setting(6, "L, number of blocks")
    heads: int = setting(6, "H, query heads")
    kv_heads: int = setting(2, "Hkv, key/value heads (grouped-query attention if fewer than H)")
    head_dim: int = setting(32, "D, width of one head")
    mlp_width: int = setting(512, "F, width of the MLP")
    max_positions: int = setting(256, "longest context in tokens")
    norm: str = setting("rms", "RMSNorm or LayerNorm", ("rms", "layer"))
    norm_eps: float = setting(1e-5, "added to the variance inside the norm")
    positions: str = setting("rope", "rotary or learned positions", ("rope", "learned"))
    rope_theta: float = setting(10000.0, "base of the rotary frequencies")
    activation: str = setting("silu", "nonlinearity of the MLP", ("silu", "gelu"))
    gated: bool = setting(True, "MLP with a gate: act(x Wg) * (x Wu)")
    qkv_bias: bool = setting(False, "biases on the query, key and value projections")
    out_bias: bool = setting(False, "bias on the attention's output projection")
    mlp_bias: bool = setting(False, "biases in the MLP")
    tied: bool = setting(True, "output head = input embedding, transposed")
    bos_id: int = setting(0, "id put in front of every text; -1 if the model has none")
    eos_ids: tuple = setting((1,), "ids that end a text")

    def check(self):
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim",
                     "mlp_width", "max_positions"):
            self.need(getattr(self, name) >= 1,
                      f"{name} is {getattr(self, name)}, expected 1 or more")
        self.need(self.heads % self.kv_heads == 0,
                  f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        self.need(self.positions != "rope" or self.head_dim % 2 == 0,
                  f"rope rotates pairs of channels, head_dim {self.head_dim} is odd")


LORA_TARGETS = ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down")


@dataclass(frozen=True)
class StreamConfig(Checked):
    """The streams of Speculative Streaming and the small maps trained with them."""

    count: int = setting(3, "G, streams per position (the paper's gamma)")
    layers: int = setting(2, "A, top layers that the streams pass (the paper's N_s)")
    kind: str = setting("embedding", "what tells the streams apart: an embedding each, or a "
                        "rotation of their values", ("embedding", "rotation"))
    rotation_angle: float = setting(0.005, "radians per stream of the value rotation")
    insertion_rank: int = setting(0, "eta, rank of the insertion map f; 0: the identity")
    positions: str = setting("ahead", "stream g at t has position t+g (ahead) or t (same)",
                             ("ahead", "same"))
    main_sees_streams: bool = setting(False, "main rows attend to their own streams (PMLR eq. 1)")
    mode: str = setting("shared", "shared: adapters serve all rows; lossless: the base is frozen, "
                        "adapters serve stream rows only", ("shared", "lossless"))
    lora_rank: int = setting(0, "R of the LoRA adapters in the top layers; 0: none")
    lora_alpha: float = setting(16.0, "LoRA output is scaled by alpha / R")
    lora_targets: tuple = setting(LORA_TARGETS, "projections that get an adapter")
    lora_all_layers: bool = setting(False, "adapters in every layer, not only the top A")
    prune_rank: int = setting(8, "rank of the early-exit map o; 0: no pruning map")
    transition_rank: int = setting(96, "R of the conditional streams; 0: none")

    def check(self):
        self.need(self.count >= 1, f"count is {self.count}, expected 1 or more")
        self.need(self.layers >= 1, f"layers is {self.layers}, expected 1 or more")
        self.need(not (self.mode == "lossless" and self.main_sees_streams),
                  "lossless mode needs main_sees_streams=False: a main row that attends to "
                  "streams no longer computes the base model")
        self.need(not (self.mode == "lossless" and self.lora_all_layers),
                  "lossless adapters act on stream rows, which exist in the top layers only")
        unknown = set(self.lora_targets) - set(LORA_TARGETS)
        self.need(not unknown, f"unknown lora_targets {sorted(unknown)}")


@dataclass(frozen=True)
class TreeConfig(Checked):
    """Shape of the draft tree and how it is pruned and verified."""

    shape: str = setting("best_first", "full: product of the k best per depth (paper); "
                         "best_first: most probable nodes under a budget", ("full", "best_first"))
    conditional: bool = setting(True, "use conditional streams where the model has them")
    depth: int = setting(0, "levels below the root; 0: as many as there are streams")
    k: int = setting(3, "children per node that are looked at")
    budget: int = setting(8, "nodes drafted by best_first, the root not counted")
    prune_threshold: float = setting(0.0, "drop nodes whose early-exit probability is lower")
    prune_budget: int = setting(0, "keep this many drafted nodes after pruning; 0: no limit")
    fused: bool = setting(False, "streams of all nodes in the verifying pass (paper); "
                          "else one short pass for the accepted node")
    acceptance: str = setting("exact", "exact: sample and match; typical: Medusa's rule, LOSSY",
                              ("exact", "typical"))

    def check(self):
        self.need(self.depth >= 0, f"depth is {self.depth}, expected 0 or more")
        self.need(self.k >= 1, f"k is {self.k}, expected 1 or more")
        self.need(self.budget >= 0, f"budget is {self.budget}, expected 0 or more")
        self.need(0 <= self.prune_threshold <= 1,
                  f"prune_threshold is {self.prune_threshold}, expected a probability")
        self.need(self.prune_budget >= 0,
                  f"prune_budget is {self.prune_budget}, expected 0 or more")

    @property
    def prunes(self):
        return self.prune_threshold > 0 or self.prune_budget > 0


PAPER_TREE = TreeConfig(shape="full", conditional=False, k=3)


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How a model is trained."""

    steps: int = setting(1500, "optimiser steps")
    batch: int = setting(16, "examples per micro-batch")
    accumulate: int = setting(1, "micro-batches per step")
    workers: int = setting(2, "threads that share a micro-batch's examples (on a CPU)")
    segments: int = setting(1, "slices of positions whose streams run one after the other")
    lr: float = setting(2e-3, "largest learning rate, per step")
    min_lr: float = setting(1e-4, "learning rate at the end of the cosine")
    warmup: int = setting(100, "steps of linear warm-up")
    weight_decay: float = setting(0.01, "AdamW decay, on matrices only")
    beta1: float = setting(0.9, "AdamW decay of the mean gradient")
    beta2: float = setting(0.98, "AdamW decay of the mean square")
    clip: float = setting(1.0, "largest norm of the whole gradient")
    main_weight: float = setting(1.0, "alpha_0 of the n-gram loss (0 in lossless mode)")
    stream_weight: float = setting(0.1, "alpha_g of each stream, the paper's 0.1")
    transition_weight: float = setting(0.1, "weight of each conditional stream's loss")
    seed: int = setting(0, "of the parameters, the data order and nothing else")
    checkpoint_every: int = setting(200, "steps between checkpoints")

    def check(self):
        for name in ("steps", "batch", "accumulate", "workers", "segments", "checkpoint_every"):
            self.need(getattr(self, name) >= 1,
                      f"{name} is {getattr(self, name)}, expected 1 or more")
        self.need(self.lr > 0, f"lr is {self.lr}, expected more than 0")
        self.need(self.warmup >= 0, f"warmup is {self.warmup}, expected 0 or more")


@dataclass(frozen=True)
class Preset:
    """A named training run: model, streams, training, and its data (examples per task)."""

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
        TrainConfig(steps=600, batch=16, lr=4e-3, warmup=50, stream_weight=0.2,
                    transition_weight=0.2),
        tasks=("sql",), examples=4000),
    # how weights/tiny was made: about an hour
    "tiny": Preset(
        ModelConfig(), StreamConfig(count=3, layers=2, transition_rank=96),
        TrainConfig(steps=6000, batch=16, lr=3e-3, warmup=100, stream_weight=0.2,
                    transition_weight=0.2, checkpoint_every=250),
        tasks=("sql", "dialogue", "sentence"), examples=32000),
}


def add_flags(parser, cls, skip=(), defaults=None, rename=None):
    """One flag per field of the dataclass `cls` (name with dashes), help and default included.

    `defaults` is an instance whose values replace the class's own. `skip` names fields left out,
    `rename` maps field names to flag names where two classes would collide.
    """
    group, rename = parser.add_argument_group(cls.__name__), rename or {}
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        default = getattr(defaults, f.name) if defaults is not None else f.default
        flag = "--" + rename.get(f.name, f.name).replace("_", "-")
        text = f.metadata["help"] + " (%(default)s)"
        if isinstance(default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default,
                               help=f.metadata["help"])
        elif isinstance(default, tuple):
            group.add_argument(flag, type=lambda s: tuple(s.split(",")), default=default,
                               help=text)
        else:
            group.add_argument(flag, type=type(default), default=default,
                               choices=f.metadata["choices"], help=text)


def from_flags(cls, args, rename=None, **fixed):
    """The dataclass `cls` from parsed arguments; `fixed` gives the fields that have no flag."""
    values = dict(fixed)
    for f in dataclasses.fields(cls):
        flag = (rename or {}).get(f.name, f.name)
        if f.name not in fixed and hasattr(args, flag):
            values[f.name] = getattr(args, flag)
    return cls(**values)
