# SPDX-License-Identifier: MIT
"""Tensor.__dlpack__ and __dlpack_device__: what consumers get, field by field, and who frees it."""

import contextlib
import ctypes
import gc
from functools import partial

import clattn
import numpy as np
import pytest
import support.dlpack_structs as dlpack
from references.diagonal import DTYPES, bfloat16, numbers
from support.data import draw, sdpa
from support.loops import looped
from support.processes import index_of, run_on
from support.sizes import WIDE
from support.tensors import in_host_memory, same_bits, settled
from support.threads import run_together

with contextlib.suppress(ImportError):  # before conftest.py says what garbage collection sees
    import torch

dtypes = looped("dtype", DTYPES)
VERSIONS = {  # max_version and the capsule's name
    None: b"dltensor",
    (0, 8): b"dltensor",
    (1, 0): b"dltensor_versioned",
    (1, 5): b"dltensor_versioned",
    (2, 0): b"dltensor_versioned",
}
each_version = looped("version", VERSIONS)


@pytest.fixture
def host(device):
    """A device whose memory is the host's."""
    if not in_host_memory(device):
        pytest.skip("the device has memory of its own")
    return device


def host_capsule(t, **options):
    """A capsule of host memory, wherever the Tensor is."""
    return t.__dlpack__(dl_device=(dlpack.HOST, 0), **options)


def values_of(struct, dtype):
    """What a struct in host memory describes, as an array; nothing is copied."""
    t = struct.dl_tensor
    shape, steps = t.shape[: t.ndim], t.strides[: t.ndim]
    if 0 in shape:
        return np.empty(shape, dtype)
    lowest = sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if s < 0)
    highest = sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if s > 0)
    start = t.data + t.byte_offset + lowest * dtype.itemsize
    octets = (ctypes.c_uint8 * ((highest - lowest + 1) * dtype.itemsize)).from_address(start)
    flat = np.frombuffer(octets, dtype)[-lowest:]
    strides = [s * dtype.itemsize for s in steps]
    return np.lib.stride_tricks.as_strided(flat, shape, strides)


def test_the_device_of_a_tensor(device):
    t = clattn.tensor(np.ones(3), device)
    here = (dlpack.HOST, 0) if in_host_memory(device) else (dlpack.OPENCL, index_of(device))
    assert t.__dlpack_device__() == here
    assert [type(n) for n in t.__dlpack_device__()] == [int, int]


CODES = {"f": dlpack.FLOAT, "i": dlpack.INT, "u": dlpack.UINT, "b": dlpack.BOOL}


@each_version
@dtypes
def test_fields(device, dtype, version):
    """Contiguous, a view with an offset, and one that runs backwards, which is copied."""
    a = numbers((4, 3, 5), dtype)
    t = clattn.tensor(a, device)
    for view, right in ((t, a), (t[1:, :, 2], a[1:, :, 2]), (t[::-1, ::2].T, a[::-1, ::2].T)):
        capsule = host_capsule(view, max_version=version)
        assert dlpack.get_name(capsule) == VERSIONS[version]
        struct = dlpack.look_into(capsule)
        got = struct.dl_tensor
        assert (got.device_type, got.device_id, got.ndim) == (dlpack.HOST, 0, right.ndim)
        code = dlpack.BFLOAT if dtype == bfloat16 else CODES[dtype.kind]
        assert (got.code, got.bits, got.lanes) == (code, 8 * dtype.itemsize, 1)
        assert tuple(got.shape[: got.ndim]) == right.shape
        shared = in_host_memory(device) and min(view.strides) >= 0
        if shared:
            assert tuple(s * dtype.itemsize for s in got.strides[: got.ndim]) == view.strides
        same_bits(values_of(struct, dtype).copy(), right)
        if VERSIONS[version] == b"dltensor_versioned":
            assert struct.major == 1
            assert not struct.flags & dlpack.READ_ONLY
            assert bool(struct.flags & dlpack.IS_COPIED) != shared


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2**40), (1,) * 64], ids=len)
def test_odd_shapes(device, shape):
    a = numbers(shape, np.dtype("i2"))
    capsule = host_capsule(clattn.tensor(a, device), max_version=(1, 0))
    struct = dlpack.look_into(capsule)
    assert tuple(struct.dl_tensor.shape[: struct.dl_tensor.ndim]) == shape
    same_bits(values_of(struct, a.dtype).copy(), a)


