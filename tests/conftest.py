# SPDX-License-Identifier: MIT
"""Fixtures: `device` runs a test once per OpenCL device, `kernel` once per choice of kernel.

Tests marked `tensors` run once with arrays and once with Tensors, see `passed_as`. After every
test the memory of every device is back at its start.
"""

import gc
import importlib
import itertools
import os
import tempfile
from functools import partial

# Of NumPy and torch, before they are imported: their products are small here, and threads of two
# workers that share two cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Arrays of jax lie in the host's memory here. On a GPU jax would take most of the memory first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What the user of this machine has tuned is no part of the tests.
os.environ["CLATTN_TUNING"] = "off"

import clattn
import pytest
import support.faults as faults
import support.tuning as tuning
from support.passing import pass_tensors
from support.processes import forks
from support.ptx_device import build as build_machine
from support.variants import (
    WITH_ARRAYS,
    force,
    force_or_skip,
    left_out,
    of_other_devices,
    row_id,
    skip_unless_used,
)

pytest_plugins = ["support.skips"]


def is_named(device, words):
    """Is it of a type, or has it a name or a platform, that stands among words with commas?"""
    names = (device.name.lower(), device.platform.lower())
    return any(
        word == device.type or any(word in name for name in names)
        for word in filter(None, (part.strip().lower() for part in words.split(",")))
    )


def list_devices():
    """The devices to test on, or the reason why there is none. Enumerated once, at collection.

    Every device, or those that CLATTN_TEST_DEVICES names.
    """
    words = os.environ.get("CLATTN_TEST_DEVICES", "")
    try:
        devices = [d for d in clattn.devices() if not words or is_named(d, words)]
    except Exception as error:  # any failure: it is reported, and it fails every test
        return [], f"clattn.devices() raised {error!r}"
    named = f" named by CLATTN_TEST_DEVICES={words!r}" if words else ""
    return devices, None if devices else f"clattn.devices() has none{named}"


if os.environ.get("CLATTN_TEST_DEVICES") == "ptx":
    import ptx.device as ptx_device

    MACHINE = ptx_device.Device(build_machine(tempfile.mkdtemp()))

DEVICES, NO_DEVICE = list_devices()


def device_id(index, device):
    """Short and unique: 'cpu0-Portable'."""
    return f"{device.type}{index}-{device.platform.split()[0].partition('(')[0]}"


