"""The array of the strict stand-in for CuPy: a NumPy array in a closed box.

It refuses NumPy functions and host arrays, wraps index arrays, lets no repeated id pass in an
assignment, fills fresh memory with NaN and counts every hidden wait.

Read first: strict_cupy_rules.py. Read next: strict_cupy.py. Proven by: test_strict_cupy.py.
"""

import functools
import operator

import numpy as np

from strict_cupy_rules import (ARRAY_PARAMS, COMPARISONS, HOST_PARAMS, LIST_PARAMS, NOT_MODELLED,
                               ON_HOST, SCALARS, WAITS, frozen_names, signature_of, transfers)


def check_call(full_name, args, kwargs):
    """Raise TypeError for parameters that CuPy lacks, and for values on the wrong side."""
    try:
        bound = signature_of(full_name).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{full_name} of CuPy 14: {error}") from None
    scope, _, name = full_name.rpartition(".")
    for position, (param, value) in enumerate(bound.arguments.items()):
        if param in HOST_PARAMS or name == "arange":
            if device_arrays(value):
                raise TypeError(f"{full_name}: {param} must be a host value, not a device array")
        elif isinstance(value, (list, tuple)) and param not in LIST_PARAMS:
            raise TypeError(f"{full_name}: {param} must not be a list or tuple")
        elif param == "tup" and not all(isinstance(v, ndarray) for v in value):
            kinds = [type(v).__name__ for v in value]
            raise TypeError(f"{full_name}: only cupy arrays can be joined, not {kinds}")
        elif position == 0 and param in ARRAY_PARAMS and scope != "ndarray" and (
                name not in ON_HOST and not isinstance(value, ndarray)):
            raise TypeError(f"{full_name}: {param} must be a cupy.ndarray, not {type(value)}")


def device_arrays(value):
    """All device arrays in a value, also inside lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in device_arrays(item)]
    return [value] if isinstance(value, ndarray) else []


# -- into and out of the box -----------------------------------------------------------------------

def unwrap(value):
    """The NumPy array inside a device array; host arrays are refused, everything else passes."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}: host array given to the device library")
    if isinstance(value, (list, tuple)):
        return type(value)([unwrap(v) for v in value])
    return value


