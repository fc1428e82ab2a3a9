# SPDX-License-Identifier: MIT
"""Right calls of every door, what may stand in the place of an argument, and what is right then.

`RIGHT` has the arguments of each function and `WRONG` the objects. Some of these are right in some
places, such as another scale: `JUDGES` has a function for each of `RIGHT`'s, which compares an
answer with the reference.
"""

import clattn
import numpy as np
import references.attention as reference
import references.directml as directml
import references.dropout as dropout
import references.gradients as gradients
import references.onnx as onnx
import references.openvino as openvino
from references.attention import bfloat16
from references.cache import CacheModel
from references.codes import exact
from references.diagonal import assert_same, diagonal
from references.flex import blocks, flex
from support.checks import assert_close, native
from support.data import draw
from support.onnx_calls import check_present
from support.ragged import seen

Q, MASK = draw((1, 2, 5, 8)), draw((5, 5))
PACKED = draw((5, 2, 8))  # sequences of 2 and 3 rows


def append(key, value, counts):
    cache = clattn.KVCache(1, 2, 9, 8)
    cache.append(key, value, counts)
    return cache.key, cache.value, cache.lengths


def append_to_pages(key, value, cu_seq, dtype):
    cache = clattn.PagedKVCache(5, 2, 5, 8, dtype=dtype)
    first, second = cache.open(2)
    cache.append([first, second], key, value, cu_seq)
    pages = [int(page) for page in cache.block_table(second)[0]]
    return cache.length(first), cache.length(second), [cache.value.numpy()[n] for n in pages]


def make_pages(**sizes):
    return clattn.PagedKVCache(num_kv_heads=2, **sizes)


def attend_to_pages(**options):
    cache = clattn.PagedKVCache(5, 2, 2, 8)
    sequences = cache.open(2)
    cache.append(sequences, PACKED, PACKED, [0, 2, 5])
    return cache.attend(sequences=sequences, **options)


def attend(dtype=np.float32, **options):
    cache = clattn.KVCache(1, 2, 9, 8, dtype=dtype)
    cache.append(Q, Q)
    return cache.attend(**options)


def attend_codes(**options):
    return attend("int8", **options)


def change(n, indices):
    cache = clattn.KVCache(2, 1, 9, 8)
    cache.append(Q.reshape(2, 1, 5, 8), Q.reshape(2, 1, 5, 8))
    cache.reorder(indices)
    cache.truncate(n)
    return cache.key, cache.lengths


