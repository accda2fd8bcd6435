"""config.json of an HF-style folder <-> ModelConfig.

The file has grown over the years: the rotary base at top level or inside rope_parameters, the kind
of scaling as `type` or `rope_type`, keys that are there and null. null means absent everywhere
(case H-23). A family that we don't know, or a feature that we lack, is refused by name here,
before any weight is read.

Read first: families.py. Proven by: tests/test_hf_config.py (cases H-13, H-15, H-20, H-23).
"""

import re

from .config import ModelConfig
from .families import FAMILIES, REQUIRED

LLAMA3 = {"rope_low": "low_freq_factor", "rope_high": "high_freq_factor",
          "rope_original": "original_max_position_embeddings"}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor",
             *LLAMA3.values()}
# key: the value that we support, for every family
GENERAL = (("quantization_config", None), ("is_encoder_decoder", False),
           ("add_cross_attention", False))


def present(settings):
    """The keys that are not null."""
    return {k: v for k, v in settings.items() if v is not None}


def read_config(path, settings, generation=None):
    """ModelConfig and Family of a config.json and, if there is one, generation_config.json (dicts).

    Raises ValueError naming `path`, the key and its value: family or feature not supported, a key
    missing, a value of a wrong type.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{path}: model_type {name!r} is not supported, expected one of "
                         f"{', '.join(FAMILIES)}")
    family = FAMILIES[name]
    try:
        return build(family, present(settings), present(generation or {})), family
    except ValueError as error:
        why = re.sub(r"^ModelConfig\.(\w+)", lambda m: their_key(family, m[1]), str(error))
        raise ValueError(f"{path}: {name}: {why}") from None


def their_key(family, field):
    """What config.json calls a field of ModelConfig, for error messages."""
    return family.keys[field].name if field in family.keys else field


def build(family, found, generation):
    """ModelConfig from the keys that are there."""
    values = dict(family.fixed)
    for field, key in family.keys.items():
        values[field] = value_of(found, key)
    refuse(family, found)
    for field in ("width", "heads"):
        if type(values[field]) is not int or values[field] < 1:
            raise ValueError(f"ModelConfig.{field} is {values[field]!r}, expected 1 or more")
    if values.get("head_dim") is None:
        if values["width"] % values["heads"]:
            raise ValueError(f"ModelConfig.width is {values['width']}, expected a multiple of the "
                             f"{values['heads']} heads")
        values["head_dim"] = values["width"] // values["heads"]
    if values.get("kv_heads") is None:
        values["kv_heads"] = values["heads"]
    if values.get("mlp_width") is None:
        values["mlp_width"] = 4 * values["width"]         # GPT-2's rule
    if values.get("embed_width") == values["width"]:
        values["embed_width"] = 0
    if values["positions"] == "rope":
        values.update(rope_settings(family, found, values["head_dim"]))
    check_layer_types(found, values.get("sliding_window"))
    vocab = values["vocab_size"] if isinstance(values["vocab_size"], int) else 0
    values["bos_id"] = first_id(found.get("bos_token_id"), vocab)
    values["eos_ids"] = id_list(generation.get("eos_token_id", found.get("eos_token_id")), vocab)
    return ModelConfig(**values)


def value_of(found, key):
    """The value of one Key, in our terms."""
    value = found.get(key.name, key.default)
    if value is REQUIRED:
        raise ValueError(f"{key.name} is missing")
    if key.values is None:
        return value
    if not isinstance(value, (str, bool)) or value not in key.values:
        raise ValueError(f"{key.name} is {value!r}, expected one of "
                         f"{', '.join(str(v) for v in key.values)}")
    return key.values[value]


def refuse(family, found):
    """Raise ValueError for a feature that we lack."""
    for key, needed in (*GENERAL, *family.only):
        if found.get(key, needed) != needed:
            raise ValueError(f"{key} is {found[key]!r}, which is not supported"
                             + ("" if needed is None else f", expected {needed}"))


def check_layer_types(found, window):
    """Raise ValueError unless all layers attend alike, and as the window says."""
    kinds, expected = found.get("layer_types", []), "sliding" if window else "full"
    if not isinstance(kinds, list) or any(kind != f"{expected}_attention" for kind in kinds):
        raise ValueError(f"layer_types is {kinds!r}, expected {expected}_attention for all layers")


# --- rope ---------------------------------------------------------------------------------------

def rope_settings(family, found, head_dim):
    """{field: value} of everything rotary."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise ValueError(f"rope_parameters is {rope!r}, expected one set for all layers")
    rope = present(rope)
    theta = rope.get("rope_theta", found.get(family.theta, found.get("rope_theta", 10000.0)))
    values = {"rope_theta": theta, **scaling(rope, found)}
    share = rope.get("partial_rotary_factor", found.get("partial_rotary_factor", 1.0))
    if family.rotary is not None:
        share = rope.get("partial_rotary_factor", value_of(found, family.rotary))
    elif share != 1.0:
        raise ValueError(f"partial_rotary_factor is {share!r}, expected 1.0 in this family")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"the rotary share of a head is {share!r}, expected more than 0, up to 1")
    if share < 1 and isinstance(head_dim, int):
        values["rotary_dim"] = int(head_dim * share)
        if values["rotary_dim"] < 2:
            raise ValueError(f"the rotary share {share} of {head_dim} channels is no pair")
    return values


