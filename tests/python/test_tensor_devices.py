# SPDX-License-Identifier: MIT
"""Tensors of several devices, in every mode of memory, and in a forked child; caches there too."""

import sys

import clattn
import numpy as np
import pytest
from conftest import DEVICES
from references.diagonal import DTYPES, numbers
from support.data import draw, qkv, sdpa
from support.loops import looped
from support.processes import TESTS, has_memory, run, run_on
from support.tensors import CALLS, same_bits

each_call = looped("call", CALLS.values(), ids=CALLS)
SEVERAL = {name: call for name, call in CALLS.items() if len(call.arrays) > 1}
each_call_of_several = looped("call", SEVERAL.values(), ids=SEVERAL)
TENSOR_TESTS = ("test_tensor.py", "test_tensor_views.py", "test_tensor_dlpack.py",
                "test_tensor_operators.py", "test_tensor_chains.py",
                "test_tensor_memory.py")  # fmt: skip


@pytest.fixture
def other(device):
    """Another device than `device`."""
    others = [d for d in clattn.devices() if d != device]
    if not others:
        pytest.skip("there is one device only")
    return others[0]


def refusal(action):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        action()
    return str(caught.value)


def assert_names(text, *words):
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


@each_call_of_several
def test_two_devices_in_one_call(device, other, call):
    """ValueError that names both devices and both arguments, whichever is elsewhere."""
    names = call.read_by_device
    for elsewhere in names:

        def change(name, a, elsewhere=elsewhere):
            return clattn.tensor(a, other if name == elsewhere else device)

        text = refusal(lambda: call.run(change))
        assert_names(text, elsewhere, device.name, other.name)
        assert any(name in text for name in names if name != elsewhere)


@each_call
def test_a_device_that_is_not_the_tensors(device, other, call):
    """`device=` beside a Tensor of another one: both are named, and so are both arguments."""
    if not call.takes_device:
        return
    tensors = {name: clattn.tensor(a, device) for name, a in call.arrays.items()}
    for one in call.read_by_device:
        text = refusal(lambda: call.run(lambda n, a: tensors[n] if n == one else a, device=other))  # noqa: B023
        assert_names(text, "device", one, device.name, other.name)
    text = refusal(lambda: call.run(lambda name, _: tensors[name], device=other))
    assert_names(text, "device", device.name, other.name)
    assert any(name in text for name in tensors)


@each_call
def test_the_default_device_does_not_matter(device, other, call):
    """Nor does use_device: the call runs where the Tensors are."""
    right = call.run(device=device)
    first = next(iter(call.arrays))
    with clattn.use_device(other):
        all_of_them = call.run(lambda name, a: clattn.tensor(a, device))
        one = call.run(lambda name, a: clattn.tensor(a, device) if name == first else a)
    for name in right:
        assert all_of_them[name].device == device
        same_bits(all_of_them[name], right[name])
        same_bits(one[name], right[name])


def test_out_on_another_device(device, other):
    q, k, v = qkv((2,), 5, 7, 8)
    out = clattn.tensor(np.zeros_like(q), other)
    tensors = [clattn.tensor(a, device) for a in (q, k, v)]
    text = refusal(lambda: sdpa(*tensors, out=out, device=None))
    assert_names(text, "out", "query", device.name, other.name)
    text = refusal(lambda: sdpa(q, k, v, out=out, device=device))
    assert_names(text, "out", "device", device.name, other.name)
    with clattn.use_device(device):
        assert sdpa(q, k, v, out=out, device=None) is out
        same_bits(out, sdpa(q, k, v, device=other))
        out = clattn.tensor(np.zeros((3, 4), np.float32), other)
        assert clattn.diagonal_matrix((3, 4), 1, 0, 1, out=out) is out
    same_bits(out, clattn.eye(3, 4, device=other))
    with pytest.raises(ValueError, match="out"):
        clattn.diagonal_matrix((3, 4), 1, 0, 1, out=out, device=device)


