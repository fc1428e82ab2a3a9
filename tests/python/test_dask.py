# SPDX-License-Identifier: MIT
"""clattn.dask: attention on arrays in chunks is attention on the whole arrays."""

import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, attention, bfloat16, float32, max_error, tolerance
from support.checks import assert_close
from support.data import draw, qkv
from support.processes import run_python

da = pytest.importorskip("dask.array", reason="dask is not installed")
dask = pytest.importorskip("dask")
clattn_dask = pytest.importorskip("clattn.dask")
sdpa = clattn_dask.scaled_dot_product_attention
trace_for_chunks = pytest.importorskip("clattn.dask.mods").trace_for_chunks

pytestmark = pytest.mark.by_turns  # graphs and chunks depend on no device


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def chunked(array, *chunks):
    """Some last dimensions in chunks; the very last is one."""
    all_chunks = {n - len(chunks) - 1: size for n, size in enumerate(chunks)}
    return da.from_array(array, chunks=-1).rechunk(all_chunks)


def assert_blocks(array, right):
    """Every block has the shape and the dtype that the lazy array says."""
    assert array.shape == right.shape and array._meta.dtype == array.dtype
    for index in np.ndindex(*array.numblocks):
        lazy = array.blocks[index]
        block = lazy.compute()
        assert type(block) is np.ndarray
        assert block.shape == lazy.shape and block.dtype == array.dtype


def check_chunks(arrays, query_chunks, key_chunks, device, value_chunks=None, **options):
    """Chunks of query and key, without the last dimension's, against the reference."""
    right, right_lse = attention(*arrays, **options)
    allowed, allowed_lse = tolerance(*arrays, **options)
    chunks = (query_chunks, key_chunks, value_chunks or key_chunks)
    lazy = [chunked(array, *sizes) for array, sizes in zip(arrays, chunks, strict=True)]
    out, lse = sdpa(*lazy, return_lse=True, device=device, **options)
    assert out.dtype == arrays[0].dtype
    assert lse.dtype == right_lse.astype(lse.dtype).dtype
    assert out.chunks[-2] == lazy[0].chunks[-2] == lse.chunks[-1]
    if arrays[0].size == out.size:
        assert out.chunks[:-1] == lazy[0].chunks[:-1]
    assert_blocks(out, right)
    got, got_lse = dask.compute(out, lse)
    alone = sdpa(*lazy, device=device, **options).compute()
    # A merge adds a few roundings of numbers that are smaller than the largest value.
    for result in (got, alone):
        assert_close(result, right, 2 * allowed + 1e-7)
    assert_close(got_lse, right_lse, 2 * allowed_lse + 1e-6)
    assert not got[np.isneginf(right_lse)].any()


ARRAYS = qkv((2, 4), 17, 33)
CAUSAL = {"is_causal": True}
LOWER_RIGHT = {"is_causal": "lower_right"}
TABLE = {
    "one chunk": (((2, 4, 17), (2, 4, 33)), {}),
    "heads": (((1, 2, 17), (1, 2, 33)), {}),
    "odd": (((2, 4, 5), (2, 4, 7)), {}),
    "of 1": (((2, 4, 1), (2, 4, 1)), CAUSAL),
    "key unlike query": (((1, 4, 5), (2, 1, 33)), {}),
    "value unlike key": (((2, 4, 5), (2, 4, 8), (1, 2, 20)), {}),
    "causal": (((1, 4, 5), (2, 4, 7)), CAUSAL),
    "lower right": (((1, 4, 5), (2, 4, 7)), LOWER_RIGHT),
    "window": (((1, 4, 5), (2, 4, 7)), {"window": (3, 2)}),
    "window of the past": (((1, 4, 5), (2, 4, 7)), {"window": (6, 2), **LOWER_RIGHT}),
    "softcap, scale": (((2, 4, 9), (2, 4, 9)), {"softcap": 2.0, "scale": 0.7}),
    "sinks": (((1, 2, 9), (2, 1, 9)), {"sinks": draw((4,)), **CAUSAL}),
    "sinks, one chunk of keys": (((1, 2, 9), (2, 1, 33)), {"sinks": draw((4,))}),
}


