"""A broken tensor file is one ValueError that names the file, at once, in little memory (H-34)."""

import json
import resource
import struct
import time

import numpy as np
import pytest
from tiny_models import tiny_model

from minispec.weights import load_model, read_tensors, save_model, write_tensors

POINTER = (b"version https://git-lfs.github.com/spec/v1\n"
           b"oid sha256:" + b"4d7a" * 16 + b"\nsize 12345\n")


def tensor_file(entries, data=b"\0" * 16):
    """The bytes of a safetensors file with this header (an object, or text)."""
    header = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


WHOLE = tensor_file({"a": entry([2], 0, 8), "b": entry([2], 8, 16)})
BROKEN = {
    "empty": b"", "5 bytes": b"12345", "8 bytes": b"\0" * 8, "pointer": POINTER,
    "html": b"<html><body>404 not found</body></html>",
    "cut by 4": WHOLE[:-4], "cut in the header": WHOLE[:40], "2 bytes more": WHOLE + b"xx",
    "header of 2^63": struct.pack("<Q", 2**63) + WHOLE[8:],
    "header of 2^64-1": struct.pack("<Q", 2**64 - 1) + WHOLE[8:],
    "header of 10^9": struct.pack("<Q", 10**9) + WHOLE[8:],
    "header one short": struct.pack("<Q", struct.unpack("<Q", WHOLE[:8])[0] - 1) + WHOLE[8:],
    "overlap": tensor_file({"a": entry([3], 0, 12), "b": entry([2], 8, 16)}),
    "same place": tensor_file({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}),
    "hole": tensor_file({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}),
    "shape and bytes differ": tensor_file({"a": entry([5], 0, 16)}),
    "negative shape": tensor_file({"a": entry([-4], 0, 16)}),
    "huge shape": tensor_file({"a": entry([2**40, 2**40], 0, 16)}),
    "shape that overflows": tensor_file({"a": entry([2**62, 4, 4], 0, 16)}),
    "fraction": tensor_file({"a": entry([4.5], 0, 16)}),
    "offsets backwards": tensor_file({"a": entry([4], 16, 0)}),
    "offsets past the end": tensor_file({"a": entry([2**30], 0, 2**32)}),
    "unknown dtype": tensor_file({"a": entry([4], 0, 16, "F31")}),
    "no shape": tensor_file({"a": {"dtype": "F32", "data_offsets": [0, 16]}}),
    "list": tensor_file([1, 2, 3]), "number": tensor_file("17"), "null": tensor_file("null"),
    "text": tensor_file("not json at all"), "deep": tensor_file("[" * 5000),
    "entry is null": tensor_file({"a": None}), "no UTF-8": tensor_file("{}")[:8] + b"\xff\xfe",
    "nothing but data": np.random.default_rng(0).bytes(4000)}


def memory():
    """Largest memory that this process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tensor_file_is_one_clean_error(tmp_path, case):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[case])
    start, before = time.perf_counter(), memory()
    with pytest.raises(ValueError) as caught:
        read_tensors(path)
    assert time.perf_counter() - start < 1 and memory() - before < 30
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 500
    assert ("git-lfs pointer" in message) == (case == "pointer")


def test_a_whole_file_is_fine(tmp_path):
    """So the cases above fail for what was done to them, not for what they have in common."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    assert {n: a.tolist() for n, a in read_tensors(path).items()} == {"a": [0, 0], "b": [0, 0]}
    with pytest.raises(FileNotFoundError, match="nosuch.safetensors is missing"):
        read_tensors(tmp_path / "nosuch.safetensors")
    with pytest.raises(FileNotFoundError, match="is missing"):
        read_tensors(tmp_path)                            # a folder


@pytest.mark.parametrize("case", ["empty", "pointer", "cut by 4", "header of 2^63"])
def test_loading_a_model_says_the_same(tmp_path, case):
    save_model(tmp_path, tiny_model(dtype="float32"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] if case == "cut by 4" else BROKEN[case])
    with pytest.raises(ValueError, match="model.safetensors: not a readable safetensors file"):
        load_model(tmp_path)


def test_random_damage_is_a_value_error_or_harmless(tmp_path):
    """Single bytes of the header replaced: never another exception."""
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"a": np.arange(4.0), "b": np.arange(3)})
    good, rng = path.read_bytes(), np.random.default_rng(1)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    refused = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.integers(header)] = rng.integers(256)
        path.write_bytes(bad)
        try:
            assert all(isinstance(a, np.ndarray) for a in read_tensors(path).values())
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 100
