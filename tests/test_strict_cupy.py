"""The strict stand-in for CuPy refuses, wraps and counts what CuPy 14 does.

Claims: it has CuPy's names and parameters and no others, host and device never mix (cases H-42),
index arrays wrap, repeated ids in an assignment raise, and every hidden wait is counted.
"""

import copy
import re

import numpy as np
import pytest
from strict_cupy import transfers
from strict_cupy_rules import AT_DTYPES, frozen_names, signature_of


HOST = np.ones(3, np.float32)


# -- names -----------------------------------------------------------------------------------------

def test_names_are_frozen_from_cupy_14(cp):
    table, first = frozen_names()
    assert re.match(r"# cupy-cuda12x 14\.\d+\.\d+ ", first) and cp.__version__.startswith("14.")
    assert table["cupy.sum"] == "(a, axis=, dtype=, out=, keepdims=)"
    assert table["cupy.exp"] == "ufunc" and table["ndarray.T"] == "attribute"
    for name in table:
        if table[name].startswith("("):
            signature_of(name)


def test_cuda_corner_has_only_real_names(cp):
    table, _ = frozen_names()
    for name, part in vars(cp.cuda).items():
        assert f"cupy.cuda.{name}" in table
    for name in vars(cp.cuda.runtime):
        assert f"cupy.cuda.runtime.{name}" in table


@pytest.mark.parametrize("name", ["errstate", "block", "insert", "vecdot", "einsum_path", "nosuch"])
def test_names_cupy_lacks(cp, name):
    with pytest.raises(AttributeError, match=f"CuPy 14 has no attribute '{name}'"):
        getattr(cp, name)


def test_names_refused_for_other_reasons(cp, a):
    with pytest.raises(AttributeError, match="drawn on the host"):
        cp.random
    for get in (lambda: cp.fft, lambda: cp.r_, lambda: cp.Inf, lambda: cp.RawKernel, lambda: cp.put,
                lambda: a.ptp(), lambda: a.data, lambda: a.tobytes()):
        with pytest.raises(NotImplementedError, match="exists"):
            get()
    with pytest.raises(AttributeError, match="linalg.*no attribute 'matrix_norm'"):
        cp.linalg.matrix_norm
    for name in ("nosuch", "__index__", "__contains__", "__imatmul__", "newbyteorder"):
        with pytest.raises(AttributeError):
            getattr(a, name)
    with pytest.raises(AttributeError):
        a.label = "mine"


def test_every_special_method_is_one_of_cupy(cp):
    table, _ = frozen_names()
    own = {name for name in vars(cp.ndarray) if name.startswith("__")} - set(dir(object))
    own -= {"__slots__", "__module__", "__weakref__", "__getattr__", "__array_priority__",
            "__static_attributes__", "__firstlineno__"}
    assert {name for name in own if f"ndarray.{name}" not in table} == set()


def test_parameters_cupy_lacks(cp, a):
    for call in (lambda: cp.sum(a, where=a > 0), lambda: a.max(initial=0), lambda: a.item(0),
                 lambda: cp.add(a, 1, where=a > 0), lambda: cp.maximum.reduce(a),
                 lambda: cp.clip(a, min=0, max=1), lambda: cp.sort(a, kind="quicksort")):
        with pytest.raises((TypeError, NotImplementedError, ValueError)):
            call()


def test_dtypes_and_constants_are_numpys(cp):
    assert cp.float32 is np.float32 and cp.newaxis is None and cp.inf == np.inf
    assert cp.finfo(cp.float32).eps == np.finfo(np.float32).eps


# -- the two sides ---------------------------------------------------------------------------------

HOST_TO_NUMPY = {
    "asarray": lambda a: np.asarray(a), "list": lambda a: np.array([a[0], a[1]]),
    "mixed list": lambda a: np.array([a.sum(), 1.0]), "ufunc": lambda a: np.exp(a),
    "function": lambda a: np.concatenate([a, a]), "pad": lambda a: np.pad(a, 1),
    "shape": lambda a: np.shape(a), "add.at": lambda a: np.add.at(np.zeros(3), [0], a[0, 0]),
    "out": lambda a: np.add(HOST, HOST, out=a[0]), "index": lambda a: HOST[a[0].astype(np.int32)],
    "value": lambda a: HOST.__setitem__(slice(None), a[0])}


