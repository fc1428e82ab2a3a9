# SPDX-License-Identifier: MIT
"""Queues and arrays of pyopencl: calls in their order, on their buffers."""

import ctypes.util
import gc
import os
import threading

import clattn
import clattn._host.drivers as drivers
import numpy as np
import pytest
from references.attention import bfloat16
from support.data import draw, qkv
from support.processes import run_python

cl = pytest.importorskip("pyopencl")

from pyopencl import array as cla  # noqa: E402
from pyopencl.tools import ImmediateAllocator, MemoryPool, SVMAllocator  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")


def make_context(device):
    """A context of pyopencl for the same device, if pyopencl's loader is clattn's and lists it."""
    if drivers._needs_another_loader() and clattn._core.loader() != drivers.loader_of_pyopencl():
        pytest.skip("LD_LIBRARY_PATH has a loader, which pyopencl's wheel does not call")
    for platform in cl.get_platforms():
        for found in platform.get_devices():
            if (platform.name, found.name) == (device.platform, device.name):
                return cl.Context([found])
    pytest.skip(f"pyopencl's loader does not list {device.name}")


@pytest.fixture
def queue(device):
    context = make_context(device)  # a queue of Intel's runtime does not keep its context
    yield cl.CommandQueue(context)
    del context


def to_arrays(queue, arrays):
    return [cla.to_device(queue, array) for array in arrays]


def close(result, right):
    """The same kernel on other memory: a few eps of numbers of a few units."""
    assert isinstance(result, cla.Array)
    assert result.shape == right.shape
    assert result.dtype == right.dtype
    np.testing.assert_allclose(result.get(), right, rtol=0, atol=4e-6)


QKV = qkv()


def test_a_queue_is_a_device(device, queue):
    adopted = clattn.Device.from_pyopencl(queue)
    assert adopted == clattn.Device.from_pyopencl(queue)
    assert adopted != device
    assert adopted.name == device.name
    assert adopted.memory_mode == "copy"
    assert adopted not in clattn.devices()
    assert len({adopted, clattn.Device.from_pyopencl(queue), device}) == 2
    assert repr(adopted) == f"{repr(device)[:-1]}, in a queue of pyopencl>"
    other = clattn.Device.from_pyopencl(cl.CommandQueue(queue.context))
    assert other != adopted


def test_the_queue_is_kept(device):
    """clattn and a Tensor outlive pyopencl's own names of queue and context."""
    context = make_context(device)
    adopted = clattn.Device.from_pyopencl(cl.CommandQueue(context))
    del context
    gc.collect()
    tensor = clattn.tensor(QKV[0], device=adopted)
    np.testing.assert_array_equal(tensor.numpy(), QKV[0])
    right = clattn.scaled_dot_product_attention(*QKV, device=device)
    result = clattn.scaled_dot_product_attention(*QKV, device=adopted)
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result, right, rtol=0, atol=4e-6)


def test_arrays_in_and_out(device, queue):
    arrays = to_arrays(queue, QKV)
    options = {"is_causal": True, "return_lse": True, "return_weights": True}
    results = clattn.scaled_dot_product_attention(*arrays, **options)
    rights = clattn.scaled_dot_product_attention(*QKV, **options, device=device)
    for result, right in zip(results, rights, strict=True):
        close(result, right)
        assert result.queue == queue
    stats = clattn.memory_stats(clattn.Device.from_pyopencl(queue))
    assert stats["allocated_bytes"] == 0
    mask, sinks = draw((17, 33)) < 0.5, draw((3,))
    options = {"attn_mask": mask, "sinks": sinks}
    theirs = {name: cla.to_device(queue, array) for name, array in options.items()}
    right = clattn.scaled_dot_product_attention(*QKV, **options, device=device)
    close(clattn.scaled_dot_product_attention(*arrays, **theirs), right)
    close(clattn.scaled_dot_product_attention(*arrays, **options), right)  # NumPy's beside them


def test_half_types(queue):
    arrays = [array.astype(bfloat16) for array in QKV]
    result = clattn.scaled_dot_product_attention(*to_arrays(queue, arrays))
    assert result.dtype == bfloat16


def test_nothing_is_copied(queue):
    """clattn allocates nothing for arguments, a result and out."""
    adopted = clattn.Device.from_pyopencl(queue)
    arrays = to_arrays(queue, QKV)
    out = cla.empty(queue, QKV[0].shape, np.float32)
    clattn.scaled_dot_product_attention(*arrays)
    assert clattn.scaled_dot_product_attention(*arrays, out=out) is out
    assert clattn.memory_stats(adopted)["peak_bytes"] == 0