RIGHT = {
    clattn.scaled_dot_product_attention: {
        "query": Q, "key": Q, "value": Q, "attn_mask": MASK, "dropout_p": 0.0, "is_causal": True,
        "scale": 0.5, "enable_gqa": False, "window": (3, None), "softcap": 0.0, "seed": 1,
        "return_lse": True, "out": np.zeros_like(Q), "sinks": np.ones(2), "query_offset": 2,
        "return_weights": False},
    clattn.scaled_dot_product_attention_backward: {
        "grad_output": Q, "query": Q, "key": Q, "value": Q, "output": Q, "lse": Q[..., 0],
        "attn_mask": MASK, "dropout_p": 0.0, "is_causal": True, "scale": 0.5, "enable_gqa": False,
        "grad_lse": Q[..., 1], "needs": ("query", "key", "value", "sinks"), "window": (3, None),
        "softcap": 0.0, "seed": 1, "sinks": np.ones(2), "query_offset": 2, "layout": "BHLE",
        "out": None},
    clattn.onnx.attention: {
        "Q": Q, "K": Q, "V": Q, "attn_mask": MASK, "past_key": None, "past_value": None,
        "nonpad_kv_seqlen": np.array([4]), "is_causal": 1, "kv_num_heads": None,
        "q_num_heads": None, "qk_matmul_output_mode": 1, "scale": 0.5, "softcap": 1.0,
        "softmax_precision": 1, "left_window_size": 2, "right_window_size": -1, "opset": 25,
        "pre_errata": False, "return_qk": True},
    clattn.onnx.tensor_scatter: {
        "past_cache": Q, "update": Q[:, :, :3], "write_indices": np.array([2]), "axis": 2,
        "mode": "linear"},
    clattn.openvino.scaled_dot_product_attention: {
        "query": Q, "key": Q, "value": Q, "attention_mask": MASK, "scale": np.ones((), "f4"),
        "causal": False},
    clattn.directml.multihead_attention: {
        "query": Q[0], "key": Q[0], "value": Q[0], "bias": np.ones(24, "f4"), "scale": 1.0,
        "mask": np.array([3, 3], np.int32), "mask_type": "key_sequence_length", "head_count": 2,
        "mask_filter_value": -1e4, "past_key": None, "past_value": None, "return_present": True},
    clattn.diagonal_matrix: {
        "input_or_shape": MASK, "value": 2, "begin": -1, "end": 2, "dtype": None,
        "out": np.zeros_like(MASK)},
    clattn.directml.diagonal_matrix1: {
        "input": MASK, "sizes": (1, 1, 5, 5), "dtype": "float32", "value": 1.0,
        "diagonal_fill_begin": -1, "diagonal_fill_end": 3},
    clattn.tril: {"input": MASK, "diagonal": 1},
    clattn.flex_attention: {
        "query": Q, "key": Q, "value": Q, "score_mod": None, "block_mask": None, "scale": 0.5,
        "enable_gqa": False, "mask_mod": None, "return_lse": True, "softcap": 0.0, "sinks": None,
        "query_offset": 0, "out": None},
    clattn.flex_attention_backward: {
        "grad_output": Q, "query": Q, "key": Q, "value": Q, "output": Q, "lse": Q[..., 0],
        "score_mod": None, "block_mask": None, "scale": 0.5, "enable_gqa": False, "mask_mod": None,
        "grad_lse": Q[..., 1], "needs": ("query", "key", "value", "sinks"), "captured": (),
        "softcap": 0.0, "sinks": np.ones(2), "query_offset": 2},
    clattn.varlen_attn: {
        "query": PACKED, "key": PACKED, "value": PACKED, "cu_seq_q": [0, 2, 5],
        "cu_seq_k": [0, 1, 5], "max_q": 3, "max_k": 4, "scale": 0.5, "window_size": (1, -1),
        "enable_gqa": False, "seqused_k": [1, 3], "block_table": None, "is_causal": True,
        "page_layout": "NHD", "softcap": 0.0, "sinks": np.ones(2), "key_scale": None,
        "value_scale": None, "score_mod": None, "mask_mod": None, "return_lse": True,
        "out": np.zeros_like(PACKED)},
    clattn.tensor: {"array": Q},
    clattn.merge_attention: {"parts": [(Q, Q[..., 0])] * 2},
    clattn.create_block_mask: {
        "mask_mod": lambda b, h, q, k: q >= k, "B": None, "H": 2, "Q_LEN": 5, "KV_LEN": 5,
        "BLOCK_SIZE": 16},
    clattn.KVCache: {
        "batch": 1, "num_kv_heads": 2, "capacity": 9, "head_size": 8, "v_head_size": None,
        "dtype": "float32", "key_scale": 1.0, "value_scale": 1.0},
    append: {"key": Q, "value": Q, "counts": [3]},
    append_to_pages: {"key": Q[0], "value": Q[0], "cu_seq": [0, 1, 2], "dtype": "float32"},
    make_pages: {
        "num_pages": 3, "page_size": 2, "head_size": 8, "v_head_size": None, "dtype": "float8_e5m2",
        "key_scale": 1.0, "value_scale": [1.0, 2.0]},
    attend_to_pages: {
        "query": PACKED, "cu_seq_q": [0, 2, 5], "is_causal": True, "scale": 0.5,
        "window": (1, None), "softcap": 0.0, "sinks": np.ones(2), "score_mod": None,
        "return_lse": True, "out": np.zeros_like(PACKED)},
    clattn.quantize: {"array": Q, "dtype": "int8", "axis": -2, "group": 3},
    clattn.dequantize: {
        "values": np.ones((2, 5), np.int8), "scales": np.ones(2, "f4"), "dtype": "float32",
        "axis": -1, "group": None},
    attend: {
        "query": Q, "attn_mask": MASK, "is_causal": True, "scale": 0.5, "window": (3, None),
        "softcap": 0.0, "return_lse": True, "out": np.zeros_like(Q)},
    change: {"n": [3, 2], "indices": [1, 0]},
    attend_codes: {
        "query": Q, "attn_mask": MASK, "is_causal": True, "scale": 0.5, "window": (3, None),
        "softcap": 0.0, "return_lse": True, "out": np.zeros_like(Q)},
}  # fmt: skip
WRONG = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, -(2**63) - 1, 2**70, 0.5, -0.0, 1e39, np.nan, np.inf, 1j,
    "", "lower_right", "float32", "cpu", "\0", "\ud800", b"cpu", (), (None, None), (3, -1), [2], {},
    ..., object(), np.float64(1), np.bool_(True), np.str_("x"), np.datetime64("2020"), len, int,
    np.zeros(()), np.zeros(0), np.zeros((0, 5, 8)), np.ones((2, 1, 5, 8), "f4"), np.ones((3, 3)),
    np.ones((1, 2, 5, 9), "f4"), np.ones((1, 3, 5, 8), "f4"), np.ones((1,) * 64, "f4"),
    np.full((1, 2, 5, 8), np.nan, "f4"), np.full((5, 5), -np.inf, "f4"), np.array([2**62]),
    np.array([-1], np.int32), np.ones((1, 2, 5, 8), ">f4"), np.ones((5, 5), bool),
    np.ones((5, 5), "c8"), np.array(["x"]), np.array([None]), np.zeros(3, [("a", "f4")]),
    np.ma.masked_array(np.ones(2), True), np.ones((1, 2, 5, 8), bfloat16), lambda *a: a[0],
    lambda *a: a[1] > a[2], np.broadcast_to(np.float32(1), (2**40, 5)), memoryview(b"abcdefgh"),
]  # fmt: skip


