"""A strict stand-in for CuPy 14 that needs no GPU: every array is a NumPy array in a closed box.

What the box refuses is what a GPU refuses: NumPy functions on device arrays, host arrays mixed
into device arithmetic, names and parameters that CuPy does not have (frozen from the real package
in cupy14_names.txt). What a GPU does silently and differently is made visible: index arrays wrap,
repeated ids in an assignment raise, fresh memory is NaN, and every hidden wait for the device is
counted in `transfers`. The rules follow the sources of CuPy 14.2. Where CuPy would only be slow
(numpy.exp of a device array, an axis given as a device number) or would quietly work on the host
(cupy.sum of a NumPy array), this is stricter and raises.

This file is the module; the array is in strict_cupy_array.py, the tables in strict_cupy_rules.py.
Use: `cp = strict_cupy.install(monkeypatch)`, then make arrays with `cp.asarray`.
Read first: minispec/backend.py. Proven by: test_strict_cupy.py.
"""

import functools
import types

import numpy as np

from strict_cupy_array import (box, call, compute, empty, from_host, host_index, ndarray, run,
                               stable, unwrap)
from strict_cupy_rules import AT_DTYPES, NOT_MODELLED, UFUNC_METHODS, frozen_names, transfers


class Ufunc:
    """cupy.ufunc: no `where=`, no lists, and `at`/`reduce`/... only where CuPy has them."""

    def __init__(self, name):
        self.__name__, self.numpy = name, getattr(np, name)

    def __call__(self, *args, out=None, dtype=None, casting=None, **wrong):
        if wrong:
            raise TypeError(f"Wrong arguments {wrong}")
        given = {"out": out, "dtype": dtype, "casting": casting}
        given = {key: value for key, value in given.items() if value is not None}
        return compute(self.numpy, *args, **given)

    def at(self, a, indices, b=None):
        if a.dtype.name not in AT_DTYPES.get(self.__name__, "").split():
            raise TypeError(f"cupy.{self.__name__}.at does not support {a.dtype}")
        index, _, _ = host_index(a._host, indices)
        self.numpy.at(a._host, index, np.asarray(unwrap(b)).astype(a.dtype))

    def outer(self, a, b, **kwargs):
        return run(self.numpy.outer, (a, b), kwargs)

    def __getattr__(self, method):
        if self.__name__ not in UFUNC_METHODS.get(method, ()):
            raise NotImplementedError(f"cupy.{self.__name__}.{method} is not supported")
        return lambda array, axis=0, dtype=None, out=None, **keepdims: run(
            getattr(self.numpy, method), (array, axis, dtype, out), keepdims)


def as_device(a, dtype=None, order=None, *, copy=None, blocking=False):
    if isinstance(a, ndarray):
        return run(np.array, (a,), {"dtype": dtype, "order": order or "K", "copy": copy})
    return from_host(a, dtype, order)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if isinstance(obj, ndarray):
        return run(np.array, (obj,), dict(dtype=dtype, copy=copy, order=order, ndmin=ndmin))
    return from_host(obj, dtype, order, ndmin)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    if isinstance(a, ndarray):
        return a.get(order=order, out=out)
    return np.asarray(a, order=order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    like = np.empty_like(prototype._host, dtype, order, True, shape)
    return empty(like.shape, like.dtype, order if order in "CF" else "C")


def where(condition, x=None, y=None):
    if x is None and y is None:
        return condition.nonzero()
    return compute(np.where, condition, x, y)


def along_axis(a, indices, axis):
    """The index arrays CuPy builds for take_along_axis; they wrap like any others."""
    if indices.ndim != a.ndim:
        raise ValueError("`indices` and `a` must have the same number of dimensions")
    index = [box(ids) for ids in np.ix_(*map(np.arange, a.shape))]
    index[axis] = indices
    return tuple(index)


SPECIAL = {
    "ndarray": ndarray, "array": array, "asarray": as_device, "asanyarray": as_device,
    "ascontiguousarray": lambda a, dtype=None: as_device(a, dtype, "C"),
    "asnumpy": asnumpy, "empty": empty, "empty_like": empty_like, "where": where,
    "take": lambda a, indices, axis=None, out=None: a.take(indices, axis, out),
    "take_along_axis": lambda a, indices, axis: a[along_axis(a, indices, axis)],
    "put_along_axis": lambda arr, indices, values, axis: arr.__setitem__(
        along_axis(arr, indices, axis), values),
    "argsort": lambda a, axis=-1, kind=None: a.argsort(axis, kind),
    "sort": lambda a, axis=-1, kind=None: run(np.sort, (a, axis), {"kind": stable(kind)}),
    "is_available": lambda: True,
}


class Namespace(types.ModuleType):
    """A module that has exactly the frozen names, each made when it is first asked for."""

    def __init__(self, name, source):
        super().__init__(name)
        self.__dict__["_source"] = source

    def __getattr__(self, name):
        full_name = f"{self.__name__}.{name}"
        kind = frozen_names()[0].get(full_name)
        if full_name == "cupy.random":
            raise AttributeError("cupy.random: random numbers are drawn on the host (house rule)")
        if kind is None:
            raise AttributeError(f"module {self.__name__!r} of CuPy 14 has no attribute {name!r}")
        value = SPECIAL.get(name) or self._from_numpy(full_name, name, kind)
        self.__dict__[name] = value
        return value

    def _from_numpy(self, full_name, name, kind):
        theirs = getattr(self._source, name, NotImplemented)
        if name in NOT_MODELLED or theirs is NotImplemented or kind == "module":
            raise NotImplementedError(f"{full_name} exists in CuPy 14, but NumPy {np.__version__} "
                                      "lacks it or strict_cupy does not model it")
        if kind == "ufunc":
            return Ufunc(name)
        if kind.startswith("("):
            return functools.partial(call, full_name, theirs)
        if kind == "constant" or theirs in (np.dtype, np.finfo, np.iinfo) or (
                issubclass(theirs, (np.generic, Exception))):
            return theirs
        raise NotImplementedError(f"{full_name} exists in CuPy 14; strict_cupy does not model it")


def barrier():
    transfers.barriers += 1


def fake_cuda():
    """The corner of cupy.cuda that backend.py needs; a test may replace any part of it."""
    device = types.SimpleNamespace(id=0, synchronize=barrier)
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 1, getDeviceProperties=lambda n: {"name": b"strict stand-in"},
        deviceSynchronize=barrier, CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}))
    return types.SimpleNamespace(
        runtime=runtime, Device=lambda n=None: device, is_available=lambda: True,
        Stream=types.SimpleNamespace(null=types.SimpleNamespace(synchronize=barrier)))


def make_cupy():
    module = Namespace("cupy", np)
    module.__version__ = frozen_names()[1].split()[2].rstrip(":")
    module.linalg = Namespace("cupy.linalg", np.linalg)
    module.cuda = fake_cuda()
    return module


def install(monkeypatch):
    """Put a new stand-in in the place of minispec.backend.cupy, counters at zero; returns it."""
    from minispec import backend

    transfers.reset()
    module = make_cupy()
    monkeypatch.setattr(backend, "cupy", module)
    return module