def test_views(device, queue):
    """Slices of one buffer, strides, a part of a buffer that is a buffer itself."""
    packed = draw((2, 33, 3, 3, 8))
    array = cla.to_device(queue, packed)
    views = [array[:, :, n].transpose((0, 2, 1, 3)) for n in range(3)]
    right = clattn.scaled_dot_product_attention(
        *(packed[:, :, n].swapaxes(1, 2) for n in range(3)), device=device
    )
    close(clattn.scaled_dot_product_attention(*views), right)
    back = [view[:, :, ::-1] for view in views]
    close(clattn.scaled_dot_product_attention(*back), right[:, :, ::-1])
    rows = cla.to_device(queue, np.zeros((64, 64), np.float32))
    part = rows.base_data.get_sub_region(32 * 256, 32 * 256)
    lower = cla.Array(queue, (32, 64), np.float32, data=part)
    clattn.diagonal_matrix(lower, 5, 0, 1, out=lower)
    expected = np.zeros((64, 64), np.float32)
    expected[32:, :32] = 5 * np.eye(32)
    np.testing.assert_array_equal(rows.get(), expected)


def test_empty_arrays(queue):
    arrays = [cla.empty(queue, (1, 2, n, 8), np.float32) for n in (0, 5, 5)]
    result = clattn.scaled_dot_product_attention(*arrays)
    assert isinstance(result, cla.Array)
    assert result.shape == (1, 2, 0, 8)


def test_calls_are_in_the_queues_order(device, queue):
    """Nothing waits between commands of pyopencl and clattn."""
    arrays = [draw((1, 4, 700, 64), seed=n) for n in range(3)]
    x, key, value = to_arrays(queue, arrays)
    expected = arrays[0]
    for _ in range(4):
        x = clattn.scaled_dot_product_attention(x * 2 + 1, key, value) - 1
        expected = (
            clattn.scaled_dot_product_attention(expected * 2 + 1, *arrays[1:], device=device) - 1
        )
    close(x, expected)


def test_out_may_be_an_input(device, queue):
    arrays = to_arrays(queue, QKV)
    right = clattn.scaled_dot_product_attention(*QKV, device=device)
    assert clattn.scaled_dot_product_attention(*arrays, out=arrays[0]) is arrays[0]
    close(arrays[0], right)
    many = [draw((1, 2, 700, 8), seed=n) for n in range(3)]  # the first rows are done early
    right_of_many = clattn.scaled_dot_product_attention(*many, device=device)
    arrays = to_arrays(queue, many)
    close(clattn.scaled_dot_product_attention(*arrays, out=arrays[2]), right_of_many)
    square = cla.to_device(queue, draw((9, 9)))
    kept = square.get()
    assert clattn.tril(square).get().tolist() == np.tril(kept).tolist()
    wide = cla.zeros(queue, (2, 3, 17, 16), np.float32)
    clattn.scaled_dot_product_attention(*to_arrays(queue, QKV), out=wide[..., ::2])
    np.testing.assert_allclose(wide.get()[..., ::2], right, rtol=0, atol=4e-6)
    assert (wide.get()[..., 1::2] == 0).all()


def test_results_come_from_the_allocator(queue):
    pool = MemoryPool(ImmediateAllocator(queue))
    arrays = [cla.to_device(queue, array, allocator=pool) for array in QKV]
    before = pool.active_bytes
    result = clattn.scaled_dot_product_attention(*arrays)
    assert result.allocator is pool
    assert pool.active_bytes > before
    del arrays, result
    gc.collect()
    assert pool.active_bytes == 0


def test_buffers_are_let_go(queue):
    arrays = to_arrays(queue, QKV)
    count = cl.mem_info.REFERENCE_COUNT
    for _ in range(3):
        result = clattn.scaled_dot_product_attention(*arrays)
    queue.finish()
    assert [a.base_data.get_info(count) for a in (*arrays, result)] == [1] * 4