@pytest.mark.parametrize(("chunks", "options"), TABLE.values(), ids=TABLE)
def test_chunks(device, chunks, options):
    query, key, *value = chunks
    check_chunks(ARRAYS, query, key, device, *value, **options)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != float32], ids=str)
def test_dtypes(device, dtype):
    """Parts of half types are float32: the result is rounded once."""
    check_chunks(qkv((2,), 9, 12, dtype=dtype), (1, 5), (2, 4), device, is_causal=True)


MASKS = {
    "keys": (draw((33,)) > 0, (7,)),
    "rows and keys": (draw((17, 33)), (4, 5)),
    "rows": (draw((2, 1, 17, 1)) > 0, (1, 1, 5, 1)),
    "all": (draw((2, 4, 17, 33), np.float16), (2, 4, 17, 1)),
    "one number": (np.array(True), ()),
}


@pytest.mark.parametrize(("mask", "chunks"), MASKS.values(), ids=MASKS)
def test_masks(mask, chunks):
    """Of NumPy, and of dask in chunks of their own."""
    lazy = [chunked(a, 1, 2, 6) for a in ARRAYS]
    right, _ = attention(*ARRAYS, attn_mask=mask, is_causal=True)
    allowed, _ = tolerance(*ARRAYS, attn_mask=mask, is_causal=True)
    for given in (mask, da.from_array(mask, chunks=chunks)):
        out = sdpa(*lazy, given, is_causal=True)
        assert_close(out.compute(), right, 2 * allowed + 1e-7)


GROUPED = {
    "groups": ((8, 2), (4, 1)),
    "one head": ((8, 1), (3, 1)),
    "all": ((8, 2), (8, 2)),
    "groups of one": ((4, 4), (3, 2)),
    "keys in other chunks": ((8, 4), (4, 3)),
    "within groups": ((8, 2), (2, 2)),
    "cut groups": ((8, 2), ((0, 3, 5, 0), (0, 0, 2))),
}


@pytest.mark.parametrize(("heads", "chunks"), GROUPED.values(), ids=GROUPED)
def test_grouped_heads(device, heads, chunks):
    shapes = (heads[0], 9, 8), (heads[1], 12, 8), (heads[1], 12, 8)
    arrays = [draw(shape, seed=n) for n, shape in enumerate(shapes)]
    sinks = draw((heads[0],))
    check_chunks(arrays, (chunks[0], 4), (chunks[1], 5), device, enable_gqa=True, sinks=sinks)


def test_matrices_beside_grouped_heads(device):
    arrays = draw((9, 8)), draw((1, 12, 8)), draw((1, 12, 8))
    options = {"enable_gqa": True, "device": device}
    out = sdpa(chunked(arrays[0], 4), *(chunked(a, 1, 5) for a in arrays[1:]), **options)
    right = clattn.scaled_dot_product_attention(*arrays, **options)
    assert out.shape == right.shape and max_error(out.compute(), right) < 1e-6


def test_leading_dimensions_broadcast(device):
    arrays = draw((1, 2, 9, 8)), draw((3, 2, 12, 8)), draw((2, 12, 8))
    check_chunks(arrays, (1, 1, 4), (1, 2, 5), device, (1, 5))


def large(number, sign=-1, dtype=float32):
    """Query and key whose scores are all sign * number**2 * sqrt(8), values 0 ... 8."""
    query = np.full((9, 8), number, dtype)
    return query, dtype.type(sign) * query, np.repeat(np.arange(9), 8).reshape(9, 8).astype(dtype)


