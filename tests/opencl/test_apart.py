# SPDX-License-Identifier: MIT
"""Drivers that clattn does not know: what ends another process is not used in this one.

The devices are those of support/devices.py, whose platforms have no known names.
"""

import signal
from functools import partial

import pytest
from clattn._host import apart
from conftest import DEVICES as REAL_DEVICES
from support.devices import DEVICES
from support.faults import open_with
from support.limits import HANGS, Limited, build, real_platform

pytestmark = pytest.mark.cpus  # which can have the limits of any device

CALL = """
import warnings
import clattn
from clattn._host import apart
from support.checks import check_attention
from support.data import qkv

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    (device,) = clattn._core.all_devices()
    if device.usable:
        apart.SECONDS = seconds
        check_attention(*qkv((1, 2), 20, 50, 64), device=device)
print(device.reason, *(w.message for w in told), sep="\\n")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("limits"))


@pytest.fixture
def ending(library, tmp_path):
    """Makes a device some of whose kernels end the process."""
    real = real_platform(REAL_DEVICES)
    return lambda **ends: Limited(
        library, real, tmp_path, DEVICES["Mali-G78"], ends=ends, CLATTN_TRIALS=None
    )


def call(seconds=apart.SECONDS):
    return f"seconds = {seconds}\n{CALL}"


def test_a_driver_that_lives_is_tried_once(ending):
    """Another process opens the device, another one tries the kernel; later calls need neither."""
    on_device = ending()
    for processes in (3, 4):
        assert on_device.run(call()).stdout == "None\n"
        assert on_device.processes() == processes


@pytest.mark.parametrize(
    ("how", "words"),
    [(signal.SIGSEGV, "ended that process (signal 11)"),
     (signal.SIGABRT, "ended that process (signal 6)"), (HANGS, "hung for 5 seconds")],
    ids=["SIGSEGV", "SIGABRT", "hangs"],
)  # fmt: skip
def test_a_kernel_that_ends_the_process_is_not_used(ending, how, words):
    """The next one takes its place, in later processes too, which do not try it again."""
    on_device = ending(attention_tiled=how)
    code = call(5) if how == HANGS else call()
    said = on_device.run(code).stdout
    assert said.startswith("None\n")
    assert "cannot use the kernel 'attention_tiled'" in said
    assert f"its trial in another process {words}" in said
    processes = on_device.processes()
    assert on_device.run(code).stdout == said
    assert on_device.processes() == processes + 1, "the verdict is kept"
    assert {name for name, _ in on_device.told()[1]} == {
        "probe_device", "probe_loops", "attention_reference"}  # fmt: skip


def test_a_kernel_of_gradients_that_ends_the_process(ending):
    """The reference computes them, and the forward pass keeps its kernel."""
    on_device = ending(attention_tiled_backward=signal.SIGSEGV)
    code = """
    import warnings
    import clattn
    from support.data import qkv
    from support.gradients import check_backward, grads

    arrays = qkv((1, 2), 20, 50, 64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_backward(grads(*arrays), *arrays, device=clattn.devices()[0])
    print(*(w.message for w in told), sep="\\n")
    """
    for _ in range(2):
        said = on_device.run(code).stdout
        assert "cannot use the kernel 'attention_tiled_backward'" in said
        assert "its trial in another process ended that process (signal 11)" in said
    assert {name for name, _ in on_device.told()[1]} == {
        "probe_device", "probe_loops", "attention_tiled", "attention_backward"}  # fmt: skip


def test_a_device_that_cannot_be_opened_is_passed_over(ending):
    on_device = ending(probe_device=signal.SIGABRT)
    for _ in range(2):
        said = on_device.run(call()).stdout
        assert "opening the device in another process ended that process (signal 6)" in said
    assert on_device.told()[1] == {}


def test_matrices_and_the_last_kernel_are_tried_too(ending):
    """There is none in their place: the call fails, and the process lives."""
    on_device = ending(diagonal_band=signal.SIGABRT, attention_reference=signal.SIGABRT)
    code = """
    import clattn, numpy as np
    for call in (
        lambda: clattn.eye(5),
        lambda: clattn.scaled_dot_product_attention(*np.ones((3, 1, 4, 600), np.float32)),
    ):
        try:
            call()
        except clattn.DeviceError as error:
            print(error)
    """
    first, second = on_device.run(code).stdout.splitlines()
    assert first.startswith("a small call in another process ended that process")
    assert second.startswith("its trial in another process ended that process")


def test_the_listing_names_what_is_not_used(ending):
    on_device = ending(attention_decode_gpu=signal.SIGSEGV, attention_backward=signal.SIGSEGV)
    code = """
    from argparse import Namespace
    from clattn._commands import doctor, listing
    listing.run(Namespace())
    doctor.run(Namespace())
    """
    said = on_device.run(code).stdout
    assert "for float32    tiled, reference" in said
    assert "for gradients  tiled\n" in said
    assert "not used       decode_gpu: its trial in another process ended" in said
    assert "not used       reference for gradients: its trial in another" in said
    assert "tiled for gradients: right" in said
    assert "decode_gpu: its trial in another process ended that process (signal 11)" in said
    assert "tiled: right" in said
    assert "does without the kernel decode_gpu" in said


@pytest.mark.parametrize(("word", "trials"), [("here", 0), ("off", 0), ("elsewhere", None)])
def test_where_trials_run_is_a_choice(ending, word, trials):
    on_device = ending()
    on_device.env["CLATTN_TRIALS"] = word
    done = on_device.run(call(), check_exit=trials is not None)
    if trials is None:
        assert 'CLATTN_TRIALS is "elsewhere"; expected "apart", "here" or "off"' in done.stderr
    else:
        assert on_device.processes() == 1
        probed = {name for name, _ in on_device.told()[1]}
        assert ("probe_loops" in probed) == (word == "here")


OPEN = "device = listed[index]\nprint(device.usable, device.memory_mode, device.reason)\n"
open_unknown = partial(open_with, FAULTS_UNKNOWN="1", CLATTN_TRIALS="here")


def test_loops_that_end_early(device, faults_library, tmp_path):
    env = {"XDG_CACHE_HOME": tmp_path, "FAULTS_ROUNDS": "65535"}
    said = open_unknown(faults_library, device, OPEN, **env).stdout
    assert said.startswith("False") and "loops of 100000 rounds end early" in said
    assert open_unknown(faults_library, device, OPEN, XDG_CACHE_HOME=tmp_path).stdout.startswith(
        "True"
    )


def test_the_next_memory_mode_is_tried(device, faults_library, tmp_path):
    """A device that cannot unmap memory of the host gets copies, and the listing says so."""
    code = OPEN + "print(clattn._core.lacks(device))\n"
    env = {"XDG_CACHE_HOME": tmp_path, "FAULTS_UNMAP": "1"}
    if device.memory_mode == "svm":
        pytest.skip("kernels take pointers, so nothing is mapped")
    said = open_with(faults_library, device, code, **env).stdout
    assert said.startswith("True copy None")
    assert "the host's memory in place" in said and "CL_INVALID_VALUE" in said
    said = open_with(faults_library, device, OPEN, **env, CLATTN_MEMORY="host").stdout
    assert said.startswith("False host"), "a mode that is forced is the only one"
