"""Claim: a safetensors file of any float type is read to the bit, and a broken one is one error.

The library is the judge: what it writes we read, what we write it reads. Faults of real downloads
(H-34) each raise one ValueError that names the file, at once and in little memory.
"""

import json
import time
import tracemalloc

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from minispec.tensorfile import TensorFile, to_bfloat16, write_tensor_file

RNG = np.random.default_rng(0)
ARRAYS = {"a": RNG.normal(size=(3, 5)), "one": RNG.normal(size=(1,)), "scalar": np.array(2.5),
          "none": np.zeros((0, 4)), "three": RNG.normal(size=(2, 3, 4))}


def raw_file(path, header, data=b"", length=None):
    """A file from its three parts; `header` is bytes, or an object that becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(kind, shape, begin, end):
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


# --- reading and writing ------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_the_library_writes_we_read_and_the_other_way_round(dtype, tmp_path):
    arrays = {n: np.asarray(a, dtype) for n, a in ARRAYS.items()}
    save_file(arrays, tmp_path / "theirs", {"format": "pt"})
    write_tensor_file(tmp_path / "ours", arrays, dtype)
    back = load_file(tmp_path / "ours")
    file = TensorFile(tmp_path / "theirs")
    assert file.entries.keys() == arrays.keys() == back.keys()
    for name, array in arrays.items():
        for got in (file.read(name, dtype), back[name]):
            assert got.dtype == dtype and got.shape == array.shape
            assert np.array_equal(got, array)
        assert np.array_equal(file.read(name), array.astype("float32"))   # float32 by default
        assert file.read(name).flags.writeable
    file.close()


def test_h01_any_memory_layout_comes_back(tmp_path):
    base = np.arange(6, dtype="float32").reshape(2, 3)
    tensors = {"t": base.T, "s": base[:, ::2], "r": base[::-1], "f": np.asfortranarray(base)}
    write_tensor_file(tmp_path / "x", tensors)
    file, theirs = TensorFile(tmp_path / "x"), load_file(tmp_path / "x")
    for name, array in tensors.items():
        assert np.array_equal(file.read(name), array) and np.array_equal(theirs[name], array)


def test_h33_bfloat16_is_exact(tmp_path):
    values = [1.0, -2.5, 3.140625, 65536.0]
    bits = (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    path = raw_file(tmp_path / "b", {"x": entry("BF16", [4], 0, 8), "s": entry("BF16", [], 8, 10),
                                     "none": entry("BF16", [0, 4], 10, 10)}, bits + bits[2:4])
    file = TensorFile(path)
    assert file.read("x").tolist() == values and file.read("x").dtype == np.float32
    assert file.read("s").shape == () and file.read("s") == -2.5
    assert file.read("none").shape == (0, 4)
    assert file.read("x", "float64").tolist() == values
    with pytest.raises((TypeError, AttributeError)):      # why there is a reader of our own
        safe_open(path, framework="np").get_tensor("x")


def test_bfloat16_is_rounded_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e38, 0.0,
                       -0.0, np.inf, -np.inf, np.nan, 3.4028235e38], "float32")
    back = (to_bfloat16(values).astype("<u4") << 16).view("<f4")
    expected = [1.0, 1.0, 1 + 4 * 2**-8, 1 + 2**-7, -1.0, 3.004e38, 0.0, 0.0, np.inf, -np.inf]
    assert np.allclose(back[:10], expected, rtol=1e-4) and np.isnan(back[10]) and back[11] == np.inf
    assert np.signbit(back[7]) and np.array_equal(back[:5], np.array(expected[:5], "float32"))


@pytest.mark.parametrize("kind, width", [("F8_E4M3", 1), ("I8", 1), ("U8", 1), ("I32", 4)])
def test_h33_packed_and_integer_weights_are_refused_by_name(kind, width, tmp_path):
    path = raw_file(tmp_path / "x", {"w": entry(kind, [4], 0, 4 * width)}, bytes(4 * width))
    with pytest.raises(ValueError, match=f"{path}: unsupported dtype {kind} of w"):
        TensorFile(path).read("w")


def test_a_written_file_is_aligned_and_an_unknown_dtype_refused(tmp_path):
    write_tensor_file(tmp_path / "x", {"a": np.ones(3)}, "bfloat16")
    length = int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    assert length % 8 == 0
    with pytest.raises(ValueError, match="dtype is 'int8', expected one of float64"):
        write_tensor_file(tmp_path / "y", {"a": np.ones(3)}, "int8")
    assert not (tmp_path / "y").exists()


# --- H-34 ---------------------------------------------------------------------------------------

GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1044992\n"
FAULTS = {
    "empty": lambda p: p.write_bytes(b""),
    "five bytes": lambda p: p.write_bytes(b"\x01\x00\x00\x00\x00"),
    "pointer": lambda p: p.write_bytes(POINTER),
    "cut by four bytes": lambda p: raw_file(p, GOOD, bytes(12)),
    "two trailing bytes": lambda p: raw_file(p, GOOD, bytes(18)),
    "header of 2^63": lambda p: raw_file(p, GOOD, bytes(16), 2**63),
    "header of 2^64 - 1": lambda p: raw_file(p, GOOD, bytes(16), 2**64 - 1),
    "header one too long": lambda p: raw_file(p, GOOD, b"", len(json.dumps(GOOD)) + 1),
    "header of nothing": lambda p: raw_file(p, b"", bytes(16)),
    "no JSON": lambda p: raw_file(p, b"{'a': 1}", bytes(16)),
    "no UTF-8": lambda p: raw_file(p, b'{"\xff": 1}'),
    "a list": lambda p: raw_file(p, [GOOD], bytes(16)),
    "deeply nested": lambda p: raw_file(p, b"[" * 50_000 + b"]" * 50_000),
    "entry is a number": lambda p: raw_file(p, {"a": 3}, bytes(16)),
    "overlap": lambda p: raw_file(p, {**GOOD, "b": entry("F32", [2], 4, 12)}, bytes(12)),
    "the same bytes": lambda p: raw_file(p, {**GOOD, "b": entry("F32", [2], 0, 8)}, bytes(8)),
    "gap": lambda p: raw_file(p, {**GOOD, "b": entry("F32", [2], 12, 20)}, bytes(20)),
    "shape does not fit": lambda p: raw_file(p, {"a": entry("F32", [3], 0, 8)}, bytes(8)),
    "negative shape": lambda p: raw_file(p, {"a": entry("F32", [-2, -1], 0, 8)}, bytes(8)),
    "huge shape": lambda p: raw_file(p, {"a": entry("F32", [2**62, 4], 0, 8)}, bytes(8)),
    "shape of text": lambda p: raw_file(p, {"a": entry("F32", ["2"], 0, 8)}, bytes(8)),
    "shape of truth": lambda p: raw_file(p, {"a": entry("F32", [True, 2], 0, 8)}, bytes(8)),
    "negative offset": lambda p: raw_file(p, {"a": entry("F32", [2], -8, 0)}, bytes(8)),
    "offsets reversed": lambda p: raw_file(p, {"a": entry("F32", [2], 8, 0)}, bytes(8)),
    "three offsets": lambda p: raw_file(p, {"a": {**GOOD["a"], "data_offsets": [0, 4, 8]}},
                                        bytes(8)),
    "fractional offset": lambda p: raw_file(p, {"a": entry("F32", [2], 0, 8.0)}, bytes(8)),
    "no dtype": lambda p: raw_file(p, {"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": lambda p: raw_file(p, {"a": entry("F4", [2], 0, 8)}, bytes(8)),
    "dtype is a list": lambda p: raw_file(p, {"a": entry(["F32"], [2], 0, 8)}, bytes(8)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_h34_a_broken_file_is_one_error_at_once_in_little_memory(fault, tmp_path):
    path = tmp_path / "model.safetensors"
    FAULTS[fault](path)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(ValueError) as caught:
        TensorFile(path)
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert ("git-lfs pointer" in str(caught.value)) == (fault == "pointer")
    assert seconds < 0.5 and peak < 20e6


def test_h34_a_missing_file_and_a_folder(tmp_path):
    for path in (tmp_path / "nosuch", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            TensorFile(path)


def test_h34_any_cut_and_any_flipped_byte_is_an_error_or_other_numbers(tmp_path):
    """Never another exception, never a shape that the file does not say."""
    write_tensor_file(tmp_path / "good", {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})
    good = (tmp_path / "good").read_bytes()
    rng, path = np.random.default_rng(0), tmp_path / "bad"
    cuts = [good[:n] for n in range(len(good))]
    flips = [bytes([*good[:at], good[at] ^ int(rng.integers(1, 256)), *good[at + 1:]])
             for at in rng.integers(0, len(good), 300)]
    for number, data in enumerate(cuts + flips):
        path.write_bytes(data)
        try:
            file = TensorFile(path)
            read = [file.read(n) for n in file.entries]
            assert number >= len(cuts) and all(isinstance(a, np.ndarray) for a in read)
        except ValueError as error:
            assert str(path) in str(error)