LOWEST = np.full((9, 9), np.finfo(float32).min, float32)
EQUAL_SCORES = {
    "1e36": (large(1e18), None),
    "2e6": (large(840), None),
    "float16": (large(200, 1, np.dtype(np.float16)), None),
    "the lowest number": (qkv((), 9, 9)[:2] + large(1)[2:], LOWEST),
}


@pytest.mark.parametrize(("arrays", "mask"), EQUAL_SCORES.values(), ids=EQUAL_SCORES)
def test_equal_scores_of_any_size_give_the_mean(device, arrays, mask):
    """One number of float32 could not tell how many keys a part has."""
    for split_every in (2, 4):
        lazy = [chunked(a, (2, 7)) for a in arrays]
        lazy[1:] = [a.rechunk(((2, 1, 5, 1), -1)) for a in lazy[1:]]
        out = sdpa(*lazy, mask, device=device, split_every=split_every)
        np.testing.assert_array_equal(out.compute(), np.full((9, 8), 4, arrays[0].dtype))


@pytest.mark.parametrize("number", [np.uint8, np.int8, np.uint64])
def test_windows_of_numpys_integers(number):
    """Sums with them would wrap."""
    arrays = qkv((), 12, 400)
    window = (number(2), number(1))
    for causal in (False, "lower_right"):
        right, _ = attention(*arrays, window=(2, 1), is_causal=causal)
        out = sdpa(*(chunked(a, 5) for a in arrays), window=window, is_causal=causal)
        assert max_error(out.compute(), right) < 1e-6


