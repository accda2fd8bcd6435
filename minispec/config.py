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
import sys
from dataclasses import dataclass, field


def setting(default, help, choices=None):
    """A dataclass field that knows its help text and its allowed values."""
    return field(default=default, metadata={"help": help, "choices": choices})


KINDS = {int: "an integer", float: "a finite number", bool: "true or false", tuple: "a list"}


def fits(value, like):
    """Is `value` of the type of the default `like`? True is no int, an int is a float, and the
    entries of a tuple are judged by the first entry of the default."""
    if isinstance(like, tuple):
        return isinstance(value, tuple) and all(fits(v, like[0]) for v in value)
    if isinstance(value, bool) or isinstance(like, bool):
        return isinstance(value, bool) and isinstance(like, bool)
    if isinstance(like, float):
        return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return isinstance(value, type(like))


class Checked:
    """Base of the settings: every value is checked for its type, its `choices` and its bounds."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            wanted = f"one of {', '.join(map(repr, choices))}" if choices else KINDS[f.type]
            self.need(value in choices if choices else fits(value, f.default),
                      f"{f.name} is {value!r}, expected {wanted}")
        self.check()

    def check(self):
        """Bounds of fields and relations between them; overridden."""

    def need(self, condition, text):
        """Raise ValueError(text), which begins with a field's name, unless `condition` holds."""
        if not condition:
            raise ValueError(f"{type(self).__name__}.{text}")

    def at_least(self, low, *names):
        """Raise ValueError unless each of these fields is `low` or more."""
        for name in names:
            value = getattr(self, name)
            self.need(value >= low, f"{name} is {value}, expected {low} or more")

    def positive(self, *names):
        """Raise ValueError unless each of these fields is more than 0."""
        for name in names:
            value = getattr(self, name)
            self.need(value > 0, f"{name} is {value}, expected more than 0")

    @classmethod
    def from_dict(cls, values):
        """Settings from a dict as JSON gives it.

        Raises ValueError for anything but a dict, and for a key that does not exist.
        """
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__} is {values!r}, expected an object with its fields")
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
    rotary_dim: int = setting(0, "leading channels of a head that rope rotates; 0: all")
    rope_scaling: str = setting("none", "frequencies stretched for longer contexts",
                                ("none", "linear", "llama3"))
    rope_factor: float = setting(1.0, "frequencies are divided by this")
    rope_low: float = setting(1.0, "llama3: divided in full below this many turns per context")
    rope_high: float = setting(4.0, "llama3: left alone above this many turns per context")
    rope_original: int = setting(8192, "llama3: the context it counts turns in")
    activation: str = setting("silu", "nonlinearity of the MLP; gelu is the tanh form, gelu_exact "
                              "has the error function", ("silu", "gelu", "gelu_exact", "relu"))
    gated: bool = setting(True, "MLP with a gate: act(x Wg) * (x Wu)")
    qkv_bias: bool = setting(False, "biases on the query, key and value projections")
    out_bias: bool = setting(False, "bias on the attention's output projection")
    mlp_bias: bool = setting(False, "biases in the MLP")
    tied: bool = setting(True, "output head = input embedding, transposed")
    head_bias: bool = setting(False, "bias on the output head")
    residual: str = setting("chained", "MLP after attention; both on the block's input with a "
                            "norm each (parallel) or one for both (shared); or chained with the "
                            "norms after the sums (post)",
                            ("chained", "parallel", "shared", "post"))
    final_norm: bool = setting(True, "a norm before the head")
    qk_norm: bool = setting(False, "RMSNorm of every query and key head")
    sliding_window: int = setting(0, "a row sees this many positions, its own included; 0: all")
    position_offset: int = setting(0, "entries in front of the learned positions' first")
    embed_width: int = setting(0, "width of the embeddings, projected to C and back; 0: C")
    bos_id: int = setting(0, "id put in front of every text; -1 if the model has none")
    eos_ids: tuple = setting((1,), "ids that end a text")

    def check(self):
        self.at_least(1, "vocab_size", "width", "layers", "heads", "kv_heads", "head_dim",
                      "mlp_width", "max_positions")
        self.at_least(0, "rotary_dim", "sliding_window", "position_offset", "embed_width")
        self.positive("norm_eps", "rope_theta", "rope_factor", "rope_low", "rope_original")
        self.need(self.heads % self.kv_heads == 0,
                  f"heads is {self.heads}, expected a multiple of kv_heads, {self.kv_heads}")
        self.need(self.positions != "rope" or self.head_dim % 2 == 0,
                  f"head_dim is {self.head_dim}, expected an even number: rope rotates pairs")
        self.need(self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
                  f"rotary_dim is {self.rotary_dim}, expected an even number up to head_dim, "
                  f"{self.head_dim}")
        self.need(self.rope_high > self.rope_low,
                  f"rope_high is {self.rope_high}, expected more than rope_low, {self.rope_low}")
        self.need(not self.qk_norm or self.norm == "rms",
                  "qk_norm is True, expected False unless norm is 'rms'")
        self.need(-1 <= self.bos_id < self.vocab_size,
                  f"bos_id is {self.bos_id}, expected -1 or an id below {self.vocab_size}")
        self.need(all(0 <= i < self.vocab_size for i in self.eos_ids),
                  f"eos_ids is {self.eos_ids}, expected ids below {self.vocab_size}")


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
    draft_vocab: int = setting(0, "most ids that streams may guess: those most frequent in the "
                               "completions; 0: the whole vocabulary")
    embed_scale: float = setting(1.0, "stream embeddings are multiplied by this: the size of the "
                                 "hidden states that they are added to")

    def check(self):
        self.at_least(1, "count", "layers")
        self.at_least(0, "insertion_rank", "lora_rank", "prune_rank", "transition_rank",
                      "draft_vocab")
        self.positive("embed_scale")
        self.need(not (self.mode == "lossless" and self.main_sees_streams),
                  "main_sees_streams is True, expected False in lossless mode: a main row that "
                  "attends to streams no longer computes the base model")
        self.need(not (self.mode == "lossless" and self.lora_all_layers),
                  "lora_all_layers is True, expected False in lossless mode: its adapters act on "
                  "stream rows, which exist in the top layers only")
        unknown = sorted(set(self.lora_targets) - set(LORA_TARGETS))
        self.need(not unknown, f"lora_targets has {unknown}, expected some of {LORA_TARGETS}")

    def check_model(self, model):
        """Raise ValueError unless streams like these fit a model of this ModelConfig."""
        self.need(self.layers <= model.layers,
                  f"layers is {self.layers}, the model has only {model.layers} layers")
        self.need(self.kind != "rotation" or model.head_dim % 2 == 0,
                  f"kind 'rotation' turns pairs of channels, head_dim {model.head_dim} is odd")


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
        self.at_least(0, "depth", "budget", "prune_budget")
        self.at_least(1, "k")
        self.need(0 <= self.prune_threshold <= 1,
                  f"prune_threshold is {self.prune_threshold}, expected a probability")

    @property
    def prunes(self):
        return self.prune_threshold > 0 or self.prune_budget > 0


PAPER_TREE = TreeConfig(shape="full", conditional=False, k=3)


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How a model is trained."""

    steps: int = setting(1500, "optimiser steps")
    epochs: int = setting(0, "passes over the data, instead of steps; 0: as many as steps says")
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
        self.at_least(1, "steps", "batch", "accumulate", "workers", "segments",
                      "checkpoint_every")
        self.at_least(0, "epochs", "min_lr", "warmup", "weight_decay", "main_weight",
                      "stream_weight", "transition_weight", "seed")
        self.positive("lr", "clip")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            self.need(0 <= value < 1, f"{name} is {value}, expected 0 or more and less than 1")


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