def wrap(result, known=()):
    """Device arrays around NumPy results; an array of `known` (an `out=`) comes back itself."""
    if isinstance(result, np.ndarray):
        return next((array for array in known if array._host is result), box(result))
    if isinstance(result, SCALARS):
        return box(np.asarray(result))
    if isinstance(result, (list, tuple)):
        items = [wrap(r, known) for r in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    return result


def box(host):
    if host.dtype.kind not in "biufc":
        raise ValueError(f"Unsupported dtype {host.dtype}")
    array = object.__new__(ndarray)
    array._host, array._gathered, array._changed = host, None, False
    return array


def run(function, args, kwargs):
    """Call a NumPy function on the insides. CuPy warns of no inf and no NaN."""
    known = device_arrays([*args, *kwargs.values()])
    with np.errstate(all="ignore"):
        result = function(*unwrap(tuple(args)), **{key: unwrap(v) for key, v in kwargs.items()})
    return wrap(result, known)


def empty(shape, dtype=float, order="C"):
    """What was in memory before: NaN, or the largest integer, shows that it was used."""
    host = np.empty(shape, dtype, order)
    host[...] = (np.nan if host.dtype.kind in "fc" else
                 True if host.dtype.kind == "b" else np.iinfo(host.dtype).max)
    return box(host)


def from_host(value, dtype=None, order="C", ndmin=0):
    """Copy a host array, number or list to the device; like device arrays in a list are stacked."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, ndarray) for v in value):
        if len({v.shape for v in value}) == 1:
            return box(np.array([v._host for v in value], dtype, order=order, ndmin=ndmin))
    host = np.array(value, dtype, order=order or "C", ndmin=ndmin)  # raises for mixed lists
    transfers.to_device += 1
    return box(host)


# -- indexing --------------------------------------------------------------------------------------

def host_index(host, key):
    """NumPy's form of a device index: (index, it holds arrays, it holds integer arrays).

    Integer arrays are wrapped into range, as on the device; plain integers are left to NumPy,
    which checks them, as CuPy does. The Ellipsis makes a[0] a 0-d view and no NumPy scalar.
    """
    items = [index_item(item) for item in (key if isinstance(key, tuple) else (key,))]
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    arrays = [item for item in items if isinstance(item, np.ndarray)]
    masks = sum(item.dtype == bool for item in arrays)
    if masks > 1:
        raise NotImplementedError("CuPy does not support two boolean arrays in one index")
    transfers.syncs += masks
    spare, axis = host.ndim - sum(map(axes_taken, items)), 0
    for n, item in enumerate(items):
        if isinstance(item, np.ndarray) and item.dtype != bool and axis < host.ndim:
            items[n] = item % host.shape[axis] if host.shape[axis] else item
        axis += spare if item is Ellipsis else axes_taken(item)
    return tuple(items), bool(arrays), len(arrays) > masks


def index_item(item):
    if isinstance(item, (list, tuple, np.ndarray, bool, np.bool_)):
        item = from_host(item)  # CuPy ships index lists without a word
        if item.size == 0:
            return item._host.astype(np.int32)
    if isinstance(item, ndarray):
        if item.dtype.kind not in "biu":
            raise IndexError(f"index arrays must be of integer or boolean type: {item.dtype}")
        return item._host
    return item


def axes_taken(item):
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == bool else 1


def refuse_repeats(target, index, value, written):
    """CuPy keeps any one of the values written to one cell: let only equal values pass."""
    cells = np.arange(target.size).reshape(target.shape)[index]  # flat cell of each value
    order = np.argsort(cells, axis=None, kind="stable")
    flat = cells.reshape(-1)[order]
    repeated = flat[1:] == flat[:-1]
    if not repeated.any():
        return
    if isinstance(value, ndarray) and value._changed and value._gathered == place(target._host):
        raise AssertionError("`a[ids] += b` with repeated ids counts each id once; "
                             "use backend.scatter_add")
    flat = np.broadcast_to(written, cells.shape).reshape(-1)[order].astype(target.dtype)
    same = (flat[1:] == flat[:-1]) | (np.isnan(flat[1:]) & np.isnan(flat[:-1]))
    if not same[repeated].all():
        raise AssertionError("`a[ids] = b` with repeated ids and different values: CuPy keeps "
                             "an undefined one of them")


def place(host):
    return host.__array_interface__["data"][0], host.shape, host.strides


# -- the array -------------------------------------------------------------------------------------

class ndarray:
    """cupy.ndarray without a GPU. It is no subclass of NumPy's: NumPy cannot see inside."""

    __slots__ = ("_host", "_gathered", "_changed", "__weakref__")
    __array_priority__ = 100
    __hash__ = None

    def __new__(cls, shape, dtype=float, memptr=None, strides=None, order="C"):
        return empty(shape, dtype, order)

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. "
                        "Please use `.get()` to construct a NumPy array explicitly.")

    def __array_function__(self, func, types, args, kwargs):
        raise TypeError(f"numpy.{func.__name__} was given a device array; use xp.{func.__name__}")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        """`numpy_scalar <op> device_array` comes here rightly; np.exp(device_array) does not."""
        if ufunc in COMPARISONS:  # NumPy hands over its scalars as 0-d arrays here
            inputs = [x[()] if isinstance(x, np.ndarray) else x for x in inputs]
        if method == "__call__" and any(isinstance(x, np.generic) for x in inputs) and not kwargs:
            return compute(ufunc, *inputs)
        raise TypeError(f"numpy.{ufunc.__name__} was given a device array; "
                        f"use xp.{ufunc.__name__} on arrays of one library")

    def get(self, stream=None, order="C", out=None, blocking=True):
        transfers.to_host += 1
        if out is None:
            return np.array(self._host, order=order)
        out[...] = self._host
        return out

    def tolist(self):
        return self.get().tolist()

    def set(self, arr, stream=None):
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"set needs {self.dtype} {self.shape}, got {arr.dtype} {arr.shape}")
        transfers.to_device += 1
        self._host[...] = arr

    shape = property(lambda self: self._host.shape,
                     lambda self, shape: setattr(self._host, "shape", shape))

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key):
        index, advanced, by_integers = host_index(self._host, key)
        result = box(np.array(self._host[index]) if advanced else self._host[index])
        if by_integers:
            result._gathered = place(self._host)
        return result

    def __setitem__(self, key, value):
        index, advanced, by_integers = host_index(self._host, key)
        if isinstance(value, (list, tuple, np.ndarray)):
            if not advanced and np.shape(value) != ():
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = from_host(value, self.dtype)  # CuPy ships it without a word
        host = unwrap(value)
        if by_integers:
            refuse_repeats(self, index, value, np.asarray(host))
        self._host[index] = host

    def fill(self, value):
        self[...] = value

    def take(self, indices, axis=None, out=None):
        if isinstance(indices, (list, tuple, np.ndarray)):
            indices = from_host(indices, int)  # CuPy ships it without a word
        return run(np.take, (self, indices, axis), {"mode": "wrap", "out": out})

    def sort(self, axis=-1, kind=None):
        self._host.sort(axis, stable(kind))

    def argsort(self, axis=-1, kind=None):
        return box(self._host.argsort(axis, stable(kind)))

    def __copy__(self):
        return box(self._host.copy())

    def __deepcopy__(self, memo):
        return box(self._host.copy())

    def __getattr__(self, name):
        """What NumPy can answer, if CuPy has it (it has no __index__ and no __contains__)."""
        kind = frozen_names()[0].get(f"ndarray.{name}", "special")
        if kind == "special":
            raise AttributeError(f"cupy.ndarray of CuPy 14 has no attribute {name!r}")
        if name in ("dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"):
            return getattr(self._host, name)
        if name in ("T", "mT", "real", "imag"):
            return box(getattr(self._host, name))
        if kind == "attribute" or name in NOT_MODELLED or not hasattr(np.ndarray, name):
            raise NotImplementedError(f"cupy.ndarray.{name} exists; strict_cupy does not model it")
        return functools.partial(call, f"ndarray.{name}", getattr(np.ndarray, name), self)


