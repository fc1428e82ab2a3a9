# SPDX-License-Identifier: MIT
"""Where the numbers lie: any strides in, any strides out, nothing else read into or written.

What each variant does with strides is in test_kernel_contract.py; here are arrays that are copied
before, or whose results are.
"""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from references.attention import DTYPES, attention, bfloat16
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.layouts import (
    LAYOUTS,
    ODD,
    misaligned,
    negative_everywhere,
    read_only,
    record_field,
    sliced,
    transposed,
)
from support.loops import looped, looped_dtypes
from support.processes import run_on

pytestmark = pytest.mark.tensors

LEAD, L, S, E = (2, 3), 17, 33, 8


layouts = looped("layout", LAYOUTS, ids=lambda f: f.__name__)


@looped_dtypes("dtype", DTYPES)
def test_strides_in_every_dtype(device, dtype):
    """Of inputs and of out."""
    q, k, v = qkv(LEAD, L, S, E, dtype=dtype)
    check_attention(sliced(q), negative_everywhere(k), transposed(v), device=device)
    for layout in (np.array, sliced):
        out = layout(np.zeros(result_shape(v), dtype))
        assert check_attention(q, k, v, device=device, out=out) is out


def test_zero_strides(device):
    """broadcast_to in every dimension, one at a time, then in all of them."""
    arrays = qkv(LEAD, L, S, E)
    for axis in range(4):
        first = tuple(slice(0, 1) if n == axis else slice(None) for n in range(4))
        q, k, v = (np.broadcast_to(a[first], a.shape) for a in arrays)
        # Values that are all alike come back. Adding S equal terms rounds the same way S times,
        # so the bound is that of the worst case: S eps / 2.
        slack = S * np.finfo(np.float32).eps / 2 * np.abs(v).max()
        right, _ = attention(q, k, v)
        assert_close(sdpa(q, k, v, device=device), right, slack)
        if axis != 2:
            check_attention(q, k, v, device=device)
    half = (np.broadcast_to(np.float32(0.5), a.shape) for a in arrays)
    np.testing.assert_allclose(sdpa(*half, device=device), 0.5, rtol=0, atol=slack)


def test_one_array_three_times(device):
    a = draw((*LEAD, S, E))
    check_attention(a, a, a, device=device)
    check_attention(a, a[..., ::-1, :], a[..., ::-1], device=device)


def test_a_memory_mapped_file(device, tmp_path):
    """numpy.memmap is an array like any other; opened for reading it stays as it is."""
    k = draw((*LEAD, S, E))
    k.tofile(tmp_path / "key")
    mapped = np.memmap(tmp_path / "key", np.float32, "r", shape=k.shape)
    check_attention(draw((*LEAD, L, E)), mapped, mapped, device=device)
    assert np.fromfile(tmp_path / "key", np.float32).tobytes() == k.tobytes()


@looped("layout", ODD, ids=lambda f: f.__name__)
def test_odd_layouts(device, layout):
    """They are copied first."""
    q, k, v = qkv(LEAD, L, S, E)
    check_attention(layout(q), layout(k), layout(v), device=device)
    check_attention(q, k, layout(v), device=device)
    check_attention(q, k, v, device=device, attn_mask=layout(draw((L, S))))


@looped("layout", [misaligned, record_field], ids=lambda f: f.__name__)
def test_odd_layouts_of_bfloat16(device, layout):
    q, k, v = qkv(LEAD, L, S, E, dtype=bfloat16)
    check_attention(q, layout(k), layout(v), device=device)


def result_shape(v):
    return (*LEAD, L, v.shape[-1])


@layouts
def test_out(device, layout):
    """Written and returned, whatever its strides; nothing between its entries is touched."""
    if layout is read_only:
        return  # refused: see test_attention_errors
    q, k, v = qkv(LEAD, L, S, E)
    out = layout(np.full(result_shape(v), -1, np.float32))
    owner = out if out.base is None else out.base
    while owner.base is not None:
        owner = owner.base
    guards = np.isnan(owner).sum()
    result = check_attention(q, k, v, device=device, out=out, return_lse=False)
    assert result is out
    assert np.isnan(owner).sum() == guards, "written outside of out"


@looped("layout", ODD, ids=lambda f: f.__name__)
def test_odd_out(device, layout):
    q, k, v = qkv(LEAD, L, S, E)
    out = layout(np.zeros(result_shape(v), np.float32))
    assert sdpa(q, k, v, device=device, out=out) is out
    np.testing.assert_array_equal(out, sdpa(q, k, v, device=device))


def test_out_has_guards_on_both_sides(device):
    """Odd sizes into the middle of a buffer: not one element before or after changes."""
    for shape in ((1, 1), (17, 33), (33, 1), (97, 100)):
        q, k, v = qkv((1,), *shape, E)
        buffer = np.full(v[0, 0].size * shape[0] + 256, 7.5, np.float32)
        out = buffer[128:-128].reshape(1, shape[0], E)
        check_attention(q, k, v, device=device, out=out)
        assert (buffer[:128] == 7.5).all() and (buffer[-128:] == 7.5).all()


