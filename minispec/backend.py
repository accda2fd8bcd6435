"""The array library: which one owns an array, and the few places where NumPy and CuPy differ.

All formulas of minispec are written once, for `xp = get_xp(x)`, and run on NumPy (host) or CuPy
(device). This is the only file that imports cupy. The rule that keeps it honest: an array never
changes sides by itself, only through `to_host` and `as_xp`/`to_device`. Random numbers are always
drawn on the host (the generators of the two libraries give different numbers) and then shipped.

Read first: nothing. Proven by: tests/test_backend.py (with tests/strict_cupy.py standing in for a
GPU), tests/test_on_strict_cupy.py (the whole model). Library differences: the page "Differences
between CuPy and NumPy" of CuPy 14.
"""

import math
import platform

import numpy
from numpy.polynomial import chebyshev

try:
    import cupy
except ImportError:  # cupy is the optional `gpu` extra
    cupy = None

DEVICES = ("cpu", "gpu", "auto")
NARROW = 256  # width of a row from which a Python loop over rows is the fastest scatter_add


def get_xp(*arrays):
    """Module (numpy or cupy) that owns all the given arrays.

    Raises: TypeError if host and device arrays are mixed, or if no array is given.
    """
    on_gpu = [is_device(a) for a in arrays]
    if not on_gpu:
        raise TypeError("get_xp needs at least one array")
    if any(on_gpu) != all(on_gpu):
        kinds = [f"{type(a).__module__}.{type(a).__name__}" for a in arrays]
        raise TypeError(f"mixed host and device arrays: {', '.join(kinds)}")
    return cupy if on_gpu[0] else numpy


def is_device(x):
    """True if x is an array in device memory."""
    return cupy is not None and isinstance(x, cupy.ndarray)


def to_host(x):
    """C-contiguous NumPy array of x. Waits for the device and copies; a contiguous host array is
    returned as it is. Use it once per decode step, not once per node: every call stalls the GPU.
    """
    if is_device(x):
        return cupy.asnumpy(x, order="C")
    return numpy.asarray(x, order="C")  # not ascontiguousarray: that turns () into (1,)


def as_xp(x, xp, dtype=None):
    """Array of library xp holding x (host array, number, list, or an array xp already owns).

    No copy if x is one already and has the dtype. Raises: TypeError for a device array with
    xp = numpy (say `to_host`).
    """
    if xp is numpy and is_device(x):
        raise TypeError("as_xp does not move arrays to the host; call to_host")
    return xp.asarray(x, dtype=dtype)


def to_device(x, like, dtype=None):
    """Host array or list x as an array of the library that owns `like` (its dtype is not taken)."""
    return as_xp(x, get_xp(like), dtype)


def scatter_add(target, ids, values):
    """target[ids] += values, in place, counting repeated ids every time; returns target.

    target (V, ...), ids (...) integers, values ids.shape + target.shape[1:], all in one library
    and target and values of one dtype (float16, float32 or float64). Same result as the matmul
    `target += one_hot(ids).T @ values`, without its (n, V) matrix. On CuPy the order of the sums,
    and so the last bit, may change from run to run.

    NOTE: check the range of ids on the host. NumPy raises IndexError, CuPy wraps them silently.
    Raises: ValueError if shapes do not fit, TypeError if libraries or dtypes do not.
    """
    xp = get_xp(target, ids, values)
    expected = tuple(ids.shape) + tuple(target.shape[1:])
    if tuple(values.shape) != expected:
        raise ValueError(f"values have shape {values.shape}, ids and target need {expected}")
    if values.dtype != target.dtype or ids.dtype.kind not in "iu":
        raise TypeError(f"target is {target.dtype}, values are {values.dtype}, ids {ids.dtype}; "
                        "expected one dtype for the first two and integer ids")
    if xp is numpy and target.ndim > 1:
        _add_rows(target, ids.reshape(-1), values.reshape(ids.size, *target.shape[1:]))
    else:
        xp.add.at(target, ids, values)
    return target


def _add_rows(target, ids, values):
    """numpy.add.at for whole rows, in the same order and to the same bit, but faster.

    4,000 rows of 192: add.at 5.3 ms, a loop over rows 2.2 ms, add.at on single cells 1.6 ms.
    Of 768: 20 ms, 2.4 ms, 8.7 ms. (NumPy 2.4; only the flat form of add.at has a fast path.)
    """
    width = values[:1].size
    if width < NARROW and target.flags.c_contiguous:
        cells = ids.astype(numpy.intp)[:, None] * width + numpy.arange(width)  # (n, width)
        numpy.add.at(target.reshape(-1), cells.reshape(-1), values.reshape(-1))
    else:
        for row, value in zip(ids.tolist(), values):
            target[row] += value