@pytest.mark.parametrize("case", HOST_TO_NUMPY)
def test_numpy_gets_no_device_array(a, case):
    with pytest.raises(TypeError):
        HOST_TO_NUMPY[case](a)
    assert transfers.to_host == transfers.syncs == 0


MIXED = {
    "right": lambda cp, a: a + HOST, "left": lambda cp, a: HOST + a,
    "matmul": lambda cp, a: a @ HOST,
    "left matmul": lambda cp, a: HOST @ a.T, "in place": lambda cp, a: a[0].__iadd__(HOST),
    "in place on host": lambda cp, a: HOST.__iadd__(a[0]), "compare": lambda cp, a: a == HOST,
    "left compare": lambda cp, a: HOST < a, "0-d": lambda cp, a: a + np.array(1.0),
    "list": lambda cp, a: a + [1, 2, 3], "ufunc": lambda cp, a: cp.exp(HOST),
    "ufunc list": lambda cp, a: cp.exp([1.0]), "where": lambda cp, a: cp.where(HOST > 0, a, 0),
    "where value": lambda cp, a: cp.where(a > 0, a, HOST), "sum": lambda cp, a: cp.sum(HOST),
    "sum list": lambda cp, a: cp.sum([1.0]), "sum number": lambda cp, a: cp.sum(1.0),
    "join": lambda cp, a: cp.concatenate([a[0], HOST]), "einsum": lambda cp, a: cp.einsum(
        "ij,j->i", a, HOST), "stack number": lambda cp, a: cp.stack([a[0, 0], 1.0]),
    "out": lambda cp, a: cp.exp(a[0], out=HOST), "at": lambda cp, a: cp.add.at(
        a, cp.asarray([0]), HOST), "norm": lambda cp, a: cp.linalg.norm(HOST)}


@pytest.mark.parametrize("case", MIXED)
def test_host_and_device_never_mix(cp, a, case):
    with pytest.raises(TypeError):
        MIXED[case](cp, a)
    assert HOST.tolist() == [1, 1, 1]


def test_numbers_mix_with_device_arrays(cp, a):
    for result in (a + 1, 1.0 - a, np.float32(2) * a, a / np.float32(2), 2 ** a, a > 1, 1 < a,
                   np.float32(1) < a, cp.maximum(a, 0.0), divmod(a, 2)[0], cp.where(a > 1, a, 0.0)):
        assert isinstance(result, cp.ndarray) and result.shape == (2, 3)
        assert result.dtype in (np.float32, np.bool_)
    assert (a * np.float64(2)).dtype == np.float64  # NEP 50, as CuPy 14 and NumPy 2
    assert (a.astype(cp.float16) + 1e3).dtype == np.float16
    assert not (a == None).any() and (a != None).all()  # noqa: E711


@pytest.mark.parametrize("values, host", [([1, 2], True), (HOST, True), (3.0, True)])
def test_asarray_from_the_host_is_a_counted_copy(cp, values, host):
    transfers.reset()
    assert cp.asarray(values).shape == np.shape(values) and transfers.to_device == 1


def test_asarray_of_device_arrays(cp, a):
    assert cp.asarray(a) is a and cp.asarray(a, cp.float64).dtype == np.float64
    assert cp.asarray([a, a]).shape == (2, 2, 3)  # CuPy stacks like arrays on the device
    assert transfers.to_device == 0
    for mixed in ([a[0], HOST], [a[0, 0], 1.0], [a, a[0]]):
        with pytest.raises((TypeError, ValueError)):
            cp.asarray(mixed)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        cp.asarray(["text"])


