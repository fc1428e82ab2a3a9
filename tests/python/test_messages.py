# SPDX-License-Identifier: MIT
"""Typical mistakes and their messages, which docs/messages.md shows word for word."""

import re
import sys

import clattn
import numpy as np
import pytest
from support import faults
from support.fake_dlpack import Producer
from support.loops import looped
from support.processes import ROOT, no_opencl, run_python

f32 = np.float32
attend, flex, onnx = (
    clattn.scaled_dot_product_attention,
    clattn.flex_attention,
    clattn.onnx.attention,
)
numbers = [1.0, 2.0]


def ones(*shape, dtype=f32):
    return np.ones(shape, dtype)


q, k = ones(2, 4, 3, 8), ones(2, 4, 5, 8)
two = ones(2, 2, 5, 8)


def no_free_page():
    pages = clattn.PagedKVCache(num_pages=1, page_size=4, num_kv_heads=1, head_size=8)
    pages.append(pages.open(), ones(7, 1, 8), ones(7, 1, 8))


def read_only():
    array = np.empty_like(q)
    array.flags.writeable = False
    return array


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def clipped(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def of_a_list(score, b, h, q_idx, kv_idx):
    return score + numbers[h]


def blocks(rows, keys):
    return clattn.create_block_mask(causal, None, None, rows, keys)


def changed_blocks(of_an_array):
    """A block mask whose array, or number, has changed since."""
    width, document = [2], np.arange(5)

    def mask_mod(b, h, q_idx, kv_idx):
        if of_an_array:
            return clattn.lookup(document, q_idx) == clattn.lookup(document, kv_idx)
        return q_idx - kv_idx < width[0]

    mask = clattn.create_block_mask(mask_mod, None, None, 3, 5)
    width[0] = document[0] = 9
    return mask


def big():
    return np.broadcast_to(f32(1), (1 << 20, 1 << 20, 1, 128))


def cache():
    return clattn.KVCache(2, 4, 6, 8)


def without_ml_dtypes(make=clattn.eye, *sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        make(2, *sizes, dtype="bfloat16")


def masked(mask):
    return lambda: attend(q, k, k, mask)


def packed(cu_seq_q, cu_seq_k, **changed):
    x = ones(5, 2, 8)
    options = {"query": x, "key": x, "value": x} | changed
    return clattn.varlen_attn(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, **options)


def called(**changed):
    return lambda: attend(**{"query": q, "key": k, "value": k} | changed)


CALLS = {
    "a padding mask (B, S)": masked(ones(2, 5, dtype=bool)),
    "a mask of keys by queries": masked(ones(5, 3, dtype=bool)),
    "a mask (B, L, S)": masked(ones(2, 3, 5, dtype=bool)),
    "a mask (B * Hq, L, S)": masked(ones(8, 3, 5, dtype=bool)),
    "a mask of integers": masked(ones(3, 5, dtype=np.int64)),
    "a mask that is a list": masked([[True] * 5] * 3),
    "a mask as is_causal": called(is_causal=ones(3, 5, dtype=bool)),
    "heads behind positions": lambda: attend(*(ones(2, n, 4, 8) for n in (3, 5, 5))),
    "fewer key heads than query heads": called(key=two, value=two),
    "query heads that do not divide": called(key=two[:, [0, 1, 0]], value=two[:, [0, 1, 0]],
                                             enable_gqa=True),
    "key heads unlike value heads": called(key=two, enable_gqa=True),
    "another word for the layout": called(layout="BSHD"),
    "other head sizes": called(key=ones(2, 4, 5, 16)),
    "values of another length": called(value=ones(2, 4, 6, 8)),
    "another batch": called(key=ones(3, 4, 5, 8), value=ones(3, 4, 5, 8)),
    "no head size": called(key=ones(2, 4, 5, 0)),
    "too large a head size": called(query=np.broadcast_to(f32(1), (2, 4, 3, 65537)),
                                    key=np.broadcast_to(f32(1), (2, 4, 5, 65537))),
    "a single row": called(query=ones(8)),
    "a list": called(query=q.tolist()),
    "integers": called(query=q.astype(np.int32)),
    "complex numbers": called(query=q.astype(np.complex64)),
    "objects": called(query=q.astype(object)),
    "a masked array": called(query=np.ma.masked_array(q)),
    "two dtypes": called(key=k.astype(np.float16)),
    "an array of a GPU": called(query=Producer(q, device=(2, 0))),
    "bfloat16 without ml_dtypes": without_ml_dtypes,
    "a scale that is no number": called(scale=float("nan")),
    "a word for the scale": called(scale="auto"),
    "another word for causality": called(is_causal="upper_left"),
    "one number for the window": called(window=3),
    "a window below 0": called(window=(-1, 0)),
    "a soft cap below 0": called(softcap=-1.0),
    "dropout in per cent": called(dropout_p=50),
    "true as the fifth argument": lambda: attend(q, k, k, None, True),
    "a bool as a number": called(dropout_p=0.1, seed=True),
    "a generator as seed": called(dropout_p=0.1, seed=np.random.default_rng(0)),
    "out of another dtype": called(out=ones(2, 4, 3, 8, dtype=np.float64)),
    "out of another shape": called(out=ones(2, 4, 5, 8)),
    "out that is read-only": called(out=read_only()),
    "out whose elements share memory": called(
        out=np.lib.stride_tricks.as_strided(ones(99), q.shape, (4, 4, 4, 4))),
    "sinks for other heads": called(sinks=ones(3)),
    "offsets for another batch": called(query_offset=[1, 2, 3]),
    "offsets of unequal length": called(query_offset=[[1], [1, 2]]),
    "an unknown argument": called(attention_mask=None),
    "a device that is not there": called(device="cuda"),
    "a number beyond the devices": called(device=99),
    "a result without memory": lambda: attend(big(), big(), big()),
    "a full cache": lambda: cache().append(ones(2, 4, 7, 8), ones(2, 4, 7, 8)),
    "no free page": no_free_page,
    "a cache of other heads": lambda: cache().append(ones(2, 1, 4, 8), ones(2, 1, 4, 8)),
    "a cache without a head size": lambda: clattn.KVCache(2, 4, 6, 0),
    "a cache cut too long": lambda: cache().truncate(3),
    "if on a symbol": lambda: flex(q, k, k, clipped),
    "a list in a mod": lambda: flex(q, k, k, of_a_list),
    "a number from a mask_mod": lambda: flex(q, k, k, mask_mod=lambda b, h, i, j: i - j),
    "a function as block mask": lambda: flex(q, k, k, block_mask=causal),
    "a block mask whose numbers have changed": lambda: flex(
        q, k, k, block_mask=changed_blocks(False)),
    "a block mask whose array has changed": lambda: flex(q, k, k, block_mask=changed_blocks(True)),
    "a block mask of other lengths": lambda: flex(q, k, k, block_mask=blocks(3, 4)),
    "lengths instead of offsets": lambda: packed([2, 3], [2, 3]),
    "offsets beyond the rows": lambda: packed([0, 2, 6], [0, 2, 5]),
    "offsets of another count": lambda: packed([0, 2, 5], [0, 5]),
    "a page that is not there": lambda: packed([0, 5], None, key=ones(2, 4, 2, 8),
                                               value=ones(2, 4, 2, 8), block_table=[[2]],
                                               seqused_k=[3]),
    "three dimensions without heads": lambda: onnx(*(ones(2, n, 32) for n in (3, 5, 5))),
    "a past key alone": lambda: onnx(q, k, k, past_key=k),
    "windows in an older opset": lambda: onnx(q, k, k, opset=24, left_window_size=3),
}  # fmt: skip
ENTRY = re.compile(r"^\*\*([^\n]+)\*\*\n\n```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
# Messages that the page leaves out, because nothing is to be added to them.
PLAIN = dict(ENTRY.findall((ROOT / "tests/support/messages.md").read_text(encoding="utf-8")))
SHOWN = {title[0].lower() + title[1:]: text for title, text in ENTRY.findall(PAGE)}
WORDS = PLAIN | SHOWN


def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no exception")


def fits(shown, said):
    """Whether the page shows the message; … on the page stands for what machines differ in."""
    return re.fullmatch(re.escape(shown).replace("…", ".*"), said, re.DOTALL)


@pytest.mark.cpus
@looped("title", list(CALLS))
def test_the_message_is_that_of_the_page(first_device, title):
    with clattn.use_device(first_device):
        said = message(CALLS[title])
    assert fits(WORDS[title], said), said


def test_a_cache_needs_ml_dtypes_too():
    said = message(lambda: without_ml_dtypes(clattn.KVCache, 4, 6, 8))
    assert fits(SHOWN["bfloat16 without ml_dtypes"], said), said


def test_the_page_shows_what_is_said_without_a_driver(tmp_path):
    code = "import clattn\ntry: clattn.eye(2)\nexcept clattn.DeviceError as error: print(error)"
    said = run_python(code, env=no_opencl(tmp_path)).stdout.strip()
    assert fits(SHOWN["no driver"], f"DeviceError: {said}"), said


def test_the_page_shows_what_a_tensor_with_gradients_gives():
    torch = pytest.importorskip("torch")
    said = message(called(query=torch.from_numpy(q).requires_grad_()))
    assert fits(SHOWN["a tensor that requires gradients"], said), said


def test_the_page_shows_what_two_devices_give():
    if len(clattn.devices()) < 2:
        pytest.skip("there is one device")
    first, second = clattn.devices()[:2]
    said = message(lambda: attend(clattn.tensor(q, first), clattn.tensor(k, second), k))
    assert fits(SHOWN["tensors on two devices"], said), said


def test_the_page_shows_what_a_queue_of_another_loader_gives(monkeypatch):
    cl = pytest.importorskip("pyopencl")
    context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
    from clattn._host import drivers, pyopencl

    monkeypatch.setattr(drivers, "loader_of_pyopencl", lambda: b"/opt/libanother.so")
    pyopencl._check_loader.cache_clear()
    said = message(lambda: clattn.Device.from_pyopencl(cl.CommandQueue(context)))
    assert fits(SHOWN["a queue of another loader"], said), said


def test_the_page_shows_what_a_context_that_nobody_keeps_gives(device):
    """In a process of its own, where nothing else can get the handle's memory."""
    pytest.importorskip("pyopencl")
    code = """
    import sys
    import clattn, pyopencl as cl
    found = [d for p in cl.get_platforms() for d in p.get_devices() if d.name == sys.argv[1]]
    for queue in (cl.CommandQueue(cl.Context([device])) for device in found):
        try: clattn.Device.from_pyopencl(queue)
        except clattn.DeviceError as error: print(f"DeviceError: {error}")
    """
    for said in run_python(code, device.name).stdout.splitlines():  # some runtimes keep it
        assert fits(SHOWN["a queue whose context is gone"], said), said


def test_the_page_shows_what_float64_gives_without_it(first_device, faults_library):
    code = """
    clattn.set_default_device(listed[index])
    print(clattn.eye(2, dtype="float64").dtype)
    try: clattn.scaled_dot_product_attention(*np.ones((3, 2, 2, 8)))
    except clattn.DeviceError as error: print(f"DeviceError: {error}")
    """
    done = faults.open_with(faults_library, first_device, code, FAULTS_WITHOUT="cl_khr_fp64")
    matrix, said = done.stdout.splitlines()
    assert fits(SHOWN["float64 on a device without it"], said), said
    assert matrix == "float64"


def test_each_entry_of_the_page_is_tested():
    others = {
        "no driver",
        "a tensor that requires gradients",
        "tensors on two devices",
        "float64 on a device without it",
        "a queue of another loader",
        "a queue whose context is gone",
    }
    assert SHOWN.keys() == (CALLS.keys() | others) - PLAIN.keys()
    assert PLAIN.keys() < CALLS.keys()
    assert len(SHOWN) == PAGE.count("```text")