def pytest_report_header():
    if NO_DEVICE:
        return f"clattn: no device: {NO_DEVICE}"
    return [
        f"clattn device {device_id(i, d)}: {d.name} ({d.platform}, {d.version}, "
        f"driver {d.driver_version}, {d.compute_units} units)"
        for i, d in enumerate(DEVICES)
    ] + ["clattn kernels: chosen by clattn, and those that tests force"]


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        ids = [device_id(i, d) for i, d in enumerate(DEVICES)] or ["none"]
        metafunc.parametrize("device", DEVICES or [None], ids=ids, indirect=True, scope="session")
        marked = metafunc.definition.get_closest_marker
        if marked("tensors") and not marked("arrays_only"):
            metafunc.parametrize("passed_as", ["arrays", "tensors"], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Runs with Tensors come last, when the kernels they share with arrays are built.

    The reference kernel, which is another one's oracle, needs no second run. PoCL leaves some of
    the tests marked `full` out, and most of the second run, unless `-m` asks for `full`. A
    test marked `rest` runs only if `-m` asks for `rest`.
    """

    def with_tensors(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("passed_as") == "tensors" or "tensors" in params.get("variant", ())

    def with_reference(item):
        chosen = "reference_kernel" not in item.fixturenames or "kernel" in item.fixturenames
        return not chosen or item.callspec.params.get("kernel") == "reference"

    def for_another_device(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        tested = [params["device"]] if "device" in params else DEVICES
        return all(device is None or device.type != "cpu" for device in tested)

    for item in items:
        if item.get_closest_marker("cpus") and DEVICES and for_another_device(item):
            item.add_marker(pytest.mark.skip(reason="for CPUs"))
    kept = [item for item in items if not (with_tensors(item) and with_reference(item))]
    everything = "full" in config.option.markexpr
    out = set() if everything else {*left_out(kept), *of_other_devices(kept)}
    if "rest" not in config.option.markexpr:
        out |= {item for item in kept if item.get_closest_marker("rest")}
    config.hook.pytest_deselected(items=out)
    items[:] = sorted((item for item in kept if item not in out), key=with_tensors)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours run in one process, since they share programs. Two would build them at once."""
    if config.option.dist != "load":
        return None
    return importlib.import_module("xdist.scheduler").WorkStealingScheduling(config, log)


def pytest_collection_finish(session):
    """Collecting garbage, which many tests do, then looks at what they have made alone.

    Programs count from here on, not those that opened the devices.
    """
    freeze()
    session.config.stash[COUNTED] = built_programs()


def freeze():
    gc.collect()
    gc.freeze()


# ---- programs ----

BUILT = {}  # by the test: programs, seconds of the compiler, seconds of the test
COUNTED = pytest.StashKey()


def built_programs():
    """(programs, seconds of the compiler), so far in this process."""
    return (0, 0.0) if NO_DEVICE else clattn._core.built_programs()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Sends with each report what was built since the last one; pytest-xdist hands it on."""
    report = yield
    before, now = item.config.stash[COUNTED], built_programs()
    item.config.stash[COUNTED] = now
    report.user_properties.append(("built", [b - a for a, b in zip(before, now, strict=True)]))
    return report


def pytest_runtest_logreport(report):
    programs, building = dict(report.user_properties).get("built", (0, 0.0))
    if programs:
        sums = BUILT.setdefault(report.nodeid, [0, 0.0, 0.0])
        for n, number in enumerate((programs, building, report.duration)):
            sums[n] += number


def pytest_sessionfinish():
    if forks.cache_info().currsize:
        forks().close()


def write_programs(terminal):
    """The number of programs, and the tests that took longest with building some.

    Their time is the better measure: PoCL compiles when a kernel first runs.
    """
    programs, building, _ = map(sum, zip(*BUILT.values(), strict=True)) if BUILT else (0, 0, 0)
    terminal.section(f"{programs} programs built, {building:.0f} s in clBuildProgram")
    slowest = sorted(BUILT.items(), key=lambda item: item[1][2], reverse=True)[:10]
    for name, (programs, building, seconds) in slowest:
        terminal.write_line(f"{programs:4} programs {building:6.1f} of {seconds:6.1f} s  {name}")


# ---- memory ----

TESTS = itertools.count(1)


def pytest_runtest_logfinish():
    """Nor, after some thousand tests, at what pytest remembers of every one of them."""
    if next(TESTS) % 100 == 0:
        freeze()


def allocated():
    """Bytes and blocks that are in use on each device."""
    stats = [clattn.memory_stats(device) for device in DEVICES]
    return [s[name] for s in stats for name in ("allocated_bytes", "allocated_blocks")]


@pytest.fixture(autouse=True)
def memory_comes_back(request):
    """Fails a test that leaves memory of a device in use, unless it has failed already."""
    start, failed = allocated(), request.session.testsfailed
    yield
    request.node.funcargs.clear()  # what fixtures gave, which pytest keeps for longer
    if allocated() != start:
        clattn.synchronize()  # calls that are running
    if allocated() != start:
        gc.collect()
    if request.session.testsfailed == failed:
        over = [now - before for now, before in zip(allocated(), start, strict=True)]
        assert max(over, default=0) <= 0, f"bytes and blocks still in use: {over}"


@pytest.fixture(params=tuning.WARPS)
def warps(request, device):
    """Warps of attention_mma that multiply alone, and together."""
    tuning.tune_all(device, "float16", "mma", tuning.WARPS[request.param])
    yield request.param
    tuning.clear(device)


@pytest.fixture(autouse=True)
def float64_where_there_is_any(request):
    """Skips a case of float64 on a device that lacks it: test_limits.py sees that it is refused."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    device = params.get("device")
    if device is not None and not device.float64 and any(map(is_float64, params.values())):
        pytest.skip("the device has no float64")


def is_float64(value):
    """Of a parameter: a dtype, its name, or a variant with one."""
    row = value[0] if isinstance(value, tuple) and value else value
    dtype = getattr(row, "dtype", row)
    return str(dtype) in ("float64", "<class 'numpy.float64'>")


@pytest.fixture(autouse=True)
def passed_as(request):
    """How arrays are passed to the operators: as they are, or copied to the device before."""
    if getattr(request, "param", "arrays") == "arrays":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        pass_tensors(patch)
        yield


@pytest.fixture(scope="session")
def device(request):
    """One OpenCL device. Without any the test fails: a suite that ran nothing shows nothing."""
    if request.param is None:
        pytest.fail(f"no OpenCL device to test on: {NO_DEVICE}")
    return request.param


@pytest.fixture(scope="session")
def first_device():
    """For tests in which one device is as good as another."""
    if not DEVICES:
        pytest.fail(f"no OpenCL device to test on: {NO_DEVICE}")
    return DEVICES[0]


@pytest.fixture(params=[None, "reference"], ids=["chosen", "reference"])
def kernel(request, monkeypatch):
    """The kernel that clattn chooses, then the reference kernel."""
    force(monkeypatch, request.param)
    return request.param


@pytest.fixture
def reference_kernel(request, monkeypatch):
    """The reference kernel, unless a test takes the fixture `kernel`.

    It builds fastest: head sizes and most options are data there.
    """
    if "kernel" not in request.fixturenames:
        force(monkeypatch, "reference")


@pytest.fixture(params=WITH_ARRAYS, ids=row_id)
def variant(request, device, monkeypatch):
    """A variant of support/variants.py that is forced, where the device can run it."""
    row, passed = request.param
    skip_unless_used(device, row.kernel, dtype=row.dtype)
    force_or_skip(monkeypatch, device, row.kernel, **row.limits)
    with pytest.MonkeyPatch.context() as patch:
        if passed == "tensors":
            pass_tensors(patch)
        yield row


@pytest.fixture(scope="session")
def faults_library(tmp_path_factory):
    """The OpenCL loader of faults.py."""
    return faults.build(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def sweep_library(tmp_path_factory):
    """The OpenCL loader of sweep.py."""
    return faults.build(tmp_path_factory.mktemp("sweep"), "opencl_sweep")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The loader whose kernels an interpreter of PTX runs. All processes share clang's PTX."""
    folder = tmp_path_factory.mktemp("machine")
    of_the_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folder lies in that of the run
        of_the_run = of_the_run.parent
    kept = of_the_run / "ptx-of-clang"
    kept.mkdir(exist_ok=True)
    (folder / "ptx").symlink_to(kept)
    return build_machine(folder)


@pytest.fixture
def run_with_faults(device, faults_library):
    """Runs code in a child process whose OpenCL commands fail when it says so."""
    return partial(faults.run_with, faults_library, device)


@pytest.fixture
def torch_calls(monkeypatch):
    """The devices of the calls of torch's function that clattn answered.

    After the test torch's function has to be back in its place.
    """
    clattn_torch = importlib.import_module("clattn.torch")
    functions = importlib.import_module("torch.nn.functional")
    theirs = functions.scaled_dot_product_attention
    attend = clattn.attention.scaled_dot_product_attention
    answered = []

    def count(*args, **options):
        result = attend(*args, **options)
        answered.append(options["device"])
        return result

    monkeypatch.setattr(clattn.attention, "scaled_dot_product_attention", count)
    yield answered
    left = functions.scaled_dot_product_attention
    clattn_torch.unpatch()
    assert left is theirs
    assert not clattn_torch._uses


def pytest_terminal_summary(terminalreporter):
    """Programs, and how many of the ONNX project's node tests passed, out of all that ran."""
    write_programs(terminalreporter)
    ran = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            path, _, name = report.nodeid.partition("::")
            if report.when == "call" and path.endswith("test_onnx_nodes.py") and "[" in name:
                ran.setdefault(name.partition("[")[0], []).append(outcome == "passed")
    for name, passed in sorted(ran.items()):
        terminalreporter.write_line(
            f"ONNX node tests, {name}: {sum(passed)} of {len(passed)} passed"
        )
