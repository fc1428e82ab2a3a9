# SPDX-License-Identifier: MIT
"""The words that name a device, over lists of devices that few machines have."""

import subprocess

import clattn
import pytest
from support.faults import COMPILER
from support.processes import TESTS, run_python

CSRC = TESTS.parent / "csrc"
HEADERS = TESTS.parent / "third_party" / "opencl-headers"

POCL = ("cpu", "Portable Computing Language", "pthread-Intel(R) Xeon(R) CPU")
INTEL = ("cpu", "Intel(R) OpenCL", "Intel(R) Xeon(R) CPU")
INTEL_GPU = ("gpu", "Intel(R) OpenCL Graphics", "Intel(R) Arc(TM) A770")
NVIDIA = ("gpu", "NVIDIA CUDA", "NVIDIA H200")
SECOND = ("gpu", "NVIDIA CUDA", "NVIDIA L4")
AMD = ("gpu", "AMD Accelerated Parallel Processing", "gfx1100")

SEVERAL = "fits devices of several platforms; there are: "


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """What device_words.c prints about words and devices."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("words") / "device_words"
    sources = [TESTS / "support" / "device_words.c", CSRC / "opencl" / "words.c",
               CSRC / "base" / "strbuf.c", CSRC / "base" / "status.c",
               CSRC / "base" / "platform.c"]  # fmt: skip
    macros = ["-DCL_TARGET_OPENCL_VERSION=300", "-D_GNU_SOURCE"]
    folders = ["-I", CSRC, "-I", HEADERS]
    subprocess.run([COMPILER, "-std=c11", *macros, *folders, "-o", program, *sources], check=True)

    def ask(words, *devices):
        arguments = [part for device in devices for part in device]
        done = subprocess.run([program, words, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    return ask


def test_types(fitting):
    machine = NVIDIA, SECOND, INTEL
    assert fitting("gpu", *machine) == "0 1 of -1"
    assert fitting("GPU:1", *machine) == "0 1 of 1"
    assert fitting("cpu", *machine) == "2 of -1"
    assert fitting("accelerator", *machine) == "of -1"
    for wrong in ("gpu:", "gpu:x", "gpu:12345", "gpu1", ""):
        assert fitting(wrong, *machine) == "of -1", wrong


def test_digits_are_an_index(fitting):
    """They are no part of a name."""
    assert fitting("1", NVIDIA, SECOND, AMD) == "0 1 2 of 1 usable"
    assert fitting("1100", AMD) == "0 of 1100 usable"
    assert fitting("gfx1100", AMD) == "0 of -1"


def test_short_names_are_those_of_platforms(fitting):
    machine = NVIDIA, AMD, INTEL, POCL
    for number, word in enumerate(("nvidia", "AMD", "Intel", "pocl")):
        assert fitting(word, *machine) == f"{number} of -1"
        assert fitting(word, *machine[:number], *machine[number + 1 :]) == "of -1"


def test_a_platform_comes_before_a_device(fitting):
    assert fitting("h200", NVIDIA, SECOND) == "0 of -1"
    assert fitting("cuda", NVIDIA, SECOND) == "0 1 of -1"
    like_intel = ("gpu", "Oclgrind", "a copy of Intel(R) OpenCL")
    assert fitting("intel(r) opencl", like_intel, INTEL) == "1 of -1"
    assert fitting("copy of Intel(R) OpenCL", like_intel, INTEL) == "0 of -1"


def test_a_whole_name_comes_before_a_part(fitting):
    assert fitting("Intel(R) OpenCL", INTEL_GPU, INTEL) == "1 of -1"
    other = ("gpu", "AMD Accelerated Parallel Processing", "NVIDIA L40")
    assert fitting("nvidia l4", other, SECOND) == "1 of -1"


def test_a_name_of_several_platforms_is_refused(fitting):
    listed = f"cpu '{INTEL[2]}' ({INTEL[1]}), cpu '{POCL[2]}' ({POCL[1]})"
    assert fitting("xeon", INTEL, POCL) == f"device 'xeon' {SEVERAL}{listed}"
    assert fitting("intel", INTEL_GPU, INTEL).startswith(f"device 'intel' {SEVERAL}gpu ")
    assert fitting("xeon", POCL, POCL) == "0 1 of -1"


def test_an_index(device):
    """As a number and as digits, in an argument and in the environment."""
    index = clattn.devices().index(device)
    for words in (index, str(index)):
        with clattn.use_device(words) as chosen:
            assert chosen == device
    for wrong in (77, -1, "77", True):
        with pytest.raises((ValueError, TypeError), match="device"):
            clattn.set_default_device(wrong)
    show = "import clattn; print(clattn.devices().index(clattn.get_default_device()))"
    assert run_python(show, env={"CLATTN_DEVICE": str(index)}).stdout.split() == [str(index)]


@pytest.mark.parametrize("text", ["a\0b", "\udc80"])
def test_text_that_is_none(text):
    with pytest.raises(ValueError, match=r"device is '(a\\x00b|\\udc80)', which names none"):
        clattn.set_default_device(text)
