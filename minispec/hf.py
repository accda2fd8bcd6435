"""HF-style model folders in and out: config.json, model.safetensors or shards, tokenizer.json.

Reading goes from cheap to dear: settings, then the headers of the files, then, when every tensor
is accounted for, the weights, one tensor at a time from the mapped file. Writing gives the same
layout back, for any reader of such folders.

generation_config.json is read for its end ids only. Decoding is greedy unless the caller says
otherwise, whatever temperature the file carries (case H-13).

Read first: tensorfile.py, hf_config.py, hf_names.py. Read next: loading.py.
Proven by: tests/test_families.py, tests/test_hf.py (cases H-13, H-26, H-30).
"""

import os

import numpy as np
from tqdm import tqdm

from .backend import to_host
from .families import FAMILIES
from .hf_config import read_config, write_config
from .hf_names import full_name, join, match, sources, split
from .model import Model
from .parameters import base_shapes
from .tensorfile import FLOATS, TensorFile, write_tensor_file
from .text import Tokenizer
from .weights import read_json, write_json

INDEX = "model.safetensors.index.json"


class Shards:
    """The tensors of a folder: one file, or several named by an index, which then decides alone.

    entries {name: tensorfile.Entry}. Raises FileNotFoundError naming every missing file, ValueError
    for an index that its files do not fit.
    """

    def __init__(self, folder):
        index = os.path.join(folder, INDEX)
        self.home = {}                    # tensor -> file; empty without an index
        if os.path.isfile(index):
            self.home = self.read_index(index)
            paths = [os.path.join(folder, f) for f in dict.fromkeys(self.home.values())]
            missing = sorted(os.path.basename(p) for p in paths if not os.path.isfile(p))
            if missing:
                raise FileNotFoundError(f"{folder}: {', '.join(missing)} missing, named by "
                                        f"{INDEX}; the download may be incomplete")
        else:
            paths = [os.path.join(folder, "model.safetensors")]
        self.files = [TensorFile(path) for path in paths]
        self.owner = {name: file for file in self.files for name in file.entries}
        self.entries = {name: file.entries[name] for name, file in self.owner.items()}
        self.check_index(index)

    def read_index(self, path):
        """{tensor: file name} of an index."""
        home = read_json(path).get("weight_map")
        if not isinstance(home, dict) or not home or not all(
                isinstance(f, str) and f and os.path.basename(f) == f for f in home.values()):
            raise ValueError(f"{path}: weight_map is no object of tensor names and file names")
        return home

    def check_index(self, path):
        """Every tensor lies in the file that the index says, and the index knows every tensor."""
        held = {(name, os.path.basename(f.path)) for f in self.files for name in f.entries}
        odd = sorted(f"{name} ({file})" for name, file in held ^ set(self.home.items()))
        if self.home and odd:
            raise ValueError(f"{path}: index and files disagree on {', '.join(odd)}")

    def read(self, name, dtype):
        return self.owner[name].read(name, dtype)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for file in self.files:
            file.close()


def load_hf(folder, xp=np, dtype="float32"):
    """Model from an HF-style folder, computed in `dtype` on array library `xp`.

    Raises FileNotFoundError or ValueError, naming file and key or tensor, for a family or feature
    that is not supported and for whatever is missing or broken.
    """
    path = os.path.join(folder, "config.json")
    generation = os.path.join(folder, "generation_config.json")
    generation = read_json(generation) if os.path.isfile(generation) else None
    config, family = read_config(path, read_json(path), generation)
    with Shards(folder) as shards:
        plan = match(folder, family, config, shards.entries)
        check_dtypes(folder, shards, plan.values())
        params = read_params(family, config, shards, plan, xp, dtype)
        if () in plan:                                    # a tied head, stored all the same
            same = np.array_equal(shards.read(plan[()], dtype), to_host(params["embed.tokens"]))
            if not same:
                raise ValueError(f"{folder}: {plan[()]} differs from the embedding, but "
                                 "config.json says that they are tied")
    path = os.path.join(folder, "tokenizer.json")
    tokenizer = Tokenizer.load(path) if os.path.isfile(path) else None
    if tokenizer is not None:                             # its template decides, not config.json
        bos = -1 if tokenizer.bos_id is None else tokenizer.bos_id
        config = config.replace(bos_id=bos if bos < config.vocab_size else -1)
    return Model(config, params, None, tokenizer).pack()


def check_dtypes(folder, shards, names):
    """Raise one ValueError naming every tensor that is stored in a type we cannot read."""
    odd = [f"{n} ({shards.entries[n].dtype})" for n in names
           if shards.entries[n].dtype not in FLOATS]
    if odd:
        raise ValueError(f"{folder}: unsupported dtype of {', '.join(odd)}, expected "
                         f"{', '.join(FLOATS)}")


def read_params(family, config, shards, plan, xp, dtype):
    """{our name: array}, with a progress bar in bytes (in a terminal)."""
    params, sizes = {}, {n: e.end - e.begin for n, e in shards.entries.items()}
    with tqdm(total=sum(sizes[n] for n in plan.values()), desc="loading", unit="B",
              unit_scale=True, leave=False, disable=None) as bar:
        for ours, name in plan.items():
            parts = split(family, config, ours, shards.read(name, dtype)) if ours else []
            params.update((n, xp.asarray(part)) for n, part in zip(ours, parts))
            bar.update(sizes[name])
    return {n: params[n] for n in base_shapes(config)}    # in our order, not the file's


def save_hf(folder, model, family, dtype="float32"):
    """Write a plain model as an HF-style folder of `family` ("llama", "gpt2", ...).

    dtype on disk: float32, float16 or bfloat16. config.json is written last, so a folder without
    it is not a model yet. Raises ValueError if the family cannot express the model, or if the model
    has streams, for which such folders have no place (weights.save_model has).
    """
    if model.streams is not None:
        raise ValueError("the model has streams, an HF-style folder has no place for them")
    settings, table = write_config(family, model.config, dtype), FAMILIES[family]
    tensors = {}
    for name, source in sources(table, model.config).items():
        arrays = [to_host(model.params[n]) for n in source.ours]
        tensors[full_name(table, name)] = join(table, model.config, source.ours, arrays)
    write_tensor_file(os.path.join(folder, "model.safetensors"), tensors, dtype)
    if model.tokenizer is not None:
        model.tokenizer.save(os.path.join(folder, "tokenizer.json"))
    ids = {k: settings[k] for k in ("bos_token_id", "eos_token_id") if settings[k] is not None}
    for name, value in (("generation_config.json", ids), ("config.json", settings)):
        write_json(os.path.join(folder, name), value)