def test_memory_is_shared(host):
    """The very bytes that numpy() shows."""
    t = clattn.tensor(np.zeros((4, 6), np.float32), host)
    view = t[1:, 1::2]
    for ask in ({}, {"copy": False}, {"dl_device": (dlpack.HOST, 0)}, {"copy": None},
                {"dl_device": (dlpack.HOST, 0), "copy": False}, {"stream": None}):  # fmt: skip
        struct = dlpack.look_into(capsule := view.__dlpack__(max_version=(1, 0), **ask))
        address = struct.dl_tensor.data + struct.dl_tensor.byte_offset
        assert address == view.numpy().__array_interface__["data"][0]
        assert not struct.flags & dlpack.IS_COPIED
        del capsule


@each_version
def test_a_copy_that_is_asked_for(device, version):
    a = numbers((4, 6), np.dtype("f4"))
    t = clattn.tensor(a, device)
    capsule = host_capsule(t[:, ::-1], copy=True, max_version=version)
    struct = dlpack.look_into(capsule)
    got = values_of(struct, a.dtype)
    assert not np.shares_memory(got, t.numpy())
    if VERSIONS[version] == b"dltensor_versioned":
        assert struct.flags & dlpack.IS_COPIED
    same_bits(got.copy(), a[:, ::-1])
    got[...] = 0
    same_bits(t, a)


def test_numpy_takes_it(device):
    a = numbers((4, 6), np.dtype("f4"))
    t = clattn.tensor(a, device)
    got = np.from_dlpack(t[1:, ::2], device="cpu")
    same_bits(got, a[1:, ::2])
    assert np.shares_memory(got, t.numpy()) == in_host_memory(device)
    same_bits(np.from_dlpack(t, device="cpu", copy=True), a)
    if in_host_memory(device):
        got = np.from_dlpack(t)
        assert got.flags.writeable
        got[...] = 1
        assert (t.numpy() == 1).all()
        assert np.shares_memory(np.from_dlpack(t, copy=False), got)
    else:
        with pytest.raises((BufferError, RuntimeError)):
            np.from_dlpack(t)
        with pytest.raises((BufferError, ValueError)):
            np.from_dlpack(t, device="cpu", copy=False)


@dtypes
def test_torch_takes_it(device, dtype):
    pytest.importorskip("torch")
    a = numbers((4, 6), dtype)
    t = clattn.tensor(a, device)
    view = t[1:, ::2]
    if not in_host_memory(device):  # torch knows no OpenCL, and asks for no copy itself
        view = host_capsule(view, max_version=(1, 0))
    got = torch.from_dlpack(view)
    assert str(got.dtype) == f"torch.{dtype}" and got.shape == (3, 3)
    raw = got.contiguous().view(torch.uint8).numpy()
    assert raw.tobytes() == a[1:, ::2].tobytes()
    if in_host_memory(device):
        got[...] = 1
        assert (t[1:, ::2].numpy().astype("f8") == 1).all()
    del t, view
    gc.collect()
    assert got.shape == (3, 3)


def test_what_cannot_be_had(device):
    t = clattn.tensor(np.ones((2, 3)), device)
    for options in ({"stream": 1}, {"stream": -1}, {"stream": 0}, {"dl_device": (2, 0)},
                    {"dl_device": (dlpack.HOST, 1)}, {"dl_device": (13, 0)},
                    {"dl_device": (-1, 0)}, {"dl_device": (2**31, 0)}):  # fmt: skip
        with pytest.raises(BufferError) as caught:
            t.__dlpack__(**options)
        assert next(iter(options)) in str(caught.value)
    for view in (t[::-1], t[:, ::-1], *([] if in_host_memory(device) else [t])):
        with pytest.raises(BufferError, match="copy"):
            host_capsule(view, copy=False)


