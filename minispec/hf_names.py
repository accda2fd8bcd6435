"""Tensors of an HF-style file <-> our parameters: names, orientation, fused projections.

Torch's Linear stores a matrix (out, in), GPT-2's Conv1D (in, out); ours are (in, out). Fused q, k
and v are one tensor: one after the other (GPT-2), or head by head (GPT-NeoX, case H-16):

    rows of the file   [q of head 0 | k of head 0 | v of head 0 | q of head 1 | ...]

Every tensor is accounted for before one is read.

Read first: families.py, parameters.py.
Proven by: tests/test_families.py, tests/test_hf_names.py (cases H-16, H-26, H-40, H-41).
"""

import re
from collections import namedtuple

import numpy as np

from .parameters import base_shapes

SUFFIXES = {"w": "weight", "b": "bias", "gain": "weight", "bias": "bias"}

# a tensor of the file: our parameters in it (several if fused) and its shape there
Source = namedtuple("Source", "ours shape")


def their_name(family, ours):
    """(name in the file without prefix) of one of our parameters."""
    stem, _, kind = ours.rpartition(".")
    if kind not in SUFFIXES:                              # embed.tokens, embed.positions
        stem, kind = ours, "w"
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
    number, stem = (block[1], f"blocks.{{}}.{block[2]}") if block else ("", stem)
    if stem not in family.names:                          # q, k and v in one tensor
        stem = re.sub(r"\.(q|k|v)$", ".qkv", stem)
    return f"{family.names[stem].format(number)}.{SUFFIXES[kind]}"


def transposed(family, ours):
    """Is this parameter stored (out, in)? The head is a Linear in every family."""
    return ours.endswith(".w") and (family.out_in or ours == "head.w")


def sources(family, config):
    """{name in the file without prefix: Source} of everything that a model needs."""
    shapes, grouped = base_shapes(config), {}
    for ours in shapes:
        grouped.setdefault(their_name(family, ours), []).append(ours)
    found = {}
    for name, ours in grouped.items():
        *lead, _ = shapes[ours[0]]
        shape = (*lead, sum(shapes[n][-1] for n in ours))
        found[name] = Source(ours, shape[::-1] if transposed(family, ours[0]) else shape)
    return found


def strip(family, name):
    """A name of the file without its prefix, if it has one."""
    return next(name[len(p):] for p in (*family.prefixes, "") if name.startswith(p))


def head_names(family):
    """What the output head is called; it never has a prefix."""
    return tuple(f"{family.names['head']}.{kind}" for kind in ("weight", "bias"))


def full_name(family, stripped, prefix=None):
    """The name that is written: with the family's first prefix, or the given one."""
    prefix = family.prefixes[0] if prefix is None else prefix
    return stripped if stripped in head_names(family) else prefix + stripped


def match(path, family, config, entries):
    """{our names (a tuple): name in the file} for the tensors `entries` {name: has .shape}.

    Buffers are passed over. A tied head that is stored all the same is under (). Raises one
    ValueError that names every missing, unknown, misshapen or doubled tensor.
    """
    wanted, problems, found = sources(family, config), [], {}
    lists = {"missing": [], "unknown": [], "wrong shape": [], "twice": []}
    tied_head = head_names(family)[0] if config.tied else None
    head_shape = (config.vocab_size, config.embed_width or config.width)
    for name, entry in entries.items():
        short = strip(family, name)
        if any(re.fullmatch(pattern, short) for pattern in family.buffers):
            continue
        shape = head_shape if short == tied_head else getattr(wanted.get(short), "shape", None)
        if shape is None:
            lists["unknown"].append(name)
        elif tuple(entry.shape) != shape:
            lists["wrong shape"].append(f"{name} is {tuple(entry.shape)}, expected {shape}")
        if short in found:
            lists["twice"].append(f"{found[short]} and {name}")
        found[short] = name
    style = next((p for p in family.prefixes if any(n.startswith(p) for n in entries)), "")
    lists["missing"] = [full_name(family, n, style) for n in wanted if n not in found]
    problems = [f"{label}: {', '.join(sorted(names))}" for label, names in lists.items() if names]
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    plan = {tuple(source.ours): found[name] for name, source in wanted.items()}
    return {**plan, (): found[tied_head]} if tied_head in found else plan


def split(family, config, ours, array):
    """One tensor of the file -> our parameters in it, contiguous."""
    array = array.T if transposed(family, ours[0]) else array     # (..., out)
    if len(ours) == 1:
        return [np.ascontiguousarray(array)]
    if family.per_head:
        array = array.reshape(*array.shape[:-1], config.heads, 3, config.head_dim)
        array = np.moveaxis(array, -2, 0)                 # (3, ..., H, D)
        parts = [part.reshape(*part.shape[:-2], -1) for part in array]
    else:
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = np.split(array, [q, q + kv], axis=-1)     # (..., out of each)
    return [np.ascontiguousarray(part) for part in parts]


def join(family, config, ours, arrays):
    """The inverse of `split`: our parameters -> the tensor of the file (maybe a view)."""
    if len(ours) == 1:
        array = arrays[0]
    elif family.per_head:
        shaped = [a.reshape(*a.shape[:-1], config.heads, config.head_dim) for a in arrays]
        array = np.stack(shaped, axis=-2)                 # (..., H, 3, D)
        array = array.reshape(*array.shape[:-3], -1)      # (..., out)
    else:
        array = np.concatenate(arrays, axis=-1)           # (..., out)
    return array.T if transposed(family, ours[0]) else array
