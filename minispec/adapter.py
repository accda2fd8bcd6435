"""Adapters: what turns a plain open model into one with streams, as a small folder of its own.

A base model is loaded once and left as it is. `attach` puts fresh streams, LoRA pairs, a pruning
map and conditional streams beside its arrays; training changes only those, and only those are
saved: adapter.safetensors and a config.json that names the base and holds a hash of its
parameters. The same adapter on another base would draft nonsense (or, in shared mode, write it),
so loading it there is refused.

Read first: parameters.py, lora.py, weights.py. Proven by: tests/test_adapter.py.
"""

import hashlib
import os

import numpy as np

from .backend import to_host
from .config import ModelConfig, StreamConfig
from .lora import merge
from .model import Model
from .parameters import adapter_shapes, base_shapes, init_stream_params, is_base, stream_shapes
from .weights import (DRAFT_IDS, check_shapes, draft_shape, read_json, read_tensors,
                      write_json, write_tensors)

FORMAT = "minispec-adapter-1"
TENSORS = "adapter.safetensors"


def attach(base, streams, seed=0, draft_ids=None):
    """Model with the arrays of `base` (shared, not copied) and fresh parameters for `streams`.

    base: a plain Model. draft_ids (n,) if streams.draft_vocab is set (choose_draft_ids).
    Raises ValueError if the base has streams already, or these do not fit it.
    """
    check_plain(base)
    streams.check_model(base.config)
    added = init_stream_params(base.config, streams, seed, str(base.dtype))
    added = {n: base.xp.asarray(a) for n, a in added.items()}
    return Model(base.config, {**base.params, **added}, streams, base.tokenizer, draft_ids)


def check_plain(base):
    """Raise ValueError unless `base` is a model without streams."""
    if base.streams is not None:
        raise ValueError("the base model has streams already; an adapter needs a plain model")


def base_hash(model):
    """sha256 over names, shapes and float32 values of the base parameters, as hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(base_shapes(model.config)):
        value = np.ascontiguousarray(to_host(model.params[name]), "<f4")  # shape
        digest.update(f"{name} {value.shape}\n".encode())
        digest.update(value.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def save_adapter(folder, model, base_name, dtype="float16"):
    """Write what `attach` has added, as trained, and which base it belongs to.

    config.json is written last, so a folder without it is not an adapter yet. Raises ValueError
    for a model without streams, or a value that is not finite in `dtype`.
    """
    if model.streams is None:
        raise ValueError("the model has no streams: there is no adapter to save")
    with np.errstate(over="ignore"):                      # reported below
        tensors = {n: to_host(a).astype(dtype) for n, a in model.params.items() if not is_base(n)}
    odd = sorted(n for n, a in tensors.items() if not np.isfinite(a).all())
    if odd:
        raise ValueError(f"{folder}: not finite in {dtype}: {', '.join(odd)}")
    if model.draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(model.draft_ids, np.int32)        # (n,)
    write_tensors(os.path.join(folder, TENSORS), tensors, {"format": FORMAT})
    settings = {"format": FORMAT, "base": base_name, "base_hash": base_hash(model),
                "model": model.config.as_dict(), "streams": model.streams.as_dict()}
    write_json(os.path.join(folder, "config.json"), settings)


def read_settings(folder, base):
    """StreamConfig of an adapter folder, checked against the base model."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is missing; an adapter folder holds config.json and "
                                f"{TENSORS}")
    settings = read_json(path)
    if settings.get("format") != FORMAT:
        raise ValueError(f'{path}: "format" is {settings.get("format")!r}, expected {FORMAT!r}')
    for key, kind in (("base", str), ("base_hash", str), ("model", dict), ("streams", dict)):
        if not isinstance(settings.get(key), kind):
            raise ValueError(f'{path}: "{key}" is missing or no {kind.__name__}')
    try:
        ModelConfig.from_dict(settings["model"])
        streams = StreamConfig.from_dict(settings["streams"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    wanted, found = settings["base_hash"], base_hash(base)
    if wanted != found:
        raise ValueError(f"{path}: this adapter was trained on another base: "
                         f"{settings['base']} with parameters of hash {wanted[:12]}, the given "
                         f"model's are {found[:12]}")
    try:
        streams.check_model(base.config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return streams


def load_adapter(folder, base):
    """Model: `base` (a plain Model, its arrays are shared) with the adapter of a folder.

    Raises FileNotFoundError or ValueError, naming the file, for another base and for whatever is
    missing or broken.
    """
    check_plain(base)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is not a folder; an adapter folder holds config.json "
                                f"and {TENSORS}")
    streams, path = read_settings(folder, base), os.path.join(folder, TENSORS)
    tensors = read_tensors(path)
    shapes = {**stream_shapes(base.config, streams), **adapter_shapes(base.config, streams)}
    check_shapes(path, tensors, {**shapes, **draft_shape(streams, tensors)})
    draft_ids, dtype = tensors.pop(DRAFT_IDS, None), str(base.dtype)
    added = {n: base.xp.asarray(a.astype(dtype)) for n, a in tensors.items()}
    try:
        return Model(base.config, {**base.params, **added}, streams, base.tokenizer, draft_ids)
    except ValueError as error:                           # of the draft ids
        raise ValueError(f"{path}: {error}") from None


def merged(model):
    """The model with its adapters folded into their matrices, where they serve all rows: decoding
    then pays nothing for them. In lossless mode they serve stream rows only and stay apart."""
    streams = model.streams
    if streams is None or not streams.lora_rank or streams.mode == "lossless":
        return model
    params = merge(model.params, streams.lora_alpha / streams.lora_rank)
    return Model(model.config, params, streams.replace(lora_rank=0), model.tokenizer,
                 model.draft_ids)