def test_other_operators(device, queue):
    """Tensors and caches on the queue's device, tables of mods, ONNX's operator."""
    adopted = clattn.Device.from_pyopencl(queue)
    arrays = to_arrays(queue, QKV)
    cache = clattn.KVCache(2, 3, 40, 8, device=adopted)
    cache.append(arrays[1], arrays[2])
    right = clattn.scaled_dot_product_attention(*QKV, device=device)
    close(cache.attend(arrays[0], is_causal=False), right)
    tensor = clattn.tensor(QKV[1], device=adopted)
    close(clattn.scaled_dot_product_attention(arrays[0], tensor, arrays[2]), right)
    assert clattn.tensor(arrays[0]).device == adopted
    np.testing.assert_array_equal(clattn.tensor(arrays[0], device=device).numpy(), QKV[0])
    close(clattn.onnx.attention(*arrays).Y, right)
    with clattn.use_device(adopted):
        assert clattn.eye(3).tolist() == np.eye(3).tolist()


def test_threads(device, queue):
    arrays, failed = to_arrays(queue, QKV), []
    right = clattn.scaled_dot_product_attention(*QKV, device=device)

    def work():
        try:
            for _ in range(20):
                close(clattn.scaled_dot_product_attention(*arrays), right)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_what_is_refused(device, queue):
    q, k, v = arrays = to_arrays(queue, QKV)
    shape, elsewhere = QKV[0].shape, cl.Context(queue.context.devices)
    backwards = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    swapped = cla.Array(queue, shape, np.dtype(">f4"))
    odd = cla.Array(queue, shape, np.float32, data=q.base_data, offset=2)
    short = cla.Array(queue, shape, np.float32, data=q.base_data, offset=4)
    foreign = cla.Array(cl.CommandQueue(elsewhere), shape, np.float32, data=q.base_data)
    read_only = cl.Buffer(queue.context, cl.mem_flags.READ_ONLY, q.nbytes)
    constant = cla.Array(queue, shape, np.float32, data=read_only)
    pixels = cl.ImageFormat(cl.channel_order.R, cl.channel_type.FLOAT)
    image = cl.create_image(queue.context, cl.mem_flags.READ_WRITE, pixels, shape=(64, 64))
    picture = cla.Array(queue, (4, 4), np.float32, data=image)
    shared = SVMAllocator(queue.context, queue=queue)
    cases = [
        ((cla.empty(queue, shape, np.float32, allocator=shared), k, v), {}, TypeError, "SVM"),
        ((q.with_queue(None), k, v), {}, ValueError, r"query has no queue.*with_queue"),
        ((foreign, k, v), {}, ValueError, "query lies in a buffer of another OpenCL context"),
        ((q, k.with_queue(cl.CommandQueue(queue.context)), v), {}, ValueError, "have one queue"),
        (arrays, {"device": device}, ValueError, "have one queue"),
        ((q, k, clattn.tensor(QKV[2], device=device)), {}, ValueError, "value is on device"),
        ((swapped, k, v), {}, ValueError, "byte order"),
        ((odd, k, v), {}, ValueError, "offset 2"),
        ((short, k, v), {}, ValueError, r"from byte 4 to byte \d+ of a buffer of"),
        ((picture, k, v), {}, ValueError, "image"),
        ((q.astype(np.complex64), k, v), {}, TypeError, "query"),
        (arrays, {"out": constant}, ValueError, "out is read-only"),
        (arrays, {"out": k}, ValueError, "out has shape"),
        (arrays, {"out": q.astype(np.float64)}, TypeError, "out has dtype"),
    ]
    for given, options, error, words in cases:
        with pytest.raises(error, match=words):
            clattn.scaled_dot_product_attention(*given, **options)
    with pytest.raises(TypeError, match=r"queue is of type int; expected a pyopencl\.CommandQueue"):
        clattn.Device.from_pyopencl(3)
    if queue.device.queue_properties & backwards:
        with pytest.raises(ValueError, match="out of order"):
            clattn.Device.from_pyopencl(cl.CommandQueue(queue.context, properties=backwards))
    close(clattn.scaled_dot_product_attention(*arrays), clattn.scaled_dot_product_attention(*QKV))


def test_without_pyopencl():
    code = r"""
        import sys, pytest
        import clattn
        assert "pyopencl" not in sys.modules
        sys.modules["pyopencl"] = None
        with pytest.raises(ImportError, match='pip install "pyopencl>=2024.1"'):
            clattn.Device.from_pyopencl(3)
    """
    run_python(code)


