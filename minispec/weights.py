"""Model folders in and out, and files that are never half-written.

A model folder holds config.json (model and stream settings), model.safetensors and
tokenizer.json. Every tensor is accounted for: a missing, an unknown or a misshapen one is an
error that names it, before anything is computed.

Files are written beside their target and then renamed over it, so a reader (or a crash) sees the
old file or the new one, never a part.

Read first: parameters.py. Proven by: tests/test_weights.py (cases H-01, H-15),
tests/test_weights_broken.py (H-34).
"""

import json
import os
import tempfile
from contextlib import suppress

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from .backend import to_host
from .config import ModelConfig, StreamConfig
from .draft_vocab import draft_index
from .model import Model
from .parameters import all_shapes
from .text import Tokenizer

FORMAT, DRAFT_IDS = "minispec-1", "draft.ids"


def write_atomically(path, data):
    """Write bytes, or an iterable of bytes, to `path`: temporary file in the same folder, flushed
    to disk, then renamed."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in [data] if isinstance(data, bytes) else data:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)                        # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):                 # Ctrl-C may come after the rename
            os.unlink(temporary)
        raise


def read_json(path):
    """A JSON object from a file. Raises ValueError naming the file if it is not one."""
    with open(path, encoding="utf-8") as file:
        try:
            value = json.load(file)
        except (ValueError, RecursionError) as error:     # ValueError: not JSON, or no UTF-8
            raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_json(path, value):
    """Write a JSON object for people to read, atomically."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def write_tensors(path, tensors, metadata=None):
    """Save {name: array} of either library as safetensors, atomically.

    NOTE: the safetensors writer dumps raw memory, so a transposed or strided array must be made
    contiguous first (to_host does), or it comes back scrambled without any error (case H-01).
    """
    write_atomically(path, save({n: to_host(a) for n, a in tensors.items()}, metadata or {}))


def read_tensors(path):
    """{name: array} of a safetensors file. Raises ValueError naming the file if it is broken."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        with open(path, "rb") as file:
            pointer = file.read(40).startswith(b"version https://git-lfs")
        why = "it is a git-lfs pointer, the weights were not downloaded" if pointer else error
        raise ValueError(f"{path}: not a readable safetensors file ({why})") from None


def check_shapes(path, tensors, shapes):
    """Raise one ValueError that names every missing, unknown or misshapen tensor."""
    missing = sorted(set(shapes) - set(tensors))
    unknown = sorted(set(tensors) - set(shapes))
    wrong = [f"{n} is {tensors[n].shape}, expected {shapes[n]}" for n in sorted(shapes)
             if n in tensors and tuple(tensors[n].shape) != tuple(shapes[n])]
    problems = [f"{label}: {', '.join(names)}" for label, names in
                (("missing", missing), ("unknown", unknown), ("wrong shape", wrong)) if names]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")


def save_model(folder, model, dtype="float32"):
    """Write a model folder. `dtype` is the one on disk; config.json is written last, so a folder
    without it is not a model yet."""
    tensors = {n: to_host(a).astype(dtype) for n, a in model.params.items()}
    if model.draft_ids is not None:
        tensors[DRAFT_IDS] = np.asarray(model.draft_ids, np.int32)        # (n,)
    write_tensors(os.path.join(folder, "model.safetensors"), tensors, {"format": FORMAT})
    if model.tokenizer is not None:
        model.tokenizer.save(os.path.join(folder, "tokenizer.json"))
    settings = {"format": FORMAT, "model": model.config.as_dict(),
                "streams": model.streams.as_dict() if model.streams else None}
    write_json(os.path.join(folder, "config.json"), settings)


def load_model(folder, xp=np, dtype="float32"):
    """Model from a folder, computed in `dtype` on array library `xp`.

    Raises FileNotFoundError or ValueError, naming the file, for whatever is missing or broken.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is not a folder; a model folder holds config.json, "
                                "model.safetensors and tokenizer.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} is missing")
    settings = read_json(path)
    if settings.get("format") != FORMAT:
        raise ValueError(f'{path}: "format" is {settings.get("format")!r}, expected {FORMAT!r}')
    for key in ("model", "streams"):
        if key not in settings:
            raise ValueError(f'{path}: "{key}" is missing')
    try:
        config, streams = ModelConfig.from_dict(settings["model"]), settings["streams"]
        streams = None if streams is None else StreamConfig.from_dict(streams)
        shapes = all_shapes(config, streams)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    path = os.path.join(folder, "model.safetensors")
    tensors = read_tensors(path)
    check_shapes(path, tensors, {**shapes, **draft_shape(streams, tensors)})
    draft_ids = tensors.pop(DRAFT_IDS, None)              # (n,)
    try:
        draft_index(draft_ids, streams, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    params = {n: xp.asarray(a.astype(dtype)) for n, a in tensors.items()}
    path = os.path.join(folder, "tokenizer.json")
    tokenizer = Tokenizer.load(path) if os.path.isfile(path) else None
    return Model(config, params, streams, tokenizer, draft_ids).pack()


def draft_shape(streams, tensors):
    """{name: shape} of the draft vocabulary's tensor, if there is one; its length is its own."""
    if streams is None or not streams.draft_vocab:
        return {}
    found = tensors.get(DRAFT_IDS, np.empty(0))           # (n,)
    return {DRAFT_IDS: found.shape}
