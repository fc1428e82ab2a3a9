# SPDX-License-Identifier: MIT
"""Devices in this process: what they tell, how they are named, which one a call runs on."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import clattn
import numpy as np
import pytest
from conftest import DEVICES, NO_DEVICE
from references.attention import attention, tolerance
from support.checks import assert_close, check_attention
from support.data import draw, qkv, sdpa
from support.faults import open_with
from support.processes import index_of, run_python
from support.threads import run_together
from support.variants import SMALL_TILE, forced


@pytest.fixture(autouse=True)
def restore_default_device():
    yield
    clattn.set_default_device(None)


def unique_part(device):
    """A part of the platform's name, or of the device's, that fits no other device."""
    others = [d for d in clattn.devices() if d != device]
    for text in (device.platform, device.name):
        if not any(text in d.platform or text in d.name for d in others):
            return text
    pytest.skip("no name tells this device from the others")
    return None


def others(device):
    return [d for d in clattn.devices() if d != device]


def test_attributes(device):
    for name in ("name", "vendor", "platform", "version", "driver_version"):
        text = getattr(device, name)
        assert isinstance(text, str) and text == text.strip() and text, name
    assert device.type in ("cpu", "gpu", "accelerator")
    assert "OpenCL" in device.version
    assert isinstance(device.compute_units, int) and device.compute_units > 0
    assert isinstance(device.memory, int) and device.memory > 64 << 20


def test_attributes_cannot_be_set(device):
    with pytest.raises(AttributeError):
        device.name = "another"


def test_devices_cannot_be_made_up():
    """Devices come from clattn.devices() only."""
    with pytest.raises(TypeError):
        clattn.Device()


def test_listing_is_stable():
    """A new list each time, of equal devices in the same order."""
    first, second = clattn.devices(), clattn.devices()
    assert isinstance(first, list) and first == second
    first.clear()
    assert clattn.devices() == second


def test_equality_hash_and_repr(device):
    same = clattn.devices()[index_of(device)]
    assert same == device and hash(same) == hash(device) and isinstance(device, clattn.Device)
    assert (same != device) is False
    assert device != device.name and device is not None and device != 0
    assert len({*clattn.devices(), *clattn.devices()}) == len(clattn.devices())
    assert device.name in repr(device)


def test_a_device_is_pickled_by_its_names(device):
    """It is found again, here and in another process; where there is none, the error says so."""
    written = pickle.dumps(device)
    assert pickle.loads(written) == copy.deepcopy(device) == device
    run_python(f"""
        import clattn, pickle
        device = pickle.loads({written!r})
        assert device == clattn.devices()[{index_of(device)}]
    """)
    with pytest.raises(clattn.DeviceError, match="here are 0 of these"):
        clattn.device._find_again("another platform", device.name, 0)


def test_a_device_of_a_queue_is_copied_and_not_pickled(device):
    cl = pytest.importorskip("pyopencl")
    for platform in cl.get_platforms():
        for found in platform.get_devices():
            if (platform.name.strip(), found.name.strip()) == (device.platform, device.name):
                context = cl.Context([found])
                queue = cl.CommandQueue(context)
                adopted = clattn.Device.from_pyopencl(queue)
                assert copy.copy(adopted) == copy.deepcopy([adopted])[0] == adopted != device
                with pytest.raises(TypeError, match="queue of pyopencl cannot be pickled"):
                    pickle.dumps(adopted)
                return
    pytest.skip("pyopencl does not list the device")


def test_device_error_is_a_runtime_error():
    assert issubclass(clattn.DeviceError, RuntimeError)


def test_naming_by_type(device):
    """'cpu' is the first CPU, 'cpu:1' the second: numbers count from 0 within the type."""
    peers = [d for d in clattn.devices() if d.type == device.type]
    number = peers.index(device)
    clattn.set_default_device(f"{device.type}:{number}")
    assert clattn.get_default_device() == device
    clattn.set_default_device(device.type)
    assert clattn.get_default_device() == peers[0]


def test_naming_by_part_of_a_name(device):
    """Of the platform or of the device itself; a leading part of it as well."""
    text = unique_part(device)
    clattn.set_default_device(text)
    assert clattn.get_default_device() == device
    check_attention(*qkv((1, 2)), device=text)


def test_device_argument(device):
    """Device objects and names do as `device`, and leave the default as it is."""
    default = clattn.get_default_device()
    number = [d for d in clattn.devices() if d.type == device.type].index(device)
    check_attention(*qkv((1, 2)), device=device)
    check_attention(*qkv((1, 2)), device=f"{device.type}:{number}")
    check_attention(*qkv((1, 2)), device=None)
    assert clattn.get_default_device() == default


def test_set_default_device(device):
    """None restores the natural default."""
    natural = clattn.get_default_device()
    clattn.set_default_device(device)
    assert clattn.get_default_device() == device
    check_attention(*qkv((1, 2)), device=None)
    clattn.set_default_device(None)
    assert clattn.get_default_device() == natural


@pytest.mark.parametrize("wrong", ["no such device", "cpu:77"])
def test_an_unknown_default_changes_nothing(device, wrong):
    clattn.set_default_device(device)
    with pytest.raises(ValueError, match="device"):
        clattn.set_default_device(wrong)
    with pytest.raises(ValueError, match="device"), clattn.use_device(wrong):
        pass
    for kind in (7.0, b"cpu", ["cpu"]):
        with pytest.raises(TypeError, match="device"):
            clattn.set_default_device(kind)
        with pytest.raises(TypeError, match="device"), clattn.use_device(kind):
            pass
    assert clattn.get_default_device() == device


def test_use_device(device):
    """Within the block, by object and by name; afterwards the old default again."""
    before = clattn.get_default_device()
    for word in (device, unique_part(device)):
        with clattn.use_device(word):
            assert clattn.get_default_device() == device
            check_attention(*qkv((1, 2)), device=None)
        assert clattn.get_default_device() == before


def test_use_device_checks_its_words_at_once():
    """It refuses wrong words when it is called, not when the `with` block begins."""
    with pytest.raises(ValueError, match="device 'no such device' names no OpenCL device"):
        clattn.use_device("no such device")


def test_a_short_name_of_a_platform_that_is_absent():
    """It does not fit a device whose own name has the word, such as a CPU of AMD."""
    present = " ".join(d.platform for d in clattn.devices()).lower()
    absent = next(word for word in ("amd", "nvidia", "oclgrind") if word not in present)
    with pytest.raises(ValueError, match=f"'{absent}' names a platform that has no OpenCL device"):
        clattn.set_default_device(absent)


def test_use_device_nests(device):
    before = clattn.get_default_device()
    with clattn.use_device(device):
        for other in others(device):
            with clattn.use_device(other):
                assert clattn.get_default_device() == other
                with clattn.use_device(device):
                    assert clattn.get_default_device() == device
                assert clattn.get_default_device() == other
        assert clattn.get_default_device() == device
    assert clattn.get_default_device() == before


def leave_by_error(device):
    with clattn.use_device(device):
        raise KeyError("on purpose")


def test_use_device_ends_with_an_exception(device):
    before = clattn.get_default_device()
    with pytest.raises(KeyError, match="on purpose"):
        leave_by_error(device)
    assert clattn.get_default_device() == before


def test_use_device_beats_the_default_and_the_argument_beats_both(device):
    for other in others(device):
        clattn.set_default_device(other)
        with clattn.use_device(device):
            assert clattn.get_default_device() == device
        assert clattn.get_default_device() == other
    with pytest.raises(ValueError, match="device"), clattn.use_device(device):
        sdpa(*qkv(), device="no such device")


def test_use_device_in_one_thread_is_not_seen_in_another():
    """Two threads inside their own blocks at the same time each see their own device."""
    both_inside = threading.Barrier(2, timeout=30)
    before = clattn.get_default_device()

    def inside(device):
        with clattn.use_device(device):
            both_inside.wait()
            seen = clattn.get_default_device()
            both_inside.wait()
        return seen, clattn.get_default_device()

    first, last = clattn.devices()[0], clattn.devices()[-1]
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(inside, d) for d in (first, last)]
        assert [a.result(timeout=60) for a in answers] == [(first, before), (last, before)]
    assert clattn.get_default_device() == before


def test_eight_threads_at_once(device, kernel):
    """Kernel arguments are not mixed up between calls: shapes, flags and data differ."""
    start = threading.Barrier(8, timeout=60)

    def work(number):
        q, k, v = qkv((1 + number % 3, 2), 5 + 7 * number, 9 + 5 * number, 8, seed=number)
        options = {"is_causal": bool(number % 2), "scale": 0.2 + 0.1 * number}
        right, allowed = attention(q, k, v, **options)[0], tolerance(q, k, v, **options)[0]
        start.wait()
        results = [sdpa(q, k, v, device=device, **options) for _ in range(25)]
        for result in results:
            assert_close(result, right, allowed)
        assert len({r.tobytes() for r in results}) == 1

    run_together(*(partial(work, n) for n in range(8)))


def test_threads_that_build_the_same_program_first(device):
    """Eight first calls of one kernel variant at once: one build or eight, all right."""
    q, k, v = draw((1, 3, 13)), draw((1, 5, 13)), draw((1, 5, 13), seed=1)
    right, allowed = attention(q, k, v)[0], tolerance(q, k, v)[0]
    start = threading.Barrier(8, timeout=60)

    def work():
        start.wait()
        assert_close(sdpa(q, k, v, device=device), right, allowed)

    run_together(*[work] * 8)


def test_the_lock_is_released_while_a_kernel_runs(device):
    """Another Python thread gets on during one long call."""
    length = 4096 if device.type == "cpu" else 16384
    q, k, v = (np.ones((1, 4, length, 64), np.float32) for _ in range(3))
    sdpa(q, k, v, device=device)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.wait(0.0005):
            ticks[0] += 1

    counter = threading.Thread(target=tick)
    counter.start()
    try:
        before = ticks[0]
        sdpa(q, k, v, device=device)
        during = ticks[0] - before
    finally:
        stop.set()
        counter.join()
    assert during > 5


@pytest.mark.by_turns
@pytest.mark.cpus
def test_a_driver_that_refuses_ptx(device, faults_library, tmp_path):
    """A GPU that says it has NVIDIA's instructions, and has not, runs what needs none.

    A later process knows that from the disk. Programs with small tiles are built in seconds.
    """
    for _ in range(2):
        open_with(
            faults_library,
            device,
            """
            from support.checks import check_attention
            from support.data import qkv
            device = listed[index]
            assert device.type == "gpu"
            assert device.usable and device.nvidia_capability == 0
            for rows in 1, 40:
                check_attention(*qkv((1, 2), rows, 50, 16, dtype="f2"), device=device,
                    return_lse=True)
            """,
            FAULTS_NVIDIA="1",
            XDG_CACHE_HOME=tmp_path,
            **forced(local_memory=SMALL_TILE),
        )


@pytest.mark.by_turns
def test_the_trial_of_a_variant_is_kept(device, faults_library, tmp_path):
    """A process tries a kernel at its first use; the next one need not.

    Nor if its calls have a mask, for which kernels on GPUs are other programs.
    """
    kernels = []
    for mask in ("None", "np.arange(50) < 40"):
        done = open_with(
            faults_library,
            device,
            f"""
            import numpy as np
            from support.checks import check_attention
            from support.data import qkv
            arrays = qkv((1, 2), 1, 50, 16)
            options = dict(device=listed[index], attn_mask={mask}, return_lse=False)
            before = faults.faults_kernels()
            check_attention(*arrays, **options)
            first = faults.faults_kernels() - before
            check_attention(*arrays, **options)
            print(first, faults.faults_kernels() - before - first)
            """,
            FAULTS_GPU="1",
            XDG_CACHE_HOME=tmp_path,
            **forced(local_memory=SMALL_TILE),
        )
        kernels.append([int(n) for n in done.stdout.split()])
    (first, second), later = kernels
    assert first > second
    assert later == [second, second]


@pytest.mark.by_turns
@pytest.mark.cpus
def test_matrix_units_are_emulated_on_gpus_if_asked_for(device, faults_library):
    """A GPU without them refuses the word of a kernel for them: emulation is slow."""
    open_with(
        faults_library,
        device,
        """
        import pytest
        from support.forced import FORCED
        from support.checks import check_attention
        from support.data import qkv
        device = listed[index]
        arrays = qkv((1, 1), 20, 50, 64, dtype="f2")
        clattn._core.force("mma")
        with pytest.raises(ValueError, match='no matrix units.*"mma_emulated" emulates them'):
            check_attention(*arrays, device=device)
        FORCED.words = ("mma_emulated", "")
        check_attention(*arrays, device=device, return_lse=False)
        """,
        FAULTS_GPU="1",
    )


@pytest.mark.parametrize("width", [4, 8])
def test_vectors_of_other_processors(faults_library, width):
    """Registers of 128 and 256 bits have tiles of their own: fewer rows, fewer keys at a time.

    The devices take turns: a width is a macro of the programs, which every driver knows.
    """
    if NO_DEVICE:
        pytest.fail(f"no OpenCL device to test on: {NO_DEVICE}")
    open_with(
        faults_library,
        DEVICES[width // 4 % len(DEVICES)],
        f"""
        import numpy as np
        from support.checks import check_attention
        from support.data import qkv
        device = listed[index]
        assert device.float_width == {width}
        for E, Ev in ((64, 64), (80, 80), (24, 128), (13, 29)):
            q, k, v = qkv((1, 2), 70, 150, E, Ev)
            apart = [np.stack([a, a], axis=3)[..., 0, :] for a in (k, v)]
            check_attention(q, k, v, device=device, return_lse=True)
            check_attention(q, *apart, device=device, return_lse=True, is_causal=True)
            check_attention(q, *apart, device=device, return_lse=True,
                attn_mask=q[0, 0] @ k[0, 0].T > 0)
            check_attention(*qkv((1, 2), 70, 150, E, Ev, dtype="f2"), device=device,
                return_lse=True)
            check_attention(*qkv((1, 2), 3, 150, E, Ev), device=device, return_lse=True)
        """,
        FAULTS_WIDTH=width,
    )


@pytest.mark.by_turns
@pytest.mark.cpus
def test_a_step_before_that_does_not_build(run_with_faults, tmp_path):
    """The kernel that attends is not to blame: it is not left out, and computes the next call."""
    run_with_faults(
        """
        import warnings
        from clattn import onnx
        warnings.simplefilter("error")
        faults.faults_define(b"copy_key_rows=goto")
        past = [np.ones((1, 2, 3, 8), "f4")] * 5
        refusal(lambda: onnx.attention(*past[:3], None, *past[3:], device=device),
                "'attention_inputs' does not build")
        onnx.attention(*past[:3], device=device)
        """,
        XDG_CACHE_HOME=tmp_path,
    )


@pytest.mark.by_turns
@pytest.mark.cpus
def test_a_step_behind_that_does_not_build(run_with_faults, tmp_path):
    """The reference writes the weights; the kernel that attends is not left out."""
    run_with_faults(
        """
        import warnings
        sdpa = clattn.scaled_dot_product_attention
        args = [np.random.default_rng(0).standard_normal((2, 5, 16), "f4") for _ in range(3)]
        right = sdpa(*args, device=device)
        faults.faults_define(b"write_tiles=goto")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result, weights = sdpa(*args, device=device, return_weights=True)
        assert "'attention_cpu_scores' does not build" in str(caught[0].message), caught[0].message
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
        np.testing.assert_allclose(weights @ args[2], result, atol=1e-6)
        same_bits(sdpa(*args, device=device), right)
        """,
        XDG_CACHE_HOME=tmp_path,
    )


@pytest.mark.by_turns
@pytest.mark.cpus
def test_a_program_that_does_not_build(run_with_faults, tmp_path):
    """DeviceError with the compiler's log and the source, by the same files and numbers."""
    run_with_faults(
        """
        import re
        from support.processes import ROOT
        faults.faults_define(b"store_vector=goto")
        text = refusal(lambda: clattn.tril(tq), "'diagonal_band' does not build",
                       device.name, "clBuildProgram gave CL_BUILD_PROGRAM_FAILURE")
        numbered = {}
        for line in text.splitlines():
            if heading := re.fullmatch(r"(kernels/.+):", line):
                lines = (ROOT / heading[1]).read_text().splitlines()
                file = heading[1]
            elif number := re.match(r" *(\\d+)  ", line):
                original = lines[int(number[1]) - 1]
                changed = original.startswith(("#include", "#pragma once"))
                assert line[number.end():] == original or changed, line
                numbered[file, number[1]] = original
        wrong = re.findall(r"(kernels/[\\w/.]+)[:(](\\d+)", text)
        assert wrong, text[:2000]
        assert numbered[wrong[0]].startswith("store_vector("), wrong
        faults.faults_define(b"")
        same_bits(clattn.tril(tq), np.tril(q))
        """,
        XDG_CACHE_HOME=tmp_path,
    )