def test_ways_to_the_host(cp, a):
    for host in (a.get(), cp.asnumpy(a), np.asarray(a.tolist(), np.float32)):
        np.testing.assert_array_equal(host, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (transfers.to_host, transfers.syncs) == (3, 0)
    a.set(np.zeros((2, 3), np.float32))
    assert transfers.to_device == 1 and a.get().sum() == 0


WAITS = {"float": lambda cp, a: float(a[1, 1]), "int": lambda cp, a: int(a.sum()),
         "if": lambda cp, a: 1 if a[0, 0] > 1 else 0, "item": lambda cp, a: a.max().item(),
         "format": lambda cp, a: f"{a.sum():.1f}", "print": lambda cp, a: str(a),
         "mask": lambda cp, a: a[a > 1], "nonzero": lambda cp, a: a.nonzero(),
         "where": lambda cp, a: cp.where(a > 1), "unique": lambda cp, a: cp.unique(a)}


@pytest.mark.parametrize("case", WAITS)
def test_hidden_waits_are_counted(cp, a, case):
    WAITS[case](cp, a)
    assert (transfers.syncs, transfers.to_host) == (1, 0)
    transfers.reset()
    assert transfers.syncs == 0


def test_a_formula_does_not_wait(cp, a):
    b = (a - a.max(axis=1, keepdims=True)).sum(axis=0) @ cp.eye(3)
    b += a[:, cp.argsort(a[0])].mean()
    cp.exp(b, out=b)
    assert vars(transfers) == dict.fromkeys(("to_device", "to_host", "syncs", "barriers"), 0)


def test_no_device_number_where_python_wants_an_integer(cp, a):
    one = a[0, 1].astype(cp.int32)
    for call in (lambda: range(one), lambda: [1, 2][one], lambda: a[:one], lambda: a.sum(axis=one),
                 lambda: cp.zeros(one), lambda: cp.zeros((2, one)), lambda: a.reshape(one, 6),
                 lambda: cp.arange(one)):
        with pytest.raises(TypeError):
            call()
    assert a[one].tolist() == [3, 4, 5]  # as an index array it is welcome
    assert transfers.syncs == 0


# -- arrays ----------------------------------------------------------------------------------------

def test_reductions_stay_on_the_device(cp, a):
    for number in (a.sum(), a.mean(), a[0, 0], cp.linalg.norm(a), a.argmax(), cp.allclose(a, a),
                   cp.dot(a[0], a[0]), next(iter(a[0]))):
        assert isinstance(number, cp.ndarray) and number.shape == ()
    assert type(cp.ndim(a)) is int and cp.shape(a) == (2, 3) and cp.result_type(a) == np.float32
    assert [row.shape for row in a] == [(3,), (3,)] and len(a) == 2
    with pytest.raises(TypeError):
        iter(a[0, 0])
    with pytest.raises(TypeError):
        hash(a)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(a)


def test_views_share_memory_and_copies_do_not(cp, a):
    for view in (a[0], a[0, 0], a.T, a[..., 1:], a.reshape(3, 2), a[None]):
        view += 1
    assert a.get()[0, 0] == 5  # a[..., 1:] alone misses that cell
    for other in (a[[0]], a[a > 0], a + 0, a.copy(), copy.deepcopy(a), a[cp.asarray(0)]):
        other += 100
    assert a.get().max() < 100


def test_out_and_in_place_return_the_same_array(cp, a):
    out = cp.empty((2, 3), cp.float32)
    assert cp.exp(a, out=out) is out and cp.matmul(a, cp.eye(3, dtype=cp.float32), out=out) is out
    assert a.sum(axis=0, out=out[0]) is not None and out.get()[0].tolist() == [3, 5, 7]
    same = a
    same *= 2
    assert same is a
    same @= cp.eye(3)  # CuPy has no __imatmul__: a new array
    assert same is not a


def test_fresh_memory_is_poisoned(cp, a):
    for array in (cp.empty((2, 2)), cp.empty_like(a), cp.ndarray((3,), cp.float16)):
        assert np.isnan(array.get()).all()
    assert (cp.empty(2, cp.int32).get() == np.iinfo(np.int32).max).all()


def test_no_warnings_for_inf_and_nan(cp, a, recwarn):
    assert np.isneginf(cp.log(a * 0).get()).all() and not np.isfinite((1 / (a * 0)).get()).any()
    assert len(recwarn) == 0


def test_functions_agree_with_numpy(cp, a):
    h = a.get()
    for f in (lambda xp, x: xp.einsum("ij,kj->ik", x, x), lambda xp, x: xp.tril(x),
              lambda xp, x: xp.concatenate([x, x], axis=1), lambda xp, x: x.transpose(1, 0),
              lambda xp, x: xp.pad(x, ((1, 0), (0, 2))), lambda xp, x: xp.clip(x, 1, 3),
              lambda xp, x: x.var(axis=1), lambda xp, x: xp.split(x, [1], axis=1)[1],
              lambda xp, x: xp.argsort(-x, axis=1), lambda xp, x: xp.stack([x, x]).cumsum(axis=0),
              lambda xp, x: xp.broadcast_to(x[0], (4, 3)), lambda xp, x: xp.full_like(x, 7),
              lambda xp, x: xp.add.reduce(x, axis=1), lambda xp, x: xp.multiply.outer(x[0], x[1])):
        got, want = f(cp, a), f(np, h)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.get(), want)


