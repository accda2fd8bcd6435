"""Settings: every bad value gets one clear error that names class and field, and the command-line
flags made from the fields give back the very same settings."""

import argparse
import dataclasses

import pytest

from minispec.config import (LORA_TARGETS, PAPER_TREE, ModelConfig, StreamConfig,
                             TrainConfig, TreeConfig, add_flags, from_flags)
from minispec.parameters import all_shapes
from minispec.presets import PRESETS

CLASSES = (ModelConfig, StreamConfig, TreeConfig, TrainConfig)
FIELDS = [(cls, f.name) for cls in CLASSES for f in dataclasses.fields(cls)]


def refused(cls, **values):
    """The message with which `cls(**values)` is refused; it must be one line."""
    with pytest.raises(ValueError) as caught:
        cls(**values)
    message = str(caught.value)
    assert "\n" not in message and "expected" in message
    return message


@pytest.mark.parametrize("cls, name", FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_a_value_of_a_wrong_type_names_its_field(cls, name):
    default = getattr(cls(), name)
    wrong = [None, [], {}, object(), "abc", float("nan"), float("inf"), 10**400]
    wrong += [(None,), (1.5,)] if isinstance(default, tuple) else [(1,)]
    wrong += [True] if not isinstance(default, bool) else [1, 0]
    wrong += [2.5] if isinstance(default, int) else []
    for value in wrong:
        if type(value) is type(default) is int:
            continue                                      # 10**400 is an integer
        assert refused(cls, **{name: value}).startswith(f"{cls.__name__}.{name} is ")


BAD = [
    (ModelConfig, "vocab_size", 0), (ModelConfig, "width", -8), (ModelConfig, "layers", 0),
    (ModelConfig, "heads", 5), (ModelConfig, "kv_heads", 4), (ModelConfig, "head_dim", 7),
    (ModelConfig, "mlp_width", 0), (ModelConfig, "max_positions", 0), (ModelConfig, "norm", "RMS"),
    (ModelConfig, "norm_eps", 0.0), (ModelConfig, "norm_eps", -1e-5),
    (ModelConfig, "positions", ""), (ModelConfig, "rope_theta", 0.0),
    (ModelConfig, "activation", "relu6"), (ModelConfig, "bos_id", -2),
    (ModelConfig, "bos_id", 1024), (ModelConfig, "eos_ids", (1, 1024)),
    (ModelConfig, "eos_ids", (-1,)), (ModelConfig, "rotary_dim", 3),
    (ModelConfig, "rotary_dim", 34), (ModelConfig, "rope_scaling", "yarn"),
    (ModelConfig, "rope_factor", 0.0), (ModelConfig, "rope_high", 1.0),
    (ModelConfig, "rope_original", 0), (ModelConfig, "residual", "serial"),
    (ModelConfig, "sliding_window", -1), (ModelConfig, "position_offset", -1),
    (ModelConfig, "embed_width", -1),
    (StreamConfig, "count", 0), (StreamConfig, "layers", 0), (StreamConfig, "kind", "both"),
    (StreamConfig, "insertion_rank", -1), (StreamConfig, "lora_rank", -1),
    (StreamConfig, "prune_rank", -1), (StreamConfig, "transition_rank", -1),
    (StreamConfig, "mode", "lossy"), (StreamConfig, "positions", "behind"),
    (StreamConfig, "lora_targets", ("attn.q", "attn.qk")),
    (TreeConfig, "shape", "wide"), (TreeConfig, "depth", -1), (TreeConfig, "k", 0),
    (TreeConfig, "budget", -1), (TreeConfig, "prune_threshold", 1.5),
    (TreeConfig, "prune_threshold", -0.1), (TreeConfig, "prune_budget", -1),
    (TreeConfig, "acceptance", "greedy"),
    (TrainConfig, "steps", 0), (TrainConfig, "batch", 0), (TrainConfig, "accumulate", 0),
    (TrainConfig, "workers", 0), (TrainConfig, "segments", 0), (TrainConfig, "lr", 0.0),
    (TrainConfig, "lr", -1e-3), (TrainConfig, "min_lr", -1e-4), (TrainConfig, "warmup", -1),
    (TrainConfig, "weight_decay", -0.1), (TrainConfig, "beta1", 1.0), (TrainConfig, "beta2", 1.0),
    (TrainConfig, "beta2", -0.1), (TrainConfig, "clip", 0.0), (TrainConfig, "main_weight", -1.0),
    (TrainConfig, "stream_weight", -0.1), (TrainConfig, "seed", -1),
    (TrainConfig, "checkpoint_every", 0)]


@pytest.mark.parametrize("cls, name, value", BAD, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_a_value_out_of_range_names_its_field(cls, name, value):
    message = refused(cls, **{name: value})
    assert message.startswith(f"{cls.__name__}.") and name in message


def test_what_lossless_mode_rules_out():
    message = refused(StreamConfig, mode="lossless", main_sees_streams=True)
    assert message.startswith("StreamConfig.main_sees_streams") and "lossless" in message
    message = refused(StreamConfig, mode="lossless", lora_all_layers=True)
    assert message.startswith("StreamConfig.lora_all_layers") and "lossless" in message
    assert StreamConfig(mode="lossless", lora_rank=4).lora_targets == LORA_TARGETS
    assert StreamConfig(main_sees_streams=True, lora_all_layers=True, lora_rank=2)


def test_values_that_are_fine():
    assert ModelConfig(positions="learned", head_dim=7)   # only rope needs pairs
    assert ModelConfig(bos_id=-1, eos_ids=())
    assert ModelConfig(rope_theta=500000, heads=6, kv_heads=6)    # an integer is a number
    assert TrainConfig(warmup=0, beta1=0.0, weight_decay=0)
    assert TreeConfig(budget=0, prune_threshold=1.0)


def test_an_unknown_key_is_named():
    with pytest.raises(ValueError, match="ModelConfig has no field depth, widht"):
        ModelConfig.from_dict({"widht": 64, "depth": 2, "width": 64})
    for value in (None, [], 3, "x"):
        with pytest.raises(ValueError, match="StreamConfig is .*expected an object"):
            StreamConfig.from_dict(value)


@pytest.mark.parametrize("cls", CLASSES)
def test_settings_are_frozen_and_survive_a_dict(cls):
    here = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(here, dataclasses.fields(cls)[0].name, 1)
    as_json = {k: list(v) if isinstance(v, tuple) else v for k, v in here.as_dict().items()}
    assert cls.from_dict(as_json) == here


def test_replace_checks_again():
    assert TreeConfig().replace(k=7).k == 7
    with pytest.raises(ValueError, match="TreeConfig.k is 0"):
        TreeConfig().replace(k=0)


def test_when_a_tree_is_pruned():
    assert not TreeConfig().prunes and not PAPER_TREE.prunes
    assert TreeConfig(prune_threshold=0.01).prunes and TreeConfig(prune_budget=3).prunes
    assert PAPER_TREE.shape == "full" and not PAPER_TREE.conditional


# --- flags --------------------------------------------------------------------------------------

def parsed(cls, argv, **options):
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, **options)
    return from_flags(cls, parser.parse_args(argv), rename=options.get("rename"))


def other(value, choices):
    """A valid value that differs from the default."""
    if choices:
        return next(c for c in choices if c != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return value[:1] if isinstance(value[0], str) else value
    return value / 2 if isinstance(value, float) else value * 3 or 2


@pytest.mark.parametrize("cls", CLASSES)
def test_flags_round_trip(cls):
    assert parsed(cls, []) == cls()
    for f in dataclasses.fields(cls):
        if isinstance(f.default, tuple) and not isinstance(f.default[0], str):
            continue                                      # ids come from the tokenizer
        value = other(f.default, f.metadata["choices"])
        flag = "--" + f.name.replace("_", "-")
        if isinstance(value, bool):
            argv = [flag if value else "--no-" + flag[2:]]
        else:
            argv = [f"{flag}={','.join(value) if isinstance(value, tuple) else value}"]
        assert parsed(cls, argv) == cls().replace(**{f.name: value})


def test_flags_take_defaults_and_names_from_the_caller():
    defaults = TreeConfig(k=5, fused=True, shape="full")
    assert parsed(TreeConfig, [], defaults=defaults) == defaults
    assert not parsed(TreeConfig, ["--no-fused"], defaults=defaults).fused
    renamed = {"count": "streams", "layers": "stream_layers"}
    assert parsed(StreamConfig, ["--streams", "5", "--stream-layers", "1"],
                  rename=renamed) == StreamConfig(count=5, layers=1)


def test_fields_without_a_flag_are_given():
    parser = argparse.ArgumentParser()
    add_flags(parser, ModelConfig, skip=("bos_id", "eos_ids"))
    args = parser.parse_args([])
    assert not hasattr(args, "eos_ids")
    config = from_flags(ModelConfig, args, vocab_size=300, bos_id=-1, eos_ids=(7,))
    assert config == ModelConfig(vocab_size=300, bos_id=-1, eos_ids=(7,))


@pytest.mark.parametrize("argv", [["--k", "many"], ["--shape", "wide"], ["--nosuch", "1"]])
def test_a_bad_flag_ends_the_program_with_one_message(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parsed(TreeConfig, argv)
    assert caught.value.code == 2 and argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("cls", CLASSES)
def test_every_flag_has_help(cls, capsys):
    with pytest.raises(SystemExit):
        parsed(cls, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for f in dataclasses.fields(cls):
        assert len(f.metadata["help"]) > 4 and "--" + f.name.replace("_", "-") in text


def test_presets_fit_together():
    assert {"demo", "tiny", "adapter"} <= set(PRESETS)
    for preset in PRESETS.values():
        model = preset.model or ModelConfig()             # an adapter's model is the user's
        assert preset.streams.layers <= model.layers
        assert all_shapes(model, preset.streams)
        assert preset.examples >= preset.train.batch and preset.tasks
    assert PRESETS["tiny"].model == ModelConfig()         # the defaults are the shipped model
