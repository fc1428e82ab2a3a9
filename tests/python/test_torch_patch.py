# SPDX-License-Identifier: MIT
"""Putting clattn behind torch's function, and taking it away again."""

import os
import threading
from contextlib import suppress
from itertools import chain

import clattn
import pytest
from clattn import attention
from support.processes import no_opencl, run_python

torch = pytest.importorskip("torch")

import clattn.torch  # noqa: E402
from support.torch_calls import TORCH, tensors  # noqa: E402
from torch.nn import functional as F  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_calls")

q, k, v = tensors()


def test_patch_and_unpatch(device, torch_calls):
    clattn.torch.patch(device)
    assert F.scaled_dot_product_attention is clattn.torch.scaled_dot_product_attention
    clattn.torch.patch(device)
    F.scaled_dot_product_attention(q, k, v)
    assert torch_calls == [device]
    clattn.torch.unpatch()
    assert F.scaled_dot_product_attention is TORCH
    clattn.torch.unpatch()


def test_patch_again_changes_the_device(torch_calls):
    for device in clattn.devices():
        clattn.torch.patch(device)
        F.scaled_dot_product_attention(q, k, v)
    clattn.torch.patch()
    F.scaled_dot_product_attention(q, k, v)
    clattn.torch.unpatch()
    assert torch_calls == [*clattn.devices(), None]


def test_a_device_is_named_by_words(device, torch_calls):
    with clattn.torch.sdpa(device.platform):
        F.scaled_dot_product_attention(q, k, v)
    assert torch_calls == [clattn._core.find_device(device.platform)]


def test_the_default_device_is_that_of_the_call(device, torch_calls, monkeypatch):
    used = []
    attend = attention.scaled_dot_product_attention

    def watch(*args, **options):
        used.append(clattn.get_default_device())
        return attend(*args, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watch)
    clattn.torch.patch()
    with clattn.use_device(device):
        F.scaled_dot_product_attention(q, k, v)
    clattn.torch.unpatch()
    assert used == [device]
    assert torch_calls == [None]


def test_blocks_nest(torch_calls):
    devices = clattn.devices()
    outer, inner = devices[0], devices[-1]
    with clattn.torch.sdpa(outer):
        with clattn.torch.sdpa(inner):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert torch_calls == [inner, outer]


def test_patches_and_blocks_in_each_other(device, torch_calls):
    """A patch inside a block stays after it; unpatch inside a block leaves the block."""
    clattn.torch.patch()
    with clattn.torch.sdpa(device):
        F.scaled_dot_product_attention(q, k, v)
        clattn.torch.unpatch()
        F.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention is TORCH
    with clattn.torch.sdpa():
        clattn.torch.patch(device)
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    clattn.torch.patch()
    with clattn.torch.sdpa(device):
        pass
    F.scaled_dot_product_attention(q, k, v)
    clattn.torch.unpatch()
    assert torch_calls == [device] * 4 + [None]


def test_an_exception_ends_a_block(device):
    with pytest.raises(KeyError), clattn.torch.sdpa(device):
        raise KeyError
    assert F.scaled_dot_product_attention is TORCH


def test_a_block_is_a_decorator(device, torch_calls):
    @clattn.torch.sdpa(device)
    def attend():
        return F.scaled_dot_product_attention(q, k, v)

    attend()
    attend()
    assert F.scaled_dot_product_attention is TORCH
    assert torch_calls == [device, device]


def test_blocks_of_threads_overlap(device):
    """The one that began first ends first; torch's function is back after both."""
    began, may_end = threading.Event(), threading.Event()

    def work():
        with clattn.torch.sdpa(device):
            began.set()
            may_end.wait(60)

    with clattn.torch.sdpa(device):
        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(60)
    assert F.scaled_dot_product_attention is clattn.torch.scaled_dot_product_attention
    may_end.set()
    thread.join()
    assert F.scaled_dot_product_attention is TORCH


@pytest.mark.parametrize("wrong", ["no such device", 3.0], ids=str)
def test_a_device_that_is_none(wrong):
    error = ValueError if isinstance(wrong, str) else TypeError
    with pytest.raises(error):
        clattn.torch.patch(wrong)
    with pytest.raises(error), clattn.torch.sdpa(wrong):
        pass
    assert F.scaled_dot_product_attention is TORCH


def test_anothers_replacement_is_kept(device):
    """One that was there before comes back; one that came later is not touched."""

    def before(*args, **options):
        return TORCH(*args, **options)

    def later(*args, **options):
        return TORCH(*args, **options)

    try:
        F.scaled_dot_product_attention = before
        with clattn.torch.sdpa(device):
            assert F.scaled_dot_product_attention is clattn.torch.scaled_dot_product_attention
        assert F.scaled_dot_product_attention is before
        with clattn.torch.sdpa(device):
            F.scaled_dot_product_attention = later
        assert F.scaled_dot_product_attention is later
    finally:
        F.scaled_dot_product_attention = TORCH


