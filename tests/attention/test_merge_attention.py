# SPDX-License-Identifier: MIT
"""merge_attention: results over parts of the keys, joined."""

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, attention, eps, float32, float64, max_error, tolerance
from support.checks import assert_close
from support.data import draw, qkv, sdpa
from support.foreign import LIBRARIES, same
from support.masks import INF, NAN

PARTS = [slice(0, 7), slice(7, 8), slice(8, 40)]


def merged(parts):
    """The formula in long doubles: (out, lse)."""
    outs, lses = (np.stack([part[n].astype(np.longdouble) for part in parts]) for n in (0, 1))
    with np.errstate(all="ignore"):
        high = lses.max(0)
        base = np.where(np.isneginf(high), 0, high)
        weights = np.exp(lses - base)
        total = weights.sum(0)
        terms = np.where(np.isneginf(lses)[..., None], 0, weights[..., None] * outs)
        out = terms.sum(0) / np.where(total == 0, 1, total)[..., None]
        return out, np.where(np.isneginf(high), -INF, base + np.log(total))


def parts_of(arrays, device, slices=PARTS, **options):
    q, k, v = arrays
    return [sdpa(q, k[..., s, :], v[..., s, :], device=device, return_lse=True, **options)
            for s in slices]  # fmt: skip


def merge(parts, device):
    """Arrays go to the device that is the default."""
    with clattn.use_device(device):
        return clattn.merge_attention(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_the_whole(device, dtype):
    """As one call with all keys; a half type is rounded in each part and once more."""
    arrays = qkv((2, 3), 5, 40, 16, dtype=dtype)
    out, lse = merge(parts_of(arrays, device), device)
    right, right_lse = attention(*arrays)
    allowed, allowed_lse = tolerance(*arrays)
    assert out.dtype == dtype and lse.dtype == right_lse.astype(lse.dtype).dtype
    assert_close(out, right, allowed + eps(dtype) * np.abs(right).max())
    assert_close(lse, right_lse, 2 * allowed_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding(device, dtype):
    """Results are rounded once: many parts add nothing to the error of a half type."""
    compute = float64 if dtype == float64 else float32
    parts = [(draw((3, 9, 20), dtype, n), 4 * draw((3, 9), compute, n)) for n in range(17)]
    out, lse = merge(parts, device)
    right, right_lse = merged(parts)
    largest = float(np.abs(right).max())
    assert max_error(out, right) <= eps(dtype) / 2 * largest + 40 * eps(compute)
    assert max_error(lse, right_lse) <= 10 * eps(compute) * float(np.abs(right_lse).max())


def test_rows_without_a_key(device):
    """They have no weight, whatever they hold; if no part has a key, zeros and -inf."""
    parts = [(draw((4, 3, 8), seed=n), draw((4, 3), seed=n)) for n in range(3)]
    for n, bad in enumerate((NAN, INF, 5)):
        parts[n][1][n] = -INF
        parts[n][0][n] = bad
        parts[n][1][3], parts[n][0][3] = -INF, bad
    out, lse = merge(parts, device)
    right, right_lse = merged(parts)
    np.testing.assert_allclose(out, right.astype(float32), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, right_lse.astype(float32), rtol=1e-6)
    assert not out[3].any() and np.isneginf(lse[3]).all()


def test_lses_far_apart(device):
    """Sums of exponentials would overflow; a NaN shows in its row."""
    lses = [np.array(x, float32) for x in ([3e38, -3e38, 500, 0], [3e38, -3e38, -500, NAN])]
    outs = [np.full((4, 2), x, float32) for x in (2, 4)]
    out, lse = merge(list(zip(outs, lses, strict=True)), device)
    np.testing.assert_allclose(out[:3], [[3, 3], [3, 3], [2, 2]], rtol=1e-6)
    np.testing.assert_allclose(lse[:3], [3e38, -3e38, 500], rtol=1e-6)
    assert np.isnan(out[3]).all() and np.isnan(lse[3])


def test_any_order_and_grouping(device):
    """One part is itself; merging merged parts is merging all."""
    parts = parts_of(qkv((2, 3), 5, 40, 16), device)
    out, lse = merge(parts, device)
    for others in (parts[::-1], [merge(parts[:2], device), parts[2]],
                   [parts[0], merge(parts[1:], device)]):  # fmt: skip
        again = merge(others, device)
        np.testing.assert_allclose(again[0], out, rtol=0, atol=1e-6)
        np.testing.assert_allclose(again[1], lse, rtol=1e-6)
    alone = merge(parts[:1], device)
    np.testing.assert_allclose(alone[0], parts[0][0], rtol=2e-7)
    np.testing.assert_allclose(alone[1], parts[0][1], rtol=2e-7)
    assert not np.shares_memory(alone[0], parts[0][0])


def test_causal_blocks(device):
    """As ring attention: queries of the second half, with an offset, over two halves of keys."""
    q, k, v = qkv((2, 3), 80, 80, 16)
    right, right_lse = sdpa(q, k, v, device=device, is_causal=True, return_lse=True)
    options = {"device": device, "is_causal": True, "return_lse": True}
    halves = [(k[:, :, s : s + 40], v[:, :, s : s + 40], 40 - s) for s in (0, 40)]
    parts = [sdpa(q[:, :, 40:], *half, query_offset=offset, **options) for *half, offset in halves]
    out, lse = merge(parts, device)
    np.testing.assert_allclose(out, right[:, :, 40:], rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, right_lse[:, :, 40:], rtol=2e-6)


def test_shapes(device):
    """Two dimensions and many, none of a size; iterators and lists."""
    for shape in ((5, 8), (2, 1, 3, 2, 1, 5, 8), (3, 0, 8), (0, 5, 8), (3, 5, 0)):
        parts = [[draw(shape, seed=n), draw(shape[:-1], seed=n)] for n in range(3)]
        out, lse = merge(iter(parts), device)
        right, right_lse = merged(parts)
        assert out.shape == shape and lse.shape == shape[:-1]
        np.testing.assert_allclose(out, right.astype(float32), rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse, right_lse.astype(float32), rtol=0, atol=2e-6)


def test_layouts(device):
    parts = [(draw((6, 5, 8), seed=n), draw((6, 5), seed=n)) for n in range(2)]
    right = merge(parts, device)
    turned = [(np.asfortranarray(out)[...], lse[::-1].copy()[::-1]) for out, lse in parts]
    for got, expected in zip(merge(turned, device), right, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_tensors(device):
    """Tensors in, Tensors on the same device out; views of them too."""
    parts = [(draw((6, 5, 8), seed=n), draw((6, 5), seed=n)) for n in range(2)]
    right = merge(parts, device)
    tensors = [tuple(clattn.tensor(a, device) for a in part) for part in parts]
    for given in (tensors, [tensors[0], parts[1]]):
        answer = clattn.merge_attention(given)
        for got, expected in zip(answer, right, strict=True):
            assert type(got) is clattn.Tensor and got.device == device
            same(got, expected)
    flat = [(out.transpose(1, 0, 2), lse.T) for out, lse in tensors]
    out, lse = clattn.merge_attention(flat)
    np.testing.assert_allclose(out.numpy(), right[0].transpose(1, 0, 2), rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse.numpy(), right[1].T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_libraries(device, library):
    """The results are of the first result's library."""
    parts = [(draw((6, 5, 8), seed=n), draw((6, 5), seed=n)) for n in range(2)]
    right = merge(parts, device)
    given = [tuple(library.of(a) for a in part) for part in parts]
    for got, expected in zip(merge(given, device), right, strict=True):
        library.check(got, expected)


def good(n=0, out="f4", lse="f4"):
    return draw((2, 5, 8), out, n), draw((2, 5), lse, n)


WRONG = [
    (ValueError, "empty", []),
    (TypeError, r"parts\[1\].*pair.*3 elements", [good(), (*good(), 1)]),
    (TypeError, r"parts\[0\].*pair.*ndarray", [draw((2, 5, 8))]),
    (TypeError, r"parts\[1\].*pair.*NoneType", [good(), None]),
    (TypeError, r"parts\[0\]\[0\]", [([1.0], good()[1])]),
    (TypeError, r"parts\[1\]\[1\]", [good(), (good()[0], None)]),
    (TypeError, r"parts\[0\]\[0\].*int32", [(np.zeros((2, 5), np.int32), np.zeros(2, "f4"))]),
    (TypeError, r"parts\[1\]\[0\].*float64.*float32", [good(), good(1, "f8", "f8")]),
    (TypeError, r"parts\[0\]\[1\].*float64.*float32", [good(lse="f8")]),
    (TypeError, r"parts\[0\]\[1\].*float32.*float64", [good(out="f8")]),
    (TypeError, r"parts\[0\]\[1\].*float16.*float32", [good(0, "f2", "f2")]),
    (ValueError, r"parts\[1\]\[0\].*\(2, 5, 7\).*\(2, 5, 8\)",
     [good(), (draw((2, 5, 7)), good()[1])]),
    (ValueError, r"parts\[0\]\[1\].*\(2, 5, 1\).*\(2, 5\)", [(good()[0], good()[1][..., None])]),
    (ValueError, r"parts\[0\]\[0\].*\(5,\).*two", [(draw((5,)), np.float32(1)[None])]),
    (ValueError, r"parts\[0\]\[0\].*\(\).*two", [(np.zeros((), "f4"), np.zeros((), "f4"))]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "parts"), WRONG, ids=[w[1] for w in WRONG])
def test_wrong_parts(device, error, message, parts):
    with pytest.raises(error, match=message):
        merge(parts, device)
    merge([good(), good(1)], device)


def test_no_parts_at_all():
    for parts in (3, None):
        with pytest.raises(TypeError, match=r"parts must be pairs \(out, lse\)"):
            clattn.merge_attention(parts)


def test_an_error_of_the_iterator_is_its_own():
    with pytest.raises(TypeError, match="of the caller"):
        clattn.merge_attention(pair for pair in raising(TypeError("of the caller")))


def raising(error):
    yield good()
    raise error


def test_arrays_of_pyopencl(device):
    cl = pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    arrays = pytest.importorskip("pyopencl.array")
    queue = cl.CommandQueue(cl.create_some_context(interactive=False))
    parts = [good(n) for n in range(2)]
    given = [tuple(arrays.to_device(queue, np.ascontiguousarray(a)) for a in p) for p in parts]
    for got, right in zip(clattn.merge_attention(given), merge(parts, device), strict=True):
        assert type(got) is arrays.Array
        np.testing.assert_allclose(got.get(), right, rtol=0, atol=1e-6)


def test_tensors_of_two_devices():
    devices = clattn.devices()
    if len(devices) < 2:
        pytest.skip("one device")
    parts = [tuple(clattn.tensor(a, d) for a in good()) for d in devices[:2]]
    with pytest.raises(ValueError, match=r"parts\[1\]\[0\].*device"):
        clattn.merge_attention(parts)
    with pytest.raises(ValueError, match=r"parts\[0\]\[1\].*device"):
        clattn.merge_attention([(parts[0][0], parts[1][1])])
