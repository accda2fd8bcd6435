"""The safetensors format, read and written in the open.

    8 bytes     length n of the header, little-endian
    n bytes     JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
    the rest    the tensors' bytes, without gaps; offsets count from here

Why not the library's reader: its NumPy side does not know BF16 (case H-33), in which most open
models are stored. BF16 is the upper half of a float32, so two lines read it. The file is mapped
into memory and a tensor's pages are given back once it is converted: the peak is one tensor more
than the model. Nothing in a header is trusted: every length is checked against the file.

Read first: weights.py. Proven by: tests/test_tensorfile.py (cases H-01, H-33, H-34).
"""

import json
import math
import mmap
import os
from collections import namedtuple

import numpy as np

from .backend import to_host
from .weights import write_atomically

WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2,
          "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # bytes
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}      # what weights may be
NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Entry = namedtuple("Entry", "dtype shape begin end")      # begin, end: bytes of the file


class TensorFile:
    """A safetensors file, mapped. `entries` {name: Entry} is known at once, `read` converts one.

    Raises FileNotFoundError, or one ValueError naming the file for whatever is wrong with it.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing")
        with open(path, "rb") as file:
            size, start = os.path.getsize(path), file.read(40)
            self.check(not start.startswith(b"version https://git-lfs"),
                       "it is a git-lfs pointer, the weights were not downloaded")
            self.check(size >= 8, f"{size} bytes are too few for a header")
            length = int.from_bytes(start[:8], "little")
            self.check(length <= size - 8, f"its header claims {length} bytes, the whole file has "
                                           f"{size}; the download may be incomplete")
            file.seek(8)
            self.entries = self.parse(file.read(length), 8 + length, size)
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def check(self, condition, why):
        if not condition:
            raise ValueError(f"{self.path}: not a readable safetensors file ({why})")

    def parse(self, header, start, size):
        """{name: Entry} of header bytes; the tensors must fill the file from `start` to `size`."""
        try:
            header = json.loads(header)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}: not a readable safetensors file (its header is not "
                             f"JSON: {error})") from None
        self.check(isinstance(header, dict), "its header is no JSON object")
        header.pop("__metadata__", None)
        entries = {name: self.entry(name, value, start) for name, value in header.items()}
        end = start
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            self.check(entry.begin == end, f"the bytes of {name} overlap others or leave a gap")
            end = entry.end
        self.check(end == size, f"its tensors end at byte {end}, the file has {size}; the download "
                                "may be incomplete")
        return entries

    def entry(self, name, value, start):
        """One entry of the header, checked."""
        def whole(numbers):
            return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)

        self.check(isinstance(value, dict) and whole(value.get("shape"))
                   and whole(value.get("data_offsets")) and len(value["data_offsets"]) == 2,
                   f"the entry of {name} is malformed")
        kind, shape, (begin, end) = value.get("dtype"), value["shape"], value["data_offsets"]
        self.check(isinstance(kind, str) and kind in WIDTHS, f"unsupported dtype {kind} of {name}")
        self.check(math.prod(shape) * WIDTHS[kind] == end - begin,
                   f"{name} has shape {shape} of {kind}, but {end - begin} bytes")
        return Entry(kind, tuple(shape), start + begin, start + end)

    def read(self, name, dtype="float32"):
        """A new array of `dtype` on the host. Raises ValueError for a tensor of another kind than
        F64, F32, F16 and BF16."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS:
            raise ValueError(f"{self.path}: unsupported dtype {entry.dtype} of {name}, expected "
                             f"one of {', '.join(FLOATS)}")
        if entry.begin == entry.end:
            return np.empty(entry.shape, dtype)           # shape
        raw = np.frombuffer(self.map, FLOATS[entry.dtype], math.prod(entry.shape), entry.begin)
        if entry.dtype == "BF16":
            wide = raw.astype("<u4")                      # (cells,)
            wide <<= 16
            array = wide.view("<f4").astype(dtype, copy=False)    # (cells,)
        else:
            array = raw.astype(dtype)                     # (cells,)
        if hasattr(mmap, "MADV_DONTNEED"):                # drop the pages just read
            self.map.madvise(mmap.MADV_DONTNEED)
        return array.reshape(entry.shape)                 # shape

    def close(self):
        """Forget the mapping; what was read stays."""
        self.map.close()


def to_bfloat16(array):
    """float32 -> its upper 16 bits as uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")         # shape
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16          # shape
    return np.where(np.isnan(array), 0x7FC0, rounded).astype("<u2")       # shape


def write_tensor_file(path, tensors, dtype="float32"):
    """Write {name: array of either library} as safetensors in `dtype`, one by one, atomically.

    NOTE: `tobytes` gives C order whatever the layout: the raw memory of a transposed or strided
    array would come back scrambled without any error (case H-01).
    """
    if dtype not in NAMES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(NAMES)}")
    kind, header, end = NAMES[dtype], {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        begin, end = end, end + math.prod(array.shape) * WIDTHS[kind]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                       # aligned tensors

    def chunks():
        yield len(text).to_bytes(8, "little") + text
        for array in tensors.values():
            array = to_host(array)                        # shape
            array = to_bfloat16(array) if kind == "BF16" else array.astype(FLOATS[kind])  # shape
            yield array.tobytes()

    write_atomically(path, chunks())
