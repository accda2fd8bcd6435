"""`load`: a model from wherever it is: our own folder, an HF-style folder, or a hub id; and an
adapter on top of it.

Read first: weights.py, hf.py, adapter.py. Proven by: tests/test_loading.py.
"""

import os
import re

import numpy as np

from .adapter import load_adapter, merged
from .hf import INDEX, load_hf
from .weights import load_model, read_json

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
          "model.safetensors", INDEX, "model*.safetensors"]


def load(source, xp=np, dtype="float32", adapter=None):
    """Model from a folder or a hub id ("owner/name"), computed in `dtype` on array library `xp`.

    A folder is ours (its config.json says "format": "minispec-1") or HF-style (it has a
    "model_type"). A hub id is fetched into the cache of huggingface_hub, once.
    adapter: a folder of `adapter.save_adapter` that was trained on this very base.
    Raises FileNotFoundError or ValueError, naming the file, for whatever is missing or broken.
    """
    folder = fetch(os.fspath(source))
    path = os.path.join(folder, "config.json")
    settings = read_json(path) if os.path.isfile(path) else {}
    if "model_type" in settings and "format" not in settings:
        model = load_hf(folder, xp, dtype)
    else:
        model = load_model(folder, xp, dtype)
    if adapter is None:
        return model
    head = model.packed_head                              # the base's own: an adapter has no head
    model = merged(load_adapter(os.fspath(adapter), model))
    model.packed_head = head
    return model


def fetch(source):
    """The folder of `source`: itself, or what huggingface_hub downloads (or has in its cache).

    Raises FileNotFoundError that says what to put where if it cannot be had.
    """
    if os.path.isdir(source) or not HUB_ID.fullmatch(source):
        return source
    try:
        from huggingface_hub import snapshot_download     # comes with tokenizers
        return snapshot_download(source, allow_patterns=WANTED, etag_timeout=5)
    except Exception as error:            # no network, no such model, no permission, no package
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(
            f"{source} is no folder here, and as a hub id it cannot be fetched ({why}). Put its "
            "config.json, tokenizer.json and model.safetensors (or model.safetensors.index.json "
            "and all its shards) into a folder and give the path of that folder") from None