def test_torch_takes_what_runs_backwards(host):
    """Torch ends the process at a negative stride."""
    torch = pytest.importorskip("torch")
    a = numbers((4, 6), np.dtype("f4"))
    for view, right in (
        (clattn.tensor(a, host)[::-1], a[::-1]),
        (clattn.tensor(a, host)[:1, ::-1], a[:1, ::-1]),
    ):
        for take in (torch.from_dlpack, torch.as_tensor, torch.tensor):
            same_bits(take(view).numpy(), right)


@pytest.mark.parametrize(
    "options",
    [{"max_version": 1}, {"max_version": "10"}, {"max_version": (1,)}, {"max_version": (1.5, 0)},
     {"dl_device": 1}, {"dl_device": ("cpu", 0)}, {"dl_device": (1,)}, {"dl_device": "cpu"},
     {"copy": "yes"}, {"version": (1, 0)}],
    ids=repr,
)  # fmt: skip
def test_wrong_arguments(device, options):
    t = clattn.tensor(np.ones((2, 3)), device)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        t.__dlpack__(**options)
    with pytest.raises(TypeError):
        t.__dlpack__(None)


@each_version
def test_a_capsule_that_nobody_takes(device, version):
    """It keeps the memory, and gives it back when it dies."""
    start = settled(device)
    t = clattn.tensor(np.ones(1000), device)
    here = settled(device)
    capsules = [t.__dlpack__(max_version=version) for _ in range(3)]
    assert settled(device) == here
    del t
    assert settled(device) == here
    del capsules
    assert settled(device) == start


@each_version
@pytest.mark.parametrize("where", ["this thread", "another"])
def test_a_consumer_gives_the_memory_back(device, version, where):
    """When its deleter is called, after the Tensor and the capsule are gone."""
    start = settled(device)
    t = clattn.tensor(np.arange(1000.0), device)
    here = settled(device)
    capsule = t[1::2].__dlpack__(max_version=version)
    struct, delete = dlpack.consume(capsule)
    del t, capsule
    gc.collect()
    assert settled(device) == here
    if in_host_memory(device):
        same_bits(values_of(struct, np.dtype("f8")).copy(), np.arange(1000.0)[1::2])
    if where == "this thread":
        delete()
    else:
        run_together(delete)
    assert settled(device) == start


def test_a_consumer_that_fails_half_way(device):
    """It has called the deleter, and left the capsule as it was: memory comes back once."""
    run_on(
        device,
        """
        import support.dlpack_structs as dlpack
        for version in (None, (1, 0)) * 10:
            t = clattn.tensor(np.ones(100), device)
            capsule = t.__dlpack__(max_version=version)
            name, delete = dlpack.get_name(capsule), dlpack.deleter_of(capsule)
            delete()
            assert dlpack.get_name(capsule) == name
            del capsule
            assert (t.numpy() == 1).all()
            assert clattn.memory_stats(device)["allocated_blocks"] == 1
            del t
            assert clattn.memory_stats(device)["allocated_blocks"] == 0
        """,
    )


def test_a_consumer_that_takes_the_destructor(device):
    """As JAX does. Neither the array's memory nor the export's leaks."""
    run_on(
        device,
        """
        import support.dlpack_structs as dlpack
        t = clattn.tensor(np.ones((1,) * 8), device)
        def consume(times):
            for _ in range(times):
                capsule = t.__dlpack__()
                _, delete = dlpack.consume(capsule)
                assert dlpack.set_destructor(capsule, None) == 0
                del capsule
                delete()
        consume(1000)
        start = memory_field("VmRSS")
        consume(20_000)
        assert memory_field("VmRSS") - start < 2**20
        del t
        assert clattn.memory_stats(device)["allocated_blocks"] == 0
        """,
    )


