"""Folders that the tests of model loading share: the golden checkpoints, and changed copies.

tests/golden/NAME holds what transformers saved and computed (make_golden.py). `changed` copies one
and changes its JSON files or tensors. Nothing here is tested by itself.
"""

import json
import pathlib
import shutil

import numpy as np

from minispec.tensorfile import TensorFile, write_tensor_file
from minispec.weights import read_json

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())
START, NEW = 6, 20                      # greedy ids follow the first START ids


def expected(name):
    """(ids (24,), logits (24, V), greedy (20,)) that transformers computed."""
    stored = np.load(GOLDEN / name / "expected.npz")
    return stored["ids"], stored["logits"], stored["greedy"].tolist()


def family_of(name):
    return read_json(GOLDEN / name / "config.json")["model_type"]


def tensors_of(folder, dtype="float32"):
    """{name: array} of a folder's model.safetensors."""
    file = TensorFile(pathlib.Path(folder) / "model.safetensors")
    return {n: file.read(n, dtype) for n in file.entries}


def changed(folder, name, tensors=None, generation=None, drop=(), **settings):
    """A copy of a golden folder in `folder`.

    settings: keys of config.json to set; drop: keys to remove. generation: the whole
    generation_config.json (False: none). tensors: {name: array} instead of the stored ones, or a
    function that makes them of these.
    """
    folder = pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOLDEN / name, folder)
    config = {**read_json(folder / "config.json"), **settings}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items()
                                                    if k not in drop}))
    if generation is False:
        (folder / "generation_config.json").unlink()
    elif generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tensors is not None:
        tensors = tensors(tensors_of(folder)) if callable(tensors) else tensors
        write_tensor_file(folder / "model.safetensors", tensors)
    return folder