def test_words_name_the_device_of_a_call(device):
    """The same device in any words is no contradiction."""
    t = clattn.tensor(np.ones((2, 3, 4), np.float32), device)
    peers = [d for d in clattn.devices() if d.type == device.type]
    word = f"{device.type}:{peers.index(device)}"
    for name in (device, word):
        same_bits(sdpa(t, t, t, device=name), np.ones((2, 3, 4), np.float32))
    with pytest.raises(ValueError, match="names no"):
        sdpa(t, t, t, device="no such device")
    with pytest.raises(TypeError, match="device"):
        sdpa(t, t, t, device=7.5)


def test_to(device, other):
    """The Tensor itself where it is there already; else a copy, of views too."""
    a = numbers((4, 6, 5), np.dtype("f4"))
    t = clattn.tensor(a, device)
    assert t.to(device) is t
    view = t[:, ::-2].T
    assert view.to(device) is view
    moved = view.to(other)
    assert type(moved) is clattn.Tensor and moved.device == other
    same_bits(moved, a[:, ::-2].T)
    same_bits(moved.to(device), a[:, ::-2].T)
    assert moved.to(device).device == device
    peers = [d for d in clattn.devices() if d.type == other.type]
    assert t.to(f"{other.type}:{peers.index(other)}").device == other
    t.numpy()[...] = 0
    same_bits(moved, a[:, ::-2].T)


@looped("dtype", DTYPES, ids=str)
def test_every_dtype_moves(device, other, dtype):
    for a in (numbers((3, 4), dtype), numbers((), dtype), numbers((0, 3), dtype)):
        same_bits(clattn.tensor(a, device).to(other), a)


def test_to_nowhere(device):
    t = clattn.tensor(np.ones(3), device)
    with pytest.raises(ValueError, match="names no"):
        t.to("no such device")
    for wrong in (7.5, [device], b"cpu"):
        with pytest.raises(TypeError, match="device"):
            t.to(wrong)
    with pytest.raises(TypeError):
        t.to()


def test_results_of_running_calls_move(device, other):
    q, k = (draw((1, 8, 512, 64), seed=n) for n in range(2))
    tq, tk = clattn.tensor(q, device), clattn.tensor(k, device)
    right = sdpa(q, k, k, device=device)
    for _ in range(3):
        there = sdpa(tq, tk, tk, device=None).to(other)
        back = sdpa(there, there, there, device=None)
        same_bits(there, right)
        same_bits(back, sdpa(right, right, right, device=other))


def test_tensor_of_a_tensor_elsewhere(device, other):
    """It stays where it is, whatever the default is, unless a device is said."""
    a = draw((3, 4))
    t = clattn.tensor(a, device)
    with clattn.use_device(other):
        same = clattn.tensor(t)
    assert same.device == device and same is not t
    moved = clattn.tensor(t[::-1], other)
    assert moved.device == other
    same_bits(moved, a[::-1])


def test_memory_is_counted_by_device(device, other):
    here, there = (clattn.memory_stats(d)["allocated_blocks"] for d in (device, other))
    t = clattn.tensor(np.ones(1000), device)
    assert clattn.memory_stats(device)["allocated_blocks"] == here + 1
    assert clattn.memory_stats(other)["allocated_blocks"] == there
    moved = t.to(other)
    assert clattn.memory_stats(other)["allocated_blocks"] == there + 1
    assert moved.device == other
    with clattn.use_device(other):
        assert clattn.memory_stats() == clattn.memory_stats(other)