def is_small(value):
    return isinstance(value, np.ndarray) and value.nbytes < 1 << 20


def numbers_of(value):
    """An argument that clattn has taken for an array, as the references take it; None stays."""
    return None if value is None else native(np.asarray(value))


def judge_parts(answer, rights):
    """The parts of an answer, one array or several, beside `rights`: (right, allowed) by name."""
    parts = answer if isinstance(answer, tuple) else (answer,)
    for part, (name, right) in zip(parts, rights.items(), strict=True):
        assert_close(numbers_of(part), *right, name)


def judge_attention(answer, *, query, key, value, attn_mask=None, sinks=None, dropout_p=0,
                    seed=None, return_lse=False, return_weights=False, out=None,
                    **options):  # fmt: skip
    given = [numbers_of(array) for array in (query, key, value)]
    options["attn_mask"] = numbers_of(attn_mask)
    if dropout_p and seed is None:
        return  # random
    if dropout_p:
        options = {n: o for n, o in options.items() if o is not None}
        result, lse = dropout.judged(*given, dropout_p, seed, **options)
        weights = None
    else:
        options |= {"sinks": numbers_of(sinks), "return_weights": return_weights}
        right = reference.judged(*given, **options)
        result, lse = (right.result, right.allowed), (right.lse, right.allowed_lse)
        weights = right.weights, right.allowed_weights
    parts = {"result": result}
    parts |= {"lse": lse} if return_lse else {}
    judge_parts(answer, parts | ({"weights": weights} if return_weights else {}))


def judge_backward(answer, *, grad_output, query, key, value, output, lse, needs, out, layout,
                   **options):  # fmt: skip
    assert layout == "BHLE"
    given = [numbers_of(array) for array in (grad_output, query, key, value, output)]
    for name in ("attn_mask", "sinks", "grad_lse"):
        options[name] = numbers_of(options[name])
    if not options["dropout_p"]:
        del options["dropout_p"], options["seed"]
    found = gradients.judged(*given, of_call=False, **options)
    for name, got, right, allowed in zip(gradients.NAMES, answer, *found, strict=True):
        assert (got is None) == (name not in needs)
        if got is not None:
            assert_close(numbers_of(got), right, allowed, name)


def judge_onnx(answer, *, return_qk, **arguments):
    arrays = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    given = [numbers_of(arguments.pop(name)) for name in arrays]
    right, allowed = onnx.attention(*given, **arguments), onnx.tolerances(*given, **arguments)
    assert_close(answer.Y, right.Y, allowed.Y, "Y")
    check_present(answer, right, with_past=given[4] is not None)
    if return_qk:
        qk = onnx.overflowed(right.qk_matmul_output, given[0].dtype)
        assert_close(answer.qk_matmul_output, qk, allowed.qk, "qk_matmul_output")


def judge_scatter(answer, *, past_cache, update, write_indices, **options):
    given = numbers_of(past_cache), numbers_of(update)
    assert_same(numbers_of(answer), onnx.tensor_scatter(*given, write_indices, **options))


def judge_openvino(answer, **arguments):
    right = openvino.judged(**arguments)
    assert_close(answer, right.result, right.allowed)