def buffer_values(struct, dtype):
    """What a struct that names an OpenCL buffer describes, read by OpenCL itself."""
    t = struct.dl_tensor
    size, name = ctypes.c_size_t(), ctypes.c_void_p
    opencl, value = dlpack.open_opencl(), name()
    assert opencl.clGetMemObjectInfo(name(t.data), 0x1106, 8, ctypes.byref(value), None) == 0
    context, device = value.value, name()
    assert opencl.clGetContextInfo(name(context), 0x1081, 8, ctypes.byref(device), None) == 0
    assert opencl.clGetMemObjectInfo(name(t.data), 0x1102, 8, ctypes.byref(size), None) == 0
    octets = (ctypes.c_uint8 * size.value)()
    opencl.clCreateCommandQueue.restype = name
    queue = name(opencl.clCreateCommandQueue(name(context), device, ctypes.c_uint64(0), None))
    assert queue
    answer = opencl.clEnqueueReadBuffer(
        queue, name(t.data), 1, ctypes.c_size_t(0), size, octets, 0, None, None
    )
    assert opencl.clReleaseCommandQueue(queue) == 0 and answer == 0
    flat = np.frombuffer(octets, np.uint8)[t.byte_offset :]
    usable = len(flat) // dtype.itemsize * dtype.itemsize
    strides = [s * dtype.itemsize for s in t.strides[: t.ndim]]
    return np.lib.stride_tricks.as_strided(flat[:usable].view(dtype), t.shape[: t.ndim], strides)


@pytest.fixture
def own_memory(device):
    """What __dlpack_device__ says of a device whose memory is not the host's."""
    if in_host_memory(device):
        pytest.skip("the memory is the host's")
    return dlpack.OPENCL, index_of(device)


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_buffers_of_opencl(device, own_memory, version):
    """The buffer, the offset of a view, what calls have put there."""
    a = draw((2, 5, WIDE))
    t = clattn.tensor(a, device)
    result, right = sdpa(t, t, t, device=None), sdpa(a, a, a, device=device)
    for view, values in ((t, a), (t[1:, ::2], a[1:, ::2]), (result.T[3:], right.T[3:])):
        for options in ({}, {"dl_device": own_memory}, {"dl_device": own_memory, "copy": False}):
            capsule = view.__dlpack__(max_version=version, **options)
            struct = dlpack.look_into(capsule)
            assert (struct.dl_tensor.device_type, struct.dl_tensor.device_id) == own_memory
            same_bits(buffer_values(struct, a.dtype).copy(), values)


def test_a_copy_of_a_buffer(device, own_memory):
    """Another buffer of the device, with the same values."""
    a = draw((5, 16))
    t = clattn.tensor(a, device)
    capsules = [t.__dlpack__(max_version=(1, 0), copy=copy) for copy in (None, True)]
    structs = [dlpack.look_into(capsule) for capsule in capsules]
    assert [s.flags & dlpack.IS_COPIED for s in structs] == [0, dlpack.IS_COPIED]
    assert structs[0].dl_tensor.data != structs[1].dl_tensor.data
    for struct in structs:
        same_bits(buffer_values(struct, a.dtype).copy(), a)


def test_many_exports_of_many_threads(device):
    start = settled(device)
    a = draw((64, 64))

    def work(t):
        for _ in range(50):
            same_bits(np.from_dlpack(t[::2], device="cpu"), a[::2])
            _, delete = dlpack.consume(t.__dlpack__(max_version=(1, 0)))
            delete()
            t.__dlpack__()

    t = clattn.tensor(a, device)
    run_together(*[partial(work, t)] * 4)
    del t
    gc.collect()
    assert settled(device) == start


def test_exports_outlive_everything(device):
    """Arrays of others and capsules that are alive when the interpreter ends: no crash."""
    run_on(
        device,
        """
        import support.dlpack_structs as dlpack
        t = clattn.tensor(np.ones((40, 64), np.float32), device)
        kept = np.from_dlpack(t, device="cpu"), t.numpy(), t.__dlpack__(), t[0]
        struct, delete = dlpack.consume(t.__dlpack__(max_version=(1, 0)))
        running = clattn.scaled_dot_product_attention(t, t, t)
        clattn.kept = kept, running
        """,
    )