def test_sinks_of_any_size():
    """As in one call: a finite number stays finite; a row without a key is zeros."""
    sinks = np.array([1e300, -1e300, 0, np.nan, np.inf, -np.inf])
    q, k, v = qkv((6,), 9, 9)
    mask = np.arange(9)[:, None] > np.arange(9)
    options = {"attn_mask": mask, "sinks": sinks, "return_lse": True}
    right = clattn.scaled_dot_product_attention(q, k, v, **options)
    for given in (sinks, sinks.reshape(1, 6, 1, 1), da.from_array(sinks[:, None], chunks=2)):
        options["sinks"] = given
        got = dask.compute(*sdpa(*(chunked(a, 6, 4) for a in (q, k, v)), **options))
        for a, b in zip(got, right, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_byte_order(device):
    """Arrays of another byte order give results of the machine's, with one chunk and several."""
    swapped = [a.astype(a.dtype.newbyteorder()) for a in ARRAYS]
    for chunks in (33, 7):
        out = sdpa(*(chunked(a, 2, 4, chunks) for a in swapped), device=device)
        assert out.dtype == float32 and out.dtype.isnative
        assert_blocks(out, ARRAYS[0])


@pytest.mark.parametrize(("L", "S"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(L, S):
    arrays = qkv((2,), L, S)
    for options in ({}, CAUSAL):
        out, lse = sdpa(*(chunked(a, 1, 2) for a in arrays), return_lse=True, **options)
        assert out.compute().shape == (2, L, 8) and not out.compute().any()
        assert np.isneginf(lse.compute()).all() and lse.shape == (2, L)


def test_empty_chunks_and_rows_without_a_chunk_of_keys():
    """Chunks of no keys and of no rows; rows to the right of all keys; sinks count there too."""
    q, k, v = qkv((2,), 20, 8)
    rows = chunked(q, 2, (5, 0, 15))
    keys = [chunked(array, 2, (3, 0, 5)) for array in (k, v)]
    options = {"window": (1, 0), "is_causal": True, "sinks": draw((2,))}
    assert rows.chunks[1] == (5, 0, 15) and keys[0].chunks[1] == (3, 0, 5)
    for query in (rows, chunked(q, 2, 4)):
        out, lse = sdpa(query, *keys, return_lse=True, **options)
        right, right_lse = attention(q, k, v, **options)
        assert max_error(out.compute(), right) < 1e-6
        assert max_error(lse.compute(), right_lse) < 1e-6


def test_a_single_row_or_key_beside_an_empty_chunk():
    """Size 1 is not always a dimension that broadcasts."""
    q, k, v = qkv((2,), 9, 12)
    for row, keys, chunks in (
        (q[:, :1], (k, v), ((0, 1), 5)),
        (q, (k[:, :1], v[:, :1]), (4, (0, 1))),
    ):
        mask = draw((row.shape[-2], keys[0].shape[-2]))
        lazy = [chunked(row, 2, chunks[0]), *(chunked(a, 2, chunks[1]) for a in keys)]
        right, _ = attention(row, *keys, attn_mask=mask, is_causal="lower_right")
        out = sdpa(*lazy, mask, "lower_right")
        assert max_error(out.compute(), right) < 1e-6


def test_matrices_with_a_sink():
    arrays = draw((9, 8)), draw((7, 8)), draw((7, 5))
    options = {"sinks": draw((1,)), "is_causal": True}
    out, lse = sdpa(*(chunked(a, 4) for a in arrays), return_lse=True, **options)
    right, right_lse = clattn.scaled_dot_product_attention(*arrays, return_lse=True, **options)
    assert max_error(out.compute(), right) < 1e-6 and max_error(lse.compute(), right_lse) < 1e-6


slopes = draw((4,))


def biased(score, b, h, q_idx, kv_idx):
    return score * 0.5 + b + clattn.lookup(slopes, h) * (kv_idx - q_idx)


def third(b, h, q_idx, kv_idx):
    return (b + h + q_idx + kv_idx) % 3 != 0


@pytest.mark.parametrize("lead", [(2, 4), (3, 2, 4)], ids=str)
def test_flex(device, lead):
    """Functions get the numbers of the whole arrays, b over several dimensions too."""
    arrays = qkv(lead, 9, 14)
    options = {"score_mod": biased, "mask_mod": third, "return_lse": True, "device": device}
    lazy = [chunked(a, *[1] * (len(lead) - 1), 2, 5) for a in arrays]
    got = dask.compute(*clattn_dask.flex_attention(*lazy, **options))
    right = clattn.flex_attention(*arrays, **options)
    for a, b in zip(got, right, strict=True):
        assert a.dtype == b.dtype and max_error(a, b) < 2e-6


def test_what_functions_capture_is_read_when_the_graph_is_made():
    """Names depend on it. Numbers may be equal to those that stand for a chunk's places."""
    lazy = [chunked(a, 1, 2, 5) for a in ARRAYS]
    table = np.arange(4, dtype=float32)
    number = 2**30

    def mod(score, b, h, q_idx, kv_idx):
        return score * clattn.lookup(table, h) + b * (number - 2**30) + (kv_idx + number) * 1e-9

    first, same = (clattn_dask.flex_attention(*lazy, mod) for _ in range(2))
    right = clattn.flex_attention(*ARRAYS, mod)
    table[:] = 1
    second = clattn_dask.flex_attention(*lazy, mod)
    number += 1
    third = clattn_dask.flex_attention(*lazy, mod)
    assert first.name == same.name and len({a.name for a in (first, second, third)}) == 3
    assert max_error(first.compute(), right) < 2e-6
    assert max_error(third.compute(), clattn.flex_attention(*ARRAYS, mod)) < 2e-6


def test_flex_of_matrices_and_of_more_places_than_32_bits(device):
    arrays = qkv((), 9, 14)
    lazy = [chunked(a, 5) for a in arrays]
    for keys in (14, 2**31):
        traced = trace_for_chunks({"score_mod": biased, "mask_mod": third}, (1, 9), keys)
        assert {max(traced.traced.numbers) > 2**31} == {keys > 2**31 - 1}
    got = clattn_dask.flex_attention(*lazy, biased, third, device=device).compute()
    assert max_error(got, clattn.flex_attention(*arrays, biased, mask_mod=third)) < 2e-6


# ---- graphs ----


def attends(array):
    """How many tasks attend."""
    tasks = array.dask.layers[array.name].values()
    return sum("attend" in task[0].func.__name__ for task in tasks if hasattr(task[0], "func"))


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 64),
        (CAUSAL, 36),
        (LOWER_RIGHT, 36),
        ({"window": (10, 0)}, 8 + 7),
        ({"window": (11, 0)}, 8 + 7 + 6),
        ({"window": (0, 0)}, 8),
        ({"window": (None, 0), **CAUSAL}, 36),
        ({"window": (0, None)}, 36),
    ],
)
def test_excluded_pairs_are_not_in_the_graph(options, pairs):
    """Eight chunks of ten rows and keys."""
    lazy = [chunked(a, 2, 10) for a in qkv((2,), 80, 80)]
    assert attends(sdpa(*lazy, **options)) == pairs