def judge_directml(answer, *, return_present, **arguments):
    call = {n: native(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
    assert_close(answer.output, *directml.judged(call))
    assert (answer.present_key is not None) == bool(return_present)
    if return_present:
        for got, right in zip(answer[1:], directml.present(call), strict=True):
            assert_same(got, right, "present")


def judge_matrix(answer, *, input_or_shape, value, begin, end, dtype, out):
    source = input_or_shape
    if not isinstance(source, tuple | list):
        source = numbers_of(source)
    right = diagonal(source, value, begin, end, dtype and np.dtype(dtype))
    same_but_for_nan(native(answer), right)


def judge_matrix1(answer, *, input, sizes, dtype, value, **fill):
    source = sizes if input is None else numbers_of(input)
    bounds = fill["diagonal_fill_begin"], fill["diagonal_fill_end"]
    same_but_for_nan(answer, diagonal(source, value, *bounds, dtype and np.dtype(dtype)))


def same_but_for_nan(got, right):
    """A NaN that is stored may be any."""
    if right.dtype.kind not in "iub":
        got, right = (np.where(np.isnan(a), a.dtype.type(np.nan), a) for a in (got, right))
    assert_same(got, right)


def judge_triangle(answer, *, input, diagonal):
    array = numbers_of(input)
    places = np.arange(array.shape[-1]) - np.arange(array.shape[-2])[:, None]
    assert_same(answer, np.where(places <= diagonal, array, array.dtype.type(0)))


def judge_flex(answer, *, query, key, value, score_mod, block_mask, mask_mod, sinks, query_offset,
               return_lse, out, **options):  # fmt: skip
    assert block_mask is None
    if score_mod is None and mask_mod is None:
        judge_attention(answer, query=query, key=key, value=value, sinks=sinks,
                        query_offset=query_offset, return_lse=return_lse, **options)  # fmt: skip
        return
    if sinks is not None or np.any(query_offset):
        return  # which references/flex.py does not have
    given = [numbers_of(array) for array in (query, key, value)]
    result, lse = flex(*given, score_mod=score_mod, mask_mod=mask_mod, **options)
    judge_parts(answer, {"result": result} | ({"lse": lse} if return_lse else {}))


def judge_flex_backward(answer, *, score_mod, block_mask, mask_mod, captured, **arguments):
    assert block_mask is None and answer.captured == ()
    if score_mod is None and mask_mod is None:
        by_query, by_key, by_value, _, by_sinks = answer
        judge_backward((by_query, by_key, by_value, None, by_sinks), attn_mask=None, dropout_p=0,
                       seed=None, is_causal=False, window=None, out=None, layout="BHLE",
                       **arguments)  # fmt: skip


UNUSED = ("seqused_k", "block_table", "score_mod", "mask_mod", "key_scale", "value_scale")


def judge_varlen(answer, *, query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table,
                 is_causal, window_size, sinks, return_lse, enable_gqa, scale, softcap,
                 **others):  # fmt: skip
    assert block_table is None
    if any(others[name] is not None for name in UNUSED[2:]):
        return  # which test_ragged.py compares
    output, lse = answer if return_lse else (answer, None)
    is_causal = is_causal if isinstance(is_causal, str) else bool(is_causal)
    used = np.diff(cu_seq_k) if seqused_k is None else seqused_k
    for b, count in enumerate(used):
        rows = slice(*cu_seq_q[b : b + 2])
        keys = slice(cu_seq_k[b], cu_seq_k[b] + count)
        q, k, v = (a.swapaxes(0, 1) for a in (query[rows], key[keys], value[keys]))
        mask = seen(q.shape[1], count, is_causal, window_size)
        right = reference.judged(q, k, v, attn_mask=mask, enable_gqa=enable_gqa, scale=scale,
                                 softcap=softcap, sinks=numbers_of(sinks))  # fmt: skip
        assert_close(output[rows].swapaxes(0, 1), right.result, right.allowed)
        if lse is not None:
            assert_close(lse[:, rows], right.lse, right.allowed_lse, "lse")


def judge_tensor(answer, *, array):
    assert_same(answer.numpy(), numbers_of(array))


def judge_merged(answer, *, parts):
    """Several parts of the same numbers are one of them, and the logarithm of how many they are."""
    (out, lse), *others = parts
    assert all(
        np.array_equal(a, b) for part in others for a, b in zip(part, (out, lse), strict=True)
    )
    np.testing.assert_allclose(answer[0], out, rtol=1e-6)
    np.testing.assert_allclose(answer[1], lse + np.log(len(parts)), rtol=1e-6)


def judge_blocks(answer, *, mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE):
    size = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    right = blocks(mask_mod, B, H, Q_LEN, KV_LEN, tuple(map(int, size)))
    assert answer.shape == (B or 1, H or 1, Q_LEN, KV_LEN)
    np.testing.assert_array_equal(answer.to_dense(), right > 0)


def judge_cache(answer, *, batch, num_kv_heads, capacity, head_size, v_head_size, dtype,
                key_scale, value_scale):  # fmt: skip
    widths = head_size, head_size if v_head_size is None else v_head_size
    for kept, width in zip((answer.key, answer.value), widths, strict=True):
        assert kept.shape == (batch, num_kv_heads, 0, width)
        assert kept.dtype == np.dtype(dtype)
    assert answer.capacity == capacity


def judge_held(model, key, lengths):
    """The keys of each sequence, and how many they are."""
    assert list(lengths) == model.lengths
    for got, right in zip(key.numpy(), model.keys, strict=True):
        assert_same(got[:, : right.shape[1]], right, "key")


def judge_append(answer, *, key, value, counts):
    model = CacheModel(1, 2, 9, 8)
    model.append(numbers_of(key), numbers_of(value), counts)
    judge_held(model, answer[0], answer[2])
    assert_same(answer[1].numpy()[0, :, : model.length], model.values[0], "value")


def judge_pages(answer, *, key, value, cu_seq, dtype):
    """What the second sequence holds."""
    first, second, pages = answer
    ends = [0, 1, 2] if cu_seq is None else np.asarray(cu_seq)
    assert (first, second) == tuple(np.diff(ends))
    rows = numbers_of(value)[ends[1] : ends[2]]
    found = np.concatenate([page.swapaxes(0, 1) for page in pages])[:second] if pages else rows
    if found.dtype == rows.dtype:
        assert_same(found, rows, "value")


def judge_paged(answer, *, num_pages, page_size, head_size, v_head_size, dtype, **scales):
    widths = head_size, head_size if v_head_size is None else v_head_size
    for kept, width in zip((answer.key, answer.value), widths, strict=True):
        assert kept.shape == (num_pages, 2, page_size, width)
    assert answer.free_pages == num_pages and answer.dtype == dtype


def judge_pages_attended(answer, *, window, is_causal, score_mod, out, **options):
    if score_mod is None:
        bounds = (-1, -1) if window is None else [-1 if n is None else n for n in window]
        judge_varlen(answer, key=PACKED, value=PACKED, cu_seq_k=[0, 2, 5], window_size=bounds,
                     is_causal="lower_right" if is_causal else False, enable_gqa=True,
                     **dict.fromkeys(UNUSED), **options)  # fmt: skip


def judge_codes(answer, *, array, dtype, axis, group):
    """Codes times scales are near the numbers."""
    back = clattn.dequantize(*answer, axis=axis, group=group)
    numbers = numbers_of(array)
    assert back.shape == numbers.shape and answer[0].shape == numbers.shape
    if np.isfinite(numbers).all() and numbers.size:
        assert abs(back - numbers.astype("f4")).max() <= abs(numbers).max() / 6


def judge_numbers(answer, *, values, scales, dtype, axis, group):
    assert answer.shape == np.shape(values) and answer.dtype == np.dtype(dtype)


def judge_attend_codes(answer, **arguments):
    judge_attend(answer, held=exact(Q, "int8"), **arguments)


def judge_attend(answer, *, query, attn_mask, return_lse, out, held=Q, **options):
    model = CacheModel(1, 2, 9, 8, dtype=held.dtype)
    model.append(held, held)
    options["attn_mask"] = numbers_of(attn_mask)
    right, (allowed,), _ = model.attend(numbers_of(query), **options)
    result = answer[0] if return_lse else answer
    assert_close(numbers_of(result), right, allowed)


def judge_change(answer, *, n, indices):
    model = CacheModel(2, 1, 9, 8)
    model.append(Q.reshape(2, 1, 5, 8), Q.reshape(2, 1, 5, 8))
    model.reorder(indices)
    model.truncate(n)
    judge_held(model, *answer)


JUDGES = dict(zip(RIGHT, (
    judge_attention, judge_backward, judge_onnx, judge_scatter, judge_openvino, judge_directml,
    judge_matrix, judge_matrix1, judge_triangle, judge_flex, judge_flex_backward, judge_varlen,
    judge_tensor, judge_merged, judge_blocks, judge_cache, judge_append, judge_pages, judge_paged,
    judge_pages_attended, judge_codes, judge_numbers,
    judge_attend, judge_change, judge_attend_codes), strict=True))  # fmt: skip
