"""What the stand-in knows of CuPy 14: its names and parameters, and which of them wait or refuse.

The names are frozen from the real package in cupy14_names.txt; the tables below say, for groups of
functions and parameters, what CuPy does with host values.

Read first: minispec/backend.py. Read next: strict_cupy_array.py. Proven by: test_strict_cupy.py.
"""

import functools
import inspect
import pathlib

import numpy as np

NAMES_FILE = pathlib.Path(__file__).with_name("cupy14_names.txt")
SCALARS = (bool, int, float, complex, np.generic)

# Parameters that must be plain Python values: reading a device number for them would wait.
HOST_PARAMS = set(
    "axis axes axis1 axis2 source destination dtype order shape newshape new_shape k n N M num "
    "ndim decimals offset kth ddof keepdims indices_or_sections pad_width repeats reps dims "
    "dimensions minlength shift mode side kind casting copy subok endpoint ord".split())
# Parameters that may be lists or tuples, of device arrays or numbers.
LIST_PARAMS = set("tup arys args xi operands arrays arrays_and_dtypes varargs condlist choicelist "
                  "multi_index keys kwargs indices q".split())
# First parameters whose method CuPy calls, so that a list or a number fails.
ARRAY_PARAMS = set("a arr ary array x m v prototype filt".split())
# Functions that answer on the host, with no device array.
ON_HOST = set("ndim shape size result_type can_cast promote_types isscalar iscomplexobj isrealobj "
              "isdtype issubdtype broadcast_shapes may_share_memory shares_memory common_type "
              "min_scalar_type isfortran iterable typename".split())
# Functions that read the size of their result from the device, and so wait.
WAITS = set("nonzero argwhere flatnonzero unique unique_all unique_counts unique_inverse "
            "unique_values compress extract bincount histogram setdiff1d intersect1d union1d "
            "setxor1d delete trim_zeros".split())
NOT_MODELLED = set(
    "load loadtxt save savetxt savez savez_compressed genfromtxt fromfile frombuffer fromfunction "
    "fromiter fromstring fromDlpack from_dlpack apply_along_axis apply_over_axes put choose "
    "piecewise copyto array2string array_repr array_str require dump dumps tobytes tofile "
    "byteswap r_ c_ s_ mgrid ogrid index_exp".split())
AT_DTYPES = {"add": "int32 int64 uint32 uint64 float16 float32 float64",
             "subtract": "int32 uint32",
             "maximum": "int32 int64 uint32 uint64 float32 float64",
             "minimum": "int32 int64 uint32 uint64 float32 float64"}
UFUNC_METHODS = {"reduce": ("add", "multiply"), "accumulate": ("add", "multiply"),
                 "reduceat": ("add",)}
COMPARISONS = (np.less, np.less_equal, np.equal, np.not_equal, np.greater, np.greater_equal)


class Transfers:
    """Counters: copies to_device and to_host, hidden waits (syncs), synchronize calls (barriers).

    syncs holds what stalls without saying so: float(), int(), bool(), item(), printing, boolean
    masks as index, nonzero and its kin. to_device also counts host lists given as index or value.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.to_device = self.to_host = self.syncs = self.barriers = 0


transfers = Transfers()


# -- what CuPy has ---------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def frozen_names():
    """{full name: its kind, or "(its parameters)"} and the version line of the names file."""
    first, *lines = NAMES_FILE.read_text(encoding="utf-8").splitlines()
    table = {}
    for line in lines:
        name, bracket, rest = line.replace("(", " (", 1).partition(" ")
        table[name] = rest
    return table, first


@functools.lru_cache(maxsize=None)
def signature_of(full_name):
    params = frozen_names()[0][full_name][1:-1].replace("=", "=None")
    return inspect.signature(eval(f"lambda {params}: 0"))
