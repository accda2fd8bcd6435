"""The backend switch: which library owns an array, and the ways between the two.

Claims: arrays of the two libraries never mix (cases H-42), repeated ids are all counted on both
(H-29), and a missing GPU is said clearly. The device is tests/strict_cupy.py.
"""

import numpy as np
import pytest
from strict_cupy import transfers

from minispec import backend


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setattr(backend, "cupy", None)


@pytest.fixture
def no_device(cp, monkeypatch):
    def fail():
        raise cp.cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver")
    monkeypatch.setattr(cp.cuda.runtime, "getDeviceCount", fail)


HOST = np.ones(3, np.float32)


# -- backend: which library, and the way between the two -------------------------------------------

def test_get_xp_is_the_library_of_all_arrays(cp, a):
    assert backend.get_xp(HOST, HOST) is np
    assert backend.get_xp(a, a[0]) is cp
    for mixed in ((a, HOST), (HOST, a), (a, None), (a, 1.0), (a, [1.0])):
        with pytest.raises(TypeError, match="mixed host and device arrays: .*ndarray"):
            backend.get_xp(*mixed)
    with pytest.raises(TypeError, match="at least one"):
        backend.get_xp()


def test_without_cupy_everything_is_numpy(no_cupy):
    assert backend.get_xp(HOST) is np
    assert not backend.has_gpu()
    assert backend.pick("auto") is backend.pick("cpu") is np
    with pytest.raises(RuntimeError, match="'gpu' cannot be used: cupy is not installed"):
        backend.pick("gpu")
    backend.synchronize(np)
    backend.synchronize(HOST)
    assert isinstance(backend.to_host([1, 2]), np.ndarray)


def test_pick_with_a_device(cp):
    assert backend.has_gpu()
    assert backend.pick("gpu") is backend.pick("auto") is cp
    assert backend.pick("cpu") is np
    with pytest.raises(ValueError, match="device is 'cuda', expected one of cpu, gpu, auto"):
        backend.pick("cuda")


def test_cupy_without_a_device_is_said_clearly(no_device):
    assert not backend.has_gpu()
    assert backend.pick("auto") is np
    with pytest.raises(RuntimeError, match="no usable device .*cudaErrorInsufficientDriver"):
        backend.pick("gpu")


def test_cupy_with_zero_devices(cp, monkeypatch):
    monkeypatch.setattr(cp.cuda.runtime, "getDeviceCount", lambda: 0)
    assert backend.pick("auto") is np
    with pytest.raises(RuntimeError, match="0 devices"):
        backend.pick("gpu")


def test_to_host(cp, a):
    back = backend.to_host(a.T)
    assert type(back) is np.ndarray and back.flags.c_contiguous
    np.testing.assert_array_equal(back, np.arange(6).reshape(2, 3).T)
    assert transfers.to_host == 1
    assert backend.to_host(HOST) is HOST
    turned = np.ones((2, 3)).T
    assert backend.to_host(turned).flags.c_contiguous
    assert backend.to_host(a.sum()).shape == () == backend.to_host(np.array(1.0)).shape
    with pytest.raises(TypeError, match="Implicit conversion"):
        backend.to_host([a[0], a[1]])


def test_as_xp_and_to_device(cp, a):
    shipped = backend.as_xp([1, 2], cp, np.int32)
    assert isinstance(shipped, cp.ndarray) and shipped.dtype == np.int32
    assert transfers.to_device == 1
    assert backend.as_xp(a, cp) is a and backend.as_xp(HOST, np) is HOST
    assert isinstance(backend.to_device(HOST, like=a), cp.ndarray)
    assert backend.to_device(HOST, like=HOST) is HOST
    with pytest.raises(TypeError, match="call to_host"):
        backend.as_xp(a, np)


def test_device_memory_is_not_host_memory(cp):
    host = np.zeros(3)
    device = backend.as_xp(host, cp)
    host[:] = 5
    assert backend.to_host(device).tolist() == [0, 0, 0]
    backend.to_host(device)[:] = 7
    assert backend.to_host(device).tolist() == [0, 0, 0]