ERF_END = 6.0             # 1 - erf(6) = 2e-17: beyond it erf is 1 in float64


def _erf_fit(degree=18):
    """Coefficients of erfc(a) e^(a^2), 0 <= a <= 6, in u: t = 2 / (2 + a) moved to [-1, 1].

    The product is smooth where erf itself bends, so a polynomial of low degree holds it to 1e-14.
    """
    low = 2.0 / (2.0 + ERF_END)

    def scaled(u):
        a = [2.0 / ((1 + low) / 2 + (1 - low) / 2 * v) - 2.0 for v in u]
        return numpy.array([math.erfc(v) * math.exp(v * v) for v in a])

    fit = chebyshev.cheb2poly(chebyshev.chebinterpolate(scaled, degree))
    return [float(c) for c in fit[::-1]], (1 + low) / 2, 2 / (1 - low)


ERF_FIT, ERF_MIDDLE, ERF_STRETCH = _erf_fit()


def erf(x):
    """The error function, to 1e-14 in float64 and 3e-7 in float32. NumPy has none; CuPy's is used.

    x (...) -> (...), in the dtype of x.
    """
    if is_device(x):
        from cupyx.scipy.special import erf as device_erf
        return device_erf(x)
    a = numpy.minimum(abs(x), ERF_END)                    # (...)
    u = (2.0 / (2.0 + a) - ERF_MIDDLE) * ERF_STRETCH      # (...)
    y = u * ERF_FIT[0]                                    # (...)
    for c in ERF_FIT[1:-1]:                               # Horner's rule
        y += c
        y *= u
    y += ERF_FIT[-1]
    y *= numpy.exp(-a * a)
    return numpy.copysign(1.0 - y, x)                     # (...)


PACK_WIDTH = 64


def pack_columns(w):
    """w (I, O) -> its columns in blocks, (O / 64, I, 64), the last block filled with zeros.

    For 2 to 16 rows OpenBLAS first copies a large matrix into a layout of its own, which costs
    more than the product. Blocks of 64 columns are small enough for its kernel that does not
    (measured, I = 192, O = 1,024: 9 rows 67 us whole, 32 us in blocks; 1 row 10 us either way).
    """
    blocks = -(-w.shape[1] // PACK_WIDTH)
    padded = numpy.zeros((w.shape[0], blocks * PACK_WIDTH), dtype=w.dtype)    # (I, blocks * 64)
    padded[:, :w.shape[1]] = w
    split = padded.reshape(w.shape[0], blocks, PACK_WIDTH).transpose(1, 0, 2)
    return numpy.ascontiguousarray(split)                 # (blocks, I, 64)


def packed_matmul(x, blocks, columns):
    """x (rows, I) times a matrix of `columns` columns in blocks -> (rows, columns)."""
    y = numpy.matmul(x, blocks)                           # (blocks, rows, 64)
    return y.transpose(1, 0, 2).reshape(len(x), -1)[:, :columns]


def gpu_problem():
    """Why no GPU can be used, as one sentence; an empty string if one can."""
    if cupy is None:
        return "cupy is not installed (pip install 'minispec[gpu]')"
    try:  # importable says nothing about the driver or the device
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError, or what a broken driver raises
        return f"cupy {cupy.__version__} finds no usable device ({error})"
    return "" if count > 0 else f"cupy {cupy.__version__} finds 0 devices"


def has_gpu():
    """True if CuPy is installed and sees a device."""
    return not gpu_problem()


def pick(device="auto"):
    """Module for `device`: "cpu" -> numpy, "gpu" -> cupy, "auto" -> cupy if a GPU can be used.

    Raises: ValueError for another name, RuntimeError if "gpu" is asked for and cannot be used.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}, expected one of {', '.join(DEVICES)}")
    problem = "" if device == "cpu" else gpu_problem()
    if device == "gpu" and problem:
        raise RuntimeError(f"device 'gpu' cannot be used: {problem}; use 'cpu' or 'auto'")
    return numpy if device == "cpu" or problem else cupy


def synchronize(where):
    """Wait until the device is idle, if `where` (a module or an array) is CuPy's.

    Needed around every clock reading: CuPy returns before the kernel has run.
    """
    if cupy is not None and (where is cupy or is_device(where)):
        cupy.cuda.Device().synchronize()


def device_name(xp=numpy):
    """Name of the processor that library xp runs on, for benchmark reports."""
    if cupy is not None and xp is cupy:
        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
        return name.decode() if isinstance(name, bytes) else name
    return _cpu_name() or platform.processor() or platform.machine()


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.split(":", 1)[1] for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        return ""
    return lines[0].strip() if lines else ""