def test_what_is_left_goes_to_what_stood_there(device, torch_calls):
    """A wrapper may itself call clattn's function, which an earlier patch put there."""
    seen = []

    def wrap(function):
        def wrapper(*args, **options):
            seen.append(len(args))
            return function(*args, **options)

        return wrapper

    wide = torch.ones(1, 2, 4, 257, requires_grad=True)
    try:
        for stands in (wrap(TORCH), wrap(clattn.torch.scaled_dot_product_attention)):
            F.scaled_dot_product_attention = stands
            with clattn.torch.sdpa(device):
                F.scaled_dot_product_attention(q, k, v)
                assert not seen
                result = F.scaled_dot_product_attention(wide, wide, wide)
                assert len(seen) == 1
            assert torch.equal(result, TORCH(wide, wide, wide))
            assert F.scaled_dot_product_attention is stands
            seen.clear()
        clattn.torch.scaled_dot_product_attention(wide, wide, wide)  # without a patch: torch's
        assert not seen
    finally:
        F.scaled_dot_product_attention = TORCH
    assert torch_calls == [device] * 2


def test_a_handler_may_interrupt_a_patch(device):
    """The handler of a signal runs in a thread that may hold the lock just then."""

    def work():
        with clattn.torch._lock, clattn.torch.sdpa(device):
            seen.append(clattn.torch.is_patched())

    seen = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert seen == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_locks_of_its_own():
    """Those that other threads of the parent hold stay locked in it for ever."""
    code = """
        import os, signal, threading, torch
        import clattn.torch
        held, done = threading.Event(), threading.Event()

        def hold():
            with clattn.torch._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            x = torch.ones(1, 1, 2, 4, requires_grad=True)
            with clattn.torch.sdpa():
                torch.nn.functional.scaled_dot_product_attention(x, x, x)
            assert clattn.torch.call_counts().total() == 1
            os._exit(0)
        done.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    """
    run_python(code)


def test_is_patched():
    assert not clattn.torch.is_patched()
    clattn.torch.patch()
    with clattn.torch.sdpa():
        clattn.torch.unpatch()
        assert clattn.torch.is_patched()
        F.scaled_dot_product_attention = TORCH
        assert not clattn.torch.is_patched()
    assert not clattn.torch.is_patched()


def test_calls_are_counted_with_the_reason(device):
    """Each reason why torch computes a call, and the number of clattn's own."""
    learnt = q.clone().requires_grad_()
    wide = torch.ones(1, 2, 4, 257, requires_grad=True)
    calls = {
        "clattn": [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"query": learnt}],
        "torch: gradients are needed that clattn does not compute fast": [
            {"query": wide, "key": wide}
        ],
        "torch: tensors of other kinds, devices or dtypes": [
            {"query": q.to("meta")},
            {"key": k.to_sparse()},
            {"query": q.int()},
        ],
        "torch: clattn refuses the arguments": [
            {"value": v.double()},
            {"key": k.int()},
            {"key": k[..., 1:]},
            {"is_causal": "upper"},
            {"dropout_p": 1.5},
        ],
    }
    before = clattn.torch.call_counts()
    with clattn.torch.sdpa(device):
        for options in chain.from_iterable(calls.values()):
            with suppress(RuntimeError, TypeError):  # of torch
                F.scaled_dot_product_attention(**{"query": q, "key": k, "value": v} | options)
        torch.vmap(F.scaled_dot_product_attention)(q, k, v)
    expected = {who: len(made) for who, made in calls.items()}
    expected["torch: it records or transforms the call"] = 1
    assert clattn.torch.call_counts() - before == expected


def test_clattn_imports_torch_when_it_is_asked_for():
    run_python("""
        import clattn, sys
        assert 'torch' not in sys.modules
        clattn.torch.patch()
        assert 'torch' in sys.modules
    """)


def test_a_module_that_there_is_not():
    with pytest.raises(AttributeError, match="no attribute 'tensorflow'"):
        _ = clattn.tensorflow


def test_patching_touches_no_opencl(tmp_path):
    """Only the first call does, and says what to install."""
    code = r"""
        import clattn, clattn.torch, pytest, torch
        from torch.nn import functional as F
        clattn.torch.patch()
        x = torch.ones(1, 1, 2, 4, requires_grad=True)
        for y in (x, x.detach()):
            with pytest.raises(clattn.DeviceError, match="pip install intel-opencl-rt"):
                F.scaled_dot_product_attention(y, y, y)
    """
    run_python(code, env=no_opencl(tmp_path))


def test_a_torch_that_is_too_old():
    code = """
        import torch, pytest, clattn
        torch.__version__ = type(torch.__version__)("2.4.1+cpu")
        with pytest.raises(ImportError, match="torch 2.5 or later"):
            import clattn.torch
    """
    run_python(code)


def test_without_torch():
    code = """
        import sys, pytest, clattn
        sys.modules["torch"] = None
        with pytest.raises(ImportError, match="pip install torch"):
            import clattn.torch
        with pytest.raises(AttributeError, match="pip install torch"):
            clattn.torch
        assert not hasattr(clattn, "torch") and getattr(clattn, "torch", None) is None
        assert {"torch", "jax", "dask", "mpi", "transformers", "tensor"} <= set(dir(clattn))
    """
    run_python(code)