# -- indices ---------------------------------------------------------------------------------------

def test_index_arrays_wrap_and_integers_do_not(cp, a):
    far = cp.asarray([4, -3])
    assert a[far].get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert a[:, far].get().tolist() == [[1, 0], [4, 3]]
    assert a[..., None, cp.asarray([-4, 5])].get().tolist() == [[[2, 2]], [[5, 5]]]
    assert a[far, far].get().tolist() == [1, 3]
    assert a.take(far, axis=1).get().tolist() == cp.take(a, far, 1).get().tolist()
    assert a.take(far, axis=1).get().tolist() == [[1, 0], [4, 3]]
    assert cp.take_along_axis(a, cp.asarray([[5], [1]]), axis=1).get().tolist() == [[2], [4]]
    a[cp.asarray([9])] = 0
    assert a.get().tolist() == [[0, 1, 2], [0, 0, 0]]
    cp.add.at(a, cp.asarray([2, 4]), 1.0)
    assert a.get()[0].tolist() == [2, 3, 4]
    with pytest.raises(IndexError):
        a[2]
    with pytest.raises(IndexError, match="integer or boolean"):
        a[cp.asarray([0.0])]


def test_host_lists_as_index_or_values_are_counted_transfers(cp, a):
    assert a[[0, 1]].shape == (2, 3) and transfers.to_device == 1
    a[np.array([0])] = HOST
    assert a.get()[0].tolist() == [1, 1, 1] and transfers.to_device == 3
    a[:] = 2
    a[0] = a[1]
    a[a > 1] = 3
    assert transfers.to_device == 3
    for host in (HOST, [1, 2, 3]):
        with pytest.raises(ValueError, match="cannot be used for fill"):
            a[0] = host
    with pytest.raises(NotImplementedError, match="two boolean"):
        a[a[:, 0] > 0, a[0] > 0]


def test_repeated_ids_in_an_assignment(cp, a):
    twice = cp.asarray([1, 1])
    with pytest.raises(AssertionError, match="use backend.scatter_add"):
        a[twice] += 1.0  # the same value in both copies: only the pattern gives it away
    with pytest.raises(AssertionError, match="undefined"):
        a[twice] = cp.asarray([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(AssertionError, match="undefined"):
        a[:, cp.asarray([0, 3])] = cp.asarray([1.0, 2.0])  # equal only once they have wrapped
    with pytest.raises(AssertionError, match="undefined"):
        a[twice, twice] = cp.asarray([1.0, 2.0])
    a[twice] = 8.0
    a[cp.asarray([0, 1])] += 1.0
    assert a.get().tolist() == [[1, 2, 3], [9, 9, 9]]


def test_add_at_takes_the_dtypes_of_cupy(cp):
    ids = cp.asarray([1, 1, 2])
    for dtype in AT_DTYPES["add"].split():
        target = cp.zeros(3, dtype)
        cp.add.at(target, ids, cp.ones(3, dtype))
        assert target.get().tolist() == [0, 2, 1]
    for dtype in (np.int8, np.complex64):
        with pytest.raises(TypeError, match="does not support"):
            cp.add.at(cp.zeros(3, dtype), ids, 1)
    with pytest.raises(TypeError, match="subtract.at does not support float32"):
        cp.subtract.at(cp.zeros(3, cp.float32), ids, 1)


def test_put_along_axis_goes_the_same_way(cp, a):
    cp.put_along_axis(a, cp.asarray([[2], [4]]), 9.0, axis=1)
    assert a.get().tolist() == [[0, 1, 9], [3, 9, 5]]
    with pytest.raises(AssertionError, match="undefined"):
        cp.put_along_axis(a, cp.asarray([[0, 0], [1, 2]]), cp.asarray([[1.0, 2.0]] * 2), axis=1)