def scaling(rope, found):
    """{field: value} of rope scaling. Raises ValueError for a kind that we lack: plain rope in its
    place would be silently wrong (case H-20)."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported, expected default, linear or llama3")
    unknown = sorted(set(rope) - ROPE_KEYS)
    if unknown:
        raise ValueError(f"rope settings have {', '.join(unknown)}, which is not supported")
    if kind == "default":
        return {}
    needed = {"rope_factor": "factor", **(LLAMA3 if kind == "llama3" else {})}
    rope = {"original_max_position_embeddings": found.get("max_position_embeddings"), **rope}
    missing = [key for key in needed.values() if rope.get(key) is None]
    if missing:
        raise ValueError(f"rope settings of type {kind} lack {', '.join(missing)}")
    return {"rope_scaling": kind, **{field: rope[key] for field, key in needed.items()}}


# --- ids ----------------------------------------------------------------------------------------

def id_list(value, vocab):
    """End ids as a tuple, from an id, a list or nothing (case H-13). Ids beyond the vocabulary can
    never be emitted, and tiny test models carry the ids of large ones: they are left out."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise ValueError(f"eos_token_id is {value!r}, expected an id or a list of ids")
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab))


def first_id(value, vocab):
    return value if type(value) is int and 0 <= value < vocab else -1


# --- the way back -------------------------------------------------------------------------------

def write_config(name, config, dtype="float32"):
    """config.json (a dict) of a ModelConfig in family `name`, in the layout that all readers know.

    Raises ValueError if the family cannot express the config.
    """
    if name not in FAMILIES:
        raise ValueError(f"family is {name!r}, expected one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    settings = {"architectures": [family.architecture], "model_type": name, "torch_dtype": dtype,
                "eos_token_id": list(config.eos_ids) or None,
                "bos_token_id": config.bos_id if config.bos_id >= 0 else None,
                "pad_token_id": None, **dict(family.only)}
    for field, key in family.keys.items():
        value = getattr(config, field)
        if key.values is not None:
            value = next((k for k, v in key.values.items() if v == value), None)
        settings[key.name] = value
    if "sliding_window" in family.keys:
        settings["sliding_window"] = config.sliding_window or None
    if "embed_width" in family.keys:
        settings[family.keys["embed_width"].name] = config.embed_width or config.width
    if config.positions == "rope":
        settings.update(write_rope(family, config))
    try:
        back, _ = read_config("config.json", settings)
    except ValueError as error:
        raise ValueError(f"family {name} cannot express this model ({error})") from None
    lost = [f for f, v in config.as_dict().items() if getattr(back, f) != v]
    if lost:
        raise ValueError(f"family {name} cannot express {', '.join(lost)} of this model")
    return settings


def write_rope(family, config):
    """The rotary keys of a config.json."""
    settings = {family.theta: config.rope_theta, "rope_scaling": None}
    if family.rotary is not None:
        share = (config.rotary_dim or config.head_dim) / config.head_dim
        settings[family.rotary.name] = share
    if config.rope_scaling != "none":
        keys = {"rope_factor": "factor", **(LLAMA3 if config.rope_scaling == "llama3" else {})}
        settings["rope_scaling"] = {"rope_type": config.rope_scaling,
                                    **{key: getattr(config, f) for f, key in keys.items()}}
    return settings