def test_synchronize_waits_for_the_device_only(cp, a):
    backend.synchronize(np)
    backend.synchronize(HOST)
    assert transfers.barriers == 0
    backend.synchronize(cp)
    backend.synchronize(a)
    assert transfers.barriers == 2


def test_device_name(cp):
    assert backend.device_name(cp) == "strict stand-in"
    assert backend.device_name() and backend.device_name(np) == backend.device_name()


# -- backend: scatter_add --------------------------------------------------------------------------

@pytest.mark.parametrize("library", ["numpy", "cupy"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_scatter_add_counts_repeated_ids(library, dtype, cp):
    xp = {"numpy": np, "cupy": cp}[library]
    target = xp.zeros(3, dtype)
    assert backend.scatter_add(target, xp.asarray([1, 1, 2]), xp.ones(3, dtype)) is target
    assert backend.to_host(target).tolist() == [0, 2, 1] and target.dtype == dtype
    rows = xp.zeros((3, 2), dtype)
    backend.scatter_add(rows, xp.asarray([[1, 1], [1, 2]]), xp.ones((2, 2, 2), dtype))
    assert backend.to_host(rows).tolist() == [[0, 0], [3, 3], [1, 1]]


@pytest.mark.parametrize("library", ["numpy", "cupy"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 5, backend.NARROW - 1, backend.NARROW])
def test_scatter_add_equals_add_at_to_the_bit(library, dtype, width, cp):
    xp = {"numpy": np, "cupy": cp}[library]
    draw = np.random.default_rng(3)
    start = draw.standard_normal((11, width)).astype(dtype)
    ids = draw.integers(-11, 11, (4, 7)).astype(np.int32)
    values = draw.standard_normal((4, 7, width)).astype(dtype)
    expected = start.copy()
    np.add.at(expected, ids, values)
    target = backend.as_xp(start.copy(), xp)
    backend.scatter_add(target, backend.as_xp(ids, xp), backend.as_xp(values, xp))
    np.testing.assert_array_equal(backend.to_host(target), expected)


def test_scatter_add_into_and_from_views():
    ids, values = np.array([1, 0, 1]), np.arange(6.0).reshape(2, 3).T
    plain, view = np.zeros((2, 2)), np.zeros((2, 4))
    backend.scatter_add(plain, ids, values)
    backend.scatter_add(view[:, :2], ids, values)
    assert plain.tolist() == view[:, :2].tolist() == [[1, 4], [2, 8]]
    assert backend.scatter_add(np.zeros((2, 2)), ids[:0], values[:0]).sum() == 0


def test_scatter_add_ids_of_a_narrow_type():
    """The cell numbers of a large table do not fit the type of its ids."""
    target = np.zeros((200, 3), np.float32)
    backend.scatter_add(target, np.array([199, 199], np.uint8), np.ones((2, 3), np.float32))
    assert target[199].tolist() == [2, 2, 2] and target.sum() == 6


def test_scatter_add_refuses_what_does_not_fit(cp, a):
    target, ids, values = np.zeros((4, 2)), np.array([1, 2]), np.ones((2, 2))
    with pytest.raises(ValueError, match=r"\(2,\), ids and target need \(2, 2\)"):
        backend.scatter_add(target, ids, values[0])
    with pytest.raises(TypeError, match="float64, values are float32"):
        backend.scatter_add(target, ids, values.astype(np.float32))
    with pytest.raises(TypeError, match="ids float64"):
        backend.scatter_add(target, ids * 1.0, values)
    with pytest.raises(TypeError, match="mixed"):
        backend.scatter_add(target, cp.asarray(ids), values)
    for wide in (2, backend.NARROW):
        for bad in (4, -5):
            with pytest.raises(IndexError):
                backend.scatter_add(np.zeros((4, wide)), np.array([bad]), np.ones((1, wide)))


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_packed_matmul_equals_matmul(rows, columns):
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, 7)), rng.normal(size=(7, columns))
    for dtype, tolerance in (("float64", 1e-13), ("float32", 1e-5)):
        y = backend.packed_matmul(x.astype(dtype), backend.pack_columns(w.astype(dtype)), columns)
        assert y.shape == (rows, columns) and y.dtype == dtype
        assert np.abs(y - x @ w).max() < tolerance