@pytest.mark.parametrize("mode", ["svm", "host", "copy"])
def test_memory_modes(first_device, mode):
    """Everything that the other files say about Tensors holds in every mode.

    On the first device: test_copies.py and test_memory.py run the modes on each.
    """
    if mode in [d.memory_mode for d in DEVICES]:
        pytest.skip("the files themselves run in this mode")
    if not has_memory(first_device, mode):
        pytest.skip("the device has no such memory")
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=9", "-p", "no:xdist", "-p",
               "no:cacheprovider", *(TESTS / "python" / name for name in TENSOR_TESTS)]  # fmt: skip
    name = first_device.platform.split()[0].partition("(")[0]  # part of the tests' ids
    said = run([*map(str, command), "-k", name], timeout=400, check_exit=False, cwd=TESTS.parent,
               env={"CLATTN_MEMORY": mode, "PYTEST_ADDOPTS": None})  # fmt: skip
    assert said.returncode == 0, said.stdout[-4000:]
    assert " passed" in said.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child(device):
    """Attributes can be read, all else is a DeviceError, deleting is silent; nothing hangs."""
    done = run_on(
        device,
        """
        import pytest
        from support.processes import run_forked
        a = np.arange(12, dtype=np.float32).reshape(3, 4)
        t, small = clattn.tensor(a, device), clattn.tensor(a, device)
        running = clattn.scaled_dot_product_attention(t, t, t)
        array, capsule = small.numpy(), small.__dlpack__(dl_device=(1, 0))
        lost = clattn.scaled_dot_product_attention(t, t, t)
        cache = clattn.KVCache(1, 1, 9, 4, device=device)
        tokens = clattn.tensor(a.reshape(1, 1, 3, 4), device)
        cache.append(tokens, tokens)

        refused = {
            "numpy": lambda: t.numpy(), "array": lambda: np.asarray(t), "repr": lambda: repr(t),
            "result": lambda: running.numpy(), "tensor": lambda: clattn.tensor(a, device),
            "copy": lambda: clattn.tensor(t), "dlpack": lambda: t.__dlpack__(),
            "call": lambda: clattn.scaled_dot_product_attention(t, t, t),
            "arrays": lambda: clattn.diagonal_matrix(a, 1, 0, 1, device=device),
            "out": lambda: clattn.diagonal_matrix(a, 1, 0, 1, out=t),
            "reshape": lambda: t.T.reshape(-1), "synchronize": lambda: clattn.synchronize(device),
            "to": lambda: t.to(clattn.devices()[0] if clattn.devices()[0] != device else device),
            "host": lambda: t.__dlpack__(dl_device=(1, 0)),
            "append": lambda: cache.append(tokens, tokens),
            "attend": lambda: cache.attend(tokens), "key": lambda: cache.key.numpy(),
            "cache": lambda: clattn.KVCache(1, 1, 1, 1, device=device),
        }

        def child():
            global running, lost, array, capsule, small, cache, tokens
            assert t.shape == (3, 4) and t.strides == (16, 4) and t.dtype == np.float32
            assert (t.ndim, t.size, t.nbytes, len(t), t.itemsize) == (2, 12, 48, 3, 4)
            assert t.device.name == device.name
            for name, action in refused.items():
                with pytest.raises(clattn.DeviceError, match="fork"):
                    print(name)
                    action()
            assert (array == a).all()
            del running, lost, array, capsule, small, cache, tokens
            gc.collect()

        run_forked(child)
        same = clattn.scaled_dot_product_attention(t, t, t).numpy()
        assert (same == running.numpy()).all() and (lost.numpy() == same).all()  # goes on
        cache.append(tokens, tokens)
        assert cache.length == 6 and (cache.attend(tokens).numpy() != 0).any()
        """,
        check_exit=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "deleting is silent"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_ends_as_usual(device):
    """With Tensors alive, and an interpreter that is finalised."""
    done = run_on(
        device,
        """
        import signal, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork
        t = clattn.tensor(np.ones((40, 50), np.float32), device)
        kept = [t.numpy(), t[1:], t.__dlpack__(), clattn.tril(t)]
        pid = os.fork()
        signal.alarm(60)
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """,
        check_exit=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_repr_tells_devices_apart(device, other):
    here, there = (repr(clattn.tensor(np.ones(2), d)) for d in (device, other))
    assert here != there