def call(full_name, function, *args, **kwargs):
    """Check a call against CuPy's rules, count its wait, let NumPy compute."""
    check_call(full_name, args[1:] if full_name.startswith("ndarray.") else args, kwargs)
    name = full_name.rpartition(".")[2]
    transfers.syncs += name in WAITS
    if name in ON_HOST:
        return function(*unwrap(args), **kwargs)
    return run(function, args, kwargs)


def stable(kind):
    if kind not in (None, "stable"):
        raise ValueError("kind can only be None or 'stable'")
    return "stable"


def compute(function, *operands, **kwargs):
    """An operator or ufunc: device arrays and numbers only, no lists and no host arrays."""
    for x in operands:
        if not isinstance(x, (ndarray, *SCALARS)):
            raise TypeError(f"Unsupported type {type(x)}: not a device array or a number")
    return run(function, operands, kwargs)


def in_place(function, array, other):
    result = compute(function, array, other)
    result._changed = True
    return result


def equality(function, array, other):
    if other is None:  # CuPy compares with None cell by cell, and finds no cell equal
        return box(np.full(array.shape, function is operator.ne))
    return compute(function, array, other)


def to_scalar(convert, array):
    transfers.syncs += 1
    return convert(array._host)


def define_special_methods():
    """Operators and conversions of ndarray, if the names file has them (no __imatmul__, ...)."""
    methods = {"divmod": lambda a, b: compute(divmod, a, b),
               "rdivmod": lambda a, b: compute(divmod, b, a)}
    for name in "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split():
        op = getattr(operator, f"__{name}__")
        methods[name] = lambda a, b, op=op: compute(op, a, b)
        methods["r" + name] = lambda a, b, op=op: compute(op, b, a)
        methods["i" + name] = lambda a, b, op=getattr(operator, f"__i{name}__"): in_place(op, a, b)
    for name in "abs neg pos invert".split():
        methods[name] = lambda a, op=getattr(operator, name): compute(op, a)
    for name, convert in (("bool", bool), ("int", int), ("float", float), ("complex", complex)):
        methods[name] = lambda a, convert=convert: to_scalar(convert, a)
    for name, method in methods.items():
        if f"ndarray.__{name}__" in frozen_names()[0]:
            setattr(ndarray, f"__{name}__", method)
    for name in ("lt", "le", "gt", "ge"):
        setattr(ndarray, f"__{name}__", lambda a, b, op=getattr(operator, name): compute(op, a, b))
    ndarray.__eq__ = lambda a, b: equality(operator.eq, a, b)
    ndarray.__ne__ = lambda a, b: equality(operator.ne, a, b)
    ndarray.__repr__ = ndarray.__str__ = lambda a: to_scalar(repr, a)
    ndarray.__format__ = lambda a, spec: to_scalar(lambda host: format(host, spec), a)
    ndarray.item = lambda a: to_scalar(np.ndarray.item, a)


define_special_methods()