def test_out_may_be_the_mask(device):
    """The result is as if the inputs had been read first."""
    arrays = qkv(LEAD, 64, 64, 64)
    mask = draw((*LEAD, 64, 64), seed=6)
    right = check_attention(*arrays, device=device, attn_mask=mask, is_causal=True)
    assert sdpa(*arrays, mask, device=device, is_causal=True, out=mask) is mask
    np.testing.assert_allclose(mask, right, rtol=0, atol=1e-6)


@looped("shift", [1, E, -E, 5 * E + 3])
def test_out_may_overlap_an_input_in_part(device, shift):
    q, k, _ = qkv((1,), S, S, E)
    buffer = draw((1, 4 * S, E), seed=7)
    start = S * E
    v = buffer.reshape(-1)[start : start + S * E].reshape(1, S, E)
    out = buffer.reshape(-1)[start + shift : start + shift + S * E].reshape(1, S, E)
    right = check_attention(q, k, v.copy(), device=device)
    sdpa(q, k, v, device=device, out=out)
    np.testing.assert_allclose(out, right, rtol=0, atol=1e-6)


def test_out_backwards_over_an_input(device):
    a = draw((1, S, E))
    right = check_attention(a.copy(), a.copy(), a.copy(), device=device)
    sdpa(a, a, a, device=device, out=a[:, ::-1])
    np.testing.assert_allclose(a[:, ::-1], right, rtol=0, atol=1e-6)


def test_out_with_lse(device):
    q, k, v = qkv(LEAD, L, S, E)
    out = np.empty(result_shape(v), np.float32)
    got, lse = sdpa(q, k, v, device=device, out=out, return_lse=True)
    assert got is out
    np.testing.assert_array_equal(lse, sdpa(q, k, v, device=device, return_lse=True)[1])


def test_a_single_row_with_a_wild_stride(device):
    """The stride of a dimension of one, or of an empty one, means nothing."""
    q, k, v = qkv((1, 1), 1, S, E)
    wild = as_strided(q, q.shape, (1 << 40, -(1 << 40), 1 << 50, 4))
    check_attention(wild, k, v, device=device)
    check_attention(q[:, :0], k[:, :0], v[:, :0], device=device)


WILD = {  # arguments that have a dimension of one
    "key": qkv((1, 1), 5, 1, E)[1],
    "value": qkv((1, 1), 5, 1, E)[2],
    "attn_mask": np.zeros((1, 1, 5, 1), np.float32),
    "sinks": np.ones(1, np.float32),
    "out": np.zeros((1, 1, 5, E), np.float32),
}


@pytest.mark.arrays_only  # a Tensor's strides are clattn's
@looped("name", WILD)
def test_wild_strides_of_any_argument(device, name):
    arrays = dict(zip(("query", "key", "value"), qkv((1, 1), 5, 1, E), strict=True))
    array = WILD[name]
    steps = [step if n > 1 else 1 << 50 for n, step in zip(array.shape, array.strides, strict=True)]
    right = sdpa(**arrays | {name: array.copy()}, device=device)
    got = sdpa(**arrays | {name: as_strided(array, array.shape, steps)}, device=device)
    np.testing.assert_array_equal(got, right)


@pytest.mark.arrays_only  # no Tensor has such strides
@looped("strides", [(0, 0), (0, 1), (E, 0), (1, 1), (E - 1, 1), (-3, 2)])
def test_out_whose_elements_coincide(device, strides):
    """Such an out is refused, and nothing is written."""
    q, k, v = qkv((), 5, 7, E)
    memory = np.ones(200, np.float32)
    out = as_strided(memory[100:], (5, E), [4 * n for n in strides])
    with pytest.raises(ValueError, match="out has elements that share memory"):
        sdpa(q, k, v, device=device, out=out)
    assert (memory == 1).all()


@pytest.mark.arrays_only  # its own process has no Tensors
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_packing_takes_no_memory(device, dtype):
    """Heads side by side are packed, half types converted: 128 MiB of float32 for all keys."""
    if device.type != "cpu":
        pytest.skip("the device has its own memory")
    run_on(
        device,
        """
        packed = np.full((1, 32768, 3, 8, 64), 0.5, sys.argv[2])
        q, k, v = (packed[:, :, n].swapaxes(1, 2) for n in range(3))
        sdpa(q[..., :200, :], k[..., :300, :], v[..., :300, :], device=device)
        result, rise = measure_memory(lambda: sdpa(q[..., :200, :], k, v, device=device))
        assert rise < 8 * MIB, f"{rise / MIB:.0f} MiB"
        np.testing.assert_array_equal(result, np.float32(0.5))
        """,
        dtype,
    )