SHARING = """
import ctypes, sys
import numpy as np

order, platform, name, other = sys.argv[1:]
if other:
    ctypes.CDLL(other)
if order == "clattn first":
    import clattn
    clattn.devices()
import pyopencl as cl, pyopencl.array as cla
if order == "pyopencl asked first":
    cl.get_platforms()
import clattn, clattn._host.drivers as drivers
clattn.devices()

def attend(device):
    "Through a queue of pyopencl's, and its arrays."
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    x = np.random.default_rng(0).standard_normal((1, 2, 9, 8), np.float32)
    adopted = clattn.Device.from_pyopencl(queue)
    right = clattn.scaled_dot_product_attention(x, x, x, device=adopted)
    a = cla.to_device(queue, x)
    result = clattn.scaled_dot_product_attention(a, a, a).get()
    np.testing.assert_allclose(result, right, rtol=0, atol=4e-6)

every = [device for platform in cl.get_platforms() for device in platform.get_devices()]
found = [device for device in every if (device.platform.name, device.name) == (platform, name)]
ours = {(device.platform, device.name) for device in clattn._core.all_devices()}
"""


def share(device, order, code, other="", **env):
    """Run code after SHARING in a process that imports clattn and pyopencl in this order."""
    make_context(device)
    env["PYOPENCL_HOME"] = None  # an import of pyopencl sets it
    return run_python(SHARING + code, order, device.platform, device.name, other, env=env)


@pytest.mark.parametrize("order", ["clattn first", "pyopencl first", "pyopencl asked first"])
@pytest.mark.parametrize("chosen", [False, True], ids=["found", "chosen"])
def test_both_call_one_loader(device, order, chosen):
    """Whatever name it has, and whoever opens it; the user may choose drivers.

    If pyopencl has asked for platforms before clattn could name the drivers of pip, both have
    pyopencl's.
    """
    code = """
assert drivers.loaders_in_use() == [clattn._core.loader()] == [drivers.loader_of_pyopencl()]
assert ours == {(device.platform.name, device.name) for device in every}
assert found or order == "pyopencl asked first"
for device in found:
    attend(device)
"""
    vendors = os.environ.get("OCL_ICD_VENDORS", drivers.SYSTEM_VENDORS) if chosen else None
    done = share(device, order, code, OCL_ICD_VENDORS=vendors, OCL_ICD_FILENAMES=None)
    assert "fault" not in done.stderr


def test_a_loader_of_its_own(device):
    """Another package has opened a loader before, so clattn calls that: pyopencl has another.

    Its queues and arrays are refused, unless it was imported before clattn's first call.
    """
    if drivers._installed_loader_of_pyopencl() is None:
        pytest.skip("this pyopencl calls the system's loader; the wheel has one of its own")
    other = ctypes.util.find_library("OpenCL")
    if other is None:
        pytest.skip("the system has no loader beside that of pyopencl's wheel")
    code = """
ours, theirs = clattn._core.loader().decode(), drivers.loader_of_pyopencl().decode()
assert other in ours and ours != theirs
for _ in range(2):
    try:
        attend(found[0])
    except clattn.DeviceError as error:
        said = str(error)
    assert "import pyopencl before clattn's first call" in said
    assert ours in said and theirs in said
context = cl.Context([found[0]])
array = cla.zeros(cl.CommandQueue(context), 5, np.float32)
try:
    clattn.tensor(array)
except clattn.DeviceError as error:
    assert str(error) == said
else:
    raise SystemExit("the array was taken")
x = np.ones((1, 2, 9, 8), np.float32)
np.testing.assert_allclose(clattn.scaled_dot_product_attention(x, x, x), x, atol=1e-6)
"""
    done = share(device, "clattn first", code, other)
    assert "fault" not in done.stderr
    remedy = """
assert clattn._core.loader() == drivers.loader_of_pyopencl()
attend(found[0])
"""
    share(device, "pyopencl first", remedy, other)


def test_a_pyopencl_that_has_found_no_platform(tmp_path):
    """Its loader does not look again, so clattn calls another."""
    code = """
        import os, sys
        import pyopencl as cl, pytest
        with pytest.raises(cl.LogicError, match="PLATFORM_NOT_FOUND"):
            cl.get_platforms()
        del os.environ["OCL_ICD_VENDORS"]
        import clattn, clattn._host.drivers as drivers
        assert clattn.devices()
        assert clattn._core.loader() != drivers.loader_of_pyopencl()
    """
    if drivers._wheel_libraries() is None or drivers._installed_loader_of_pyopencl() is None:
        pytest.skip("needs pyopencl's wheel, and intel-opencl-rt, which has a loader too")
    run_python(code, env={"OCL_ICD_VENDORS": tmp_path, "OCL_ICD_FILENAMES": None})