@pytest.mark.parametrize(("split_every", "merges"), [(2, 4 + 2 + 1), (4, 2 + 1), (8, 1)])
def test_parts_are_merged_in_a_tree(split_every, merges):
    """Two chunks of rows, eight of keys."""
    arrays = qkv((2,), 20, 80)
    out = sdpa(*(chunked(a, 2, 10) for a in arrays), split_every=split_every)
    names = [key[0] for key in out.dask if isinstance(key, tuple)]
    assert sum(n.startswith(("merge-", "attention-")) for n in names) == 2 * merges
    assert max_error(out.compute(), attention(*arrays)[0]) < 1e-6


def test_names_are_equal_for_equal_calls(device):
    def call(seed=0, **options):
        lazy = [chunked(a, 2, 2, 5) for a in qkv((2, 4), 17, 33, seed=seed)]
        return sdpa(*lazy, **options)

    base = {"is_causal": True, "window": (20, None), "device": device}
    assert call(**base).name == call(**base).name
    assert set(call(**base).dask) == set(call(**base).dask)
    others = [call(1, **base), *(call(**base | other) for other in (
        {"scale": 0.5}, {"softcap": 1.0}, {"device": "cpu"}, {"is_causal": "lower_right"},
        {"sinks": draw((4,))}, {"attn_mask": draw((17, 33))},
    ))]  # fmt: skip
    assert len({array.name for array in [call(**base), *others]}) == 8


def test_graphs_are_pickled(device):
    lazy = [chunked(a, 1, 2, 9) for a in ARRAYS]
    out = clattn_dask.flex_attention(*lazy, biased, device=device)
    again = pickle.loads(pickle.dumps(out))
    np.testing.assert_array_equal(again.compute(), out.compute())


BUILD = """
import sys, clattn, numpy as np
assert "dask" not in sys.modules
import clattn.dask, dask.array as da
q = da.ones((8, 10**6, 64), dtype="f2", chunks=(1, 10**5, 64))
out, lse = clattn.dask.scaled_dot_product_attention(q, q, q, is_causal=True, return_lse=True)
flex = clattn.dask.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)
assert out.dtype == flex.dtype == "f2" and lse.dtype == "f4" and lse.shape == (8, 10**6)
try:
    clattn.devices()
except clattn.DeviceError:
    print("built")
"""


def test_a_graph_is_made_without_a_device():
    done = run_python(BUILD, env={"OCL_ICD_VENDORS": "/nonexistent", "OCL_ICD_FILENAMES": None})
    assert done.stdout == "built\n"


def test_without_dask():
    code = """
    import sys
    sys.modules["dask"] = None
    import clattn
    try:
        import clattn.dask
    except ImportError as error:
        print(error)
    """
    assert 'pip install "dask[array,distributed]>=2025.1"' in run_python(code).stdout


# ---- refusals ----

lazy = [chunked(a, 1, 2, 5) for a in ARRAYS]
q, k, v = lazy
unknown = q[0, 0][q[0, 0, :, 0] > 0]
REFUSED = {
    "NumPy": ((ARRAYS[0], k, v), {}, TypeError, "query must be a dask array, got ndarray"),
    "last": ((q, k.rechunk({-1: 4}), v), {}, ValueError, "key.rechunk({-1: -1})"),
    "unknown": ((unknown, k[0, 0], v[0, 0]), {}, ValueError, "query.compute_chunk_sizes()"),
    "lengths": ((q, k, v[..., :8, :]), {}, ValueError, "(2, 4, 8, 8)"),
    "dtype": ((q, k.astype("f8"), v), {}, TypeError, "key has dtype float64"),
    "window": (lazy, {"window": (-1, 0)}, ValueError, "window has the bound -1"),
    "mask": (lazy, {"attn_mask": da.ones((3, 33))}, ValueError, "attn_mask has shape (3, 33)"),
    "sinks": (lazy, {"sinks": np.ones(3, "f4")}, ValueError, "sinks has shape (3,); expected (4,)"),
    "causal": (lazy, {"is_causal": "left"}, ValueError, "is_causal"),
    "return_lse": (lazy, {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    "device": (lazy, {"device": 1.5}, TypeError, "device"),
    "0 dimensions": ((q[0, 0, 0, 0],) * 3, {}, ValueError, "query has shape (); expected"),
    "masked": (lazy, {"attn_mask": np.ma.masked_array(np.ones((17, 33)))}, TypeError,
               "attn_mask must be an array, got MaskedArray, whose mask would be ignored"),
    "masked, dask": (lazy, {"attn_mask": da.ma.masked_array(da.ones((17, 33)))}, TypeError,
                     "attn_mask must be an array, got MaskedArray"),
    "masked sinks": (lazy, {"sinks": np.ma.masked_array(np.ones(4))}, TypeError, "sinks must be"),
    "a list": (lazy, {"attn_mask": [[True]]}, TypeError, "attn_mask must be an array"),
    "split_every": (lazy, {"split_every": 1}, ValueError, "split_every is 1; expected None or an"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_while_the_graph_is_made(arrays, options, error, words):
    with pytest.raises(error) as caught:
        sdpa(*arrays, **options)
    assert words in str(caught.value)


def test_a_message_names_no_argument_that_is_not_there():
    """Arrays (B, L, H, E) have no layout to take here."""
    lazy = [chunked(a.swapaxes(1, 2), 4, 5) for a in qkv((2, 4), 17, 33)]
    with pytest.raises(ValueError, match="key has shape") as caught:
        sdpa(*lazy)
    assert "layout" not in str(caught.value)


def test_masks_and_sinks_of_other_libraries():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    mask, sinks = draw((17, 33), bfloat16), draw((4,), bfloat16)
    given = [torch.tensor(a.astype(float32), dtype=torch.bfloat16) for a in (mask, sinks)]
    out = sdpa(*lazy, given[0], sinks=given[1])
    assert max_error(out.compute(), attention(*ARRAYS, attn_mask=mask, sinks=sinks)[0]) < 1e-6


def test_a_mod_is_refused_while_the_graph_is_made():
    with pytest.raises(TypeError, match=r"np\.where"):
        clattn_dask.flex_attention(*lazy, lambda s, b, h, i, j: s if i > j else -s)


def test_devices_travel_by_name_and_number(monkeypatch, device):
    """The second of two equal ones is the second on a worker, which may have none."""
    twin = SimpleNamespace(platform=device.platform, name=device.name)
    monkeypatch.setattr(clattn._core, "all_devices", lambda: [twin, device])
    out = sdpa(*lazy, device=device)
    assert max_error(out.compute(), attention(*ARRAYS)[0]) < 1e-6
    monkeypatch.setattr(clattn._core, "all_devices", list)
    with pytest.raises(clattn.DeviceError, match=re.escape(device.name)):
        out.compute()


def test_a_device_of_a_queue_is_refused():
    cl = pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    adopted = clattn.Device.from_pyopencl(cl.CommandQueue(cl.create_some_context(False)))
    with pytest.raises(TypeError, match="of a pyopencl queue"):
        sdpa(*lazy, device=adopted)


# ---- a scheduler with one worker ----


def test_tagged_tasks_and_a_task_that_is_cancelled(device):
    """Tasks ask for the resource; when one is cancelled in its kernel, the worker goes on."""
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    arrays = qkv((1,), 8192, 8192, 64)
    lazy = [chunked(array, 1, 8192) for array in arrays]
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None,
            resources={"gpu": 1},
        ) as made,
        distributed.Client(made) as client,
    ):  # fmt: skip
        tasks = made.scheduler.tasks

        def submit(rows):
            with dask.annotate(resources={"gpu": 1}):
                out = sdpa(lazy[0][:, :rows], *lazy[1:], device=device)
            return out.name, client.compute(out, optimize_graph=False)

        name, future = submit(8192)
        (worker,) = made.workers.values()
        end = time.monotonic() + 30
        while not any(t.key[0] == name for t in worker.state.executing) and time.monotonic() < end:
            time.sleep(0.01)
        (task,) = [task for key, task in tasks.items() if key[0] == name]
        assert task.resource_restrictions == {"gpu": 1} and task.state == "processing"
        future.cancel()
        assert future.cancelled()
        _, future = submit(100)
        right = clattn.scaled_dot_product_attention(arrays[0][:, :100], *arrays[1:], device=device)
        assert max_error(future.result(timeout=60), right) < 1e-6


# ---- a cluster ----


LIMIT = 500_000_000


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes with a thread each and LIMIT bytes.

    Compilers take memory too, so the programs are on disk before.
    """
    rows = qkv((1,), 300, 300, 16)
    for return_lse in (False, True):
        clattn.scaled_dot_product_attention(*rows, return_lse=return_lse)
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=LIMIT, dashboard_address=None
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


def peak():
    """Return the most memory of this process. getrusage counts that of its parent too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_more_than_a_worker_holds_goes_to_zarr(cluster, tmp_path):
    """Query, key, value and result are 768 MB, half as much again as a worker has."""
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    shape, chunks = (3_000_000, 16), (125_000, 16)
    arrays = [da.random.default_rng(n).random(shape, "f4", chunks=chunks) for n in range(3)]
    out = sdpa(*arrays, is_causal=True, window=(8, 0))
    assert sum(a.nbytes for a in (*arrays, out)) > 1.5 * LIMIT
    out.to_zarr(str(tmp_path / "out"))
    assert max(cluster.run(peak).values()) < LIMIT
    last = [a[-1008:].compute() for a in arrays]
    right = clattn.scaled_dot_product_attention(*last, is_causal=True, window=(8, 0))
    stored = zarr.open(str(tmp_path / "out"), mode="r")
    assert max_error(stored[-1000:], right[-1000:]) < 1e-6
    shutil.rmtree(tmp_path / "out")


def late(block):
    time.sleep(0.15)
    return block


def test_a_worker_is_killed(cluster):
    arrays = qkv((2, 4), 40, 320)
    rows, *keys = (chunked(a, 2, 4, 20) for a in arrays)
    out = sdpa(rows, *(a.map_blocks(late, meta=a._meta) for a in keys))
    future = cluster.compute(out)

    def running(dask_scheduler):
        return any(t.state == "processing" for t in dask_scheduler.tasks.values())

    end = time.monotonic() + 30
    while not cluster.run_on_scheduler(running) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.5)  # of at least 2: there are 32 blocks of keys and values, and two workers
    assert future.status == "pending"
    os.kill(next(iter(cluster.run(os.getpid).values())), signal.SIGKILL)
    result = future.result(timeout=60)
    assert max_error(result, attention(*arrays)[0]) < 1e-6
