# SPDX-License-Identifier: MIT
"""What needs a process of its own: import, environment variables, fork, the kernel cache."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import clattn
import pytest
from support.processes import (
    IMPORTED_FROM,
    WHAT_TO_INSTALL,
    index_of,
    no_opencl,
    run_on,
    run_python,
)
from support.variants import POCL

# Tests of the cache call a function whose program builds fast.
CALL = """
import sys, clattn
from support.checks import check_band
device = clattn.devices()[int(sys.argv[1])]
check_band((17, 33), 7, 0, 1, device=device)
print(clattn._core.built_programs()[0])
"""


def test_children_of_tests_end_as_processes_do():
    """support/children.py: output, exit status, signals, and a child that hangs."""
    done = run_python("import sys; print(*sys.argv); raise SystemExit(3)", "a", 1, check_exit=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "-c a 1\n", "")
    done = run_python("import atexit; atexit.register(print, 'end'); 1 / 0", check_exit=False)
    assert (done.returncode, done.stdout) == (1, "end\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run_python("import os; os.abort()", check_exit=False).returncode == -signal.SIGABRT
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(60)", timeout=0.3)
    with pytest.raises(AssertionError, match="exit 1"):
        run_python("raise KeyError")
    assert (
        run_python("import os; print(os.environ['CLATTN_X'])", env={"CLATTN_X": 5}).stdout == "5\n"
    )


def test_import_touches_no_opencl():
    """Neither the loader nor a driver is mapped before the first call that needs a device."""
    run_python("""
        from pathlib import Path
        import clattn

        def mapped():
            text = Path("/proc/self/maps").read_text().lower()
            return [name for name in ("libopencl", "libpocl", "libintelocl") if name in text]

        assert not mapped(), mapped()
        clattn.devices()
        assert mapped(), "the check itself does not see OpenCL"
    """)


def test_import_works_without_opencl(tmp_path):
    """Everything that needs a device then says what to install, every time it is asked."""
    said = run_python(
        """
        import clattn, numpy as np, pytest
        q = np.zeros((1, 2, 3), np.float32)
        for call in (clattn.devices, clattn.get_default_device,
                     lambda: clattn.scaled_dot_product_attention(q, q, q),
                     lambda: clattn.set_default_device("cpu"), clattn.devices):
            with pytest.raises(clattn.DeviceError) as caught:
                call()
            print(caught.value)
        """,
        env=no_opencl(tmp_path),
    ).stdout
    assert any(word in said for word in WHAT_TO_INSTALL), said


def default_device(**env):
    """Index of the default device in a fresh process."""
    code = "import clattn; print(clattn.devices().index(clattn.get_default_device()))"
    return int(run_python(code, env=env).stdout)


def test_the_natural_default():
    """The first GPU, else the first accelerator, else the first CPU."""
    order = ["gpu", "accelerator", "cpu"]
    best = min(clattn.devices(), key=lambda d: order.index(d.type))
    for unset in (None, ""):
        assert default_device(CLATTN_DEVICE=unset) == index_of(best)


def test_clattn_device_names_the_default(device):
    """The same words as everywhere: type and number, or part of a name."""
    peers = [d for d in clattn.devices() if d.type == device.type]
    words = [f"{device.type}:{peers.index(device)}"]
    if not any(device.platform in d.platform + d.name for d in clattn.devices() if d != device):
        words.append(device.platform)
    for word in words:
        assert default_device(CLATTN_DEVICE=word) == index_of(device)


def test_an_unknown_clattn_device():
    """ValueError that names the variable; a device given in the call is not affected."""
    run_python(
        """
        import clattn, numpy as np, pytest
        q = np.ones((1, 2, 3), np.float32)
        for call in (clattn.get_default_device,
                     lambda: clattn.scaled_dot_product_attention(q, q, q)):
            with pytest.raises(ValueError, match="CLATTN_DEVICE.*no such device"):
                call()
        device = clattn.devices()[0]
        assert (clattn.scaled_dot_product_attention(q, q, q, device=device) == 1).all()
        with clattn.use_device(device):
            assert (clattn.scaled_dot_product_attention(q, q, q) == 1).all()
        """,
        env={"CLATTN_DEVICE": "no such device"},
    )


@pytest.mark.by_turns
def test_set_default_device_beats_clattn_device(device):
    other = clattn.devices()[0]
    run_on(
        device,
        """
        natural = clattn.get_default_device()
        clattn.set_default_device(device)
        assert clattn.get_default_device() == device
        clattn.set_default_device(None)
        assert clattn.get_default_device() == natural
        """,
        env={"CLATTN_DEVICE": other.platform},
    )


def test_a_child_process_finds_the_same_devices():
    """What clattn puts into the environment of the process (drivers' folder) serves children."""
    code = """
        import subprocess, sys, clattn
        names = [(d.platform, d.name) for d in clattn.devices()]
        child = "import clattn; print([(d.platform, d.name) for d in clattn.devices()])"
        said = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True,
                              timeout=60)  # inherits the C environment
        assert said.stdout.strip() == repr(names), (said.stdout, said.stderr, names)
    """
    run_python(code)


@pytest.mark.by_turns
@pytest.mark.parametrize("used", [False, True], ids=["before use", "after use"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork(device, used):
    """A forked child gets a right result or a DeviceError, and never hangs."""
    run_python(
        """
        import sys, clattn
        from support.checks import check_attention
        from support.data import qkv
        from support.processes import run_forked
        arrays = qkv((1, 2), 17, 33, 8)
        index, used = int(sys.argv[1]), sys.argv[2] == "True"
        device = clattn.devices()[index] if used else None
        if used:
            check_attention(*arrays, device=device)

        def child():
            for call in (lambda: check_attention(*arrays, device=device or clattn.devices()[index]),
                         lambda: check_attention(*arrays, device=None),  # its own default
                         lambda: clattn.devices()[index]):
                try:
                    call()
                except clattn.DeviceError as error:
                    assert used and str(error)

        run_forked(child)
        check_attention(*arrays, device=clattn.devices()[index])  # the parent goes on
        """,
        index_of(device),
        used,
    )


SLOW_FIRST_CALL = """
import sys, threading, time
import clattn, clattn._host.drivers as drivers
from support.processes import run_forked
discover, begun = drivers.discover, threading.Event()

def slowly():
    found = discover()
    begun.set()
    return found

drivers.discover = slowly
first = threading.Thread(target=clattn.get_default_device)
first.start()
begun.wait()
time.sleep(0.01)
"""


def test_fork_during_the_first_call():
    """While a thread of the parent opens the drivers: a result or a DeviceError, and no hang."""
    run_python(
        SLOW_FIRST_CALL
        + """

def child():
    try:
        clattn.get_default_device()
    except clattn.DeviceError as error:
        assert "fork" in str(error)

run_forked(child)
first.join()
assert clattn.get_default_device()
"""
    )


def test_a_signal_handler_during_the_first_call():
    """It uses the device itself. Before it is used by others, the tuner's numbers are read."""
    said = run_python(
        """
        import clattn, clattn._host.tuning as tuning
        load = tuning.load

        def load_after_a_handler(devices):
            print(clattn.eye(3).sum())
            return load(devices)

        tuning.load = load_after_a_handler
        print(clattn.eye(5).sum())
        """,
        timeout=60,
    ).stdout
    assert said.split() == ["3.0", "5.0"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_handlers_of_signals_stay():
    """Drivers bring LLVM, which sets handlers of its own when a driver loads or opens a device."""
    run_python("""
        import os, signal
        import clattn, numpy as np
        got = []
        signals = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP]
        for number in signals:
            signal.signal(number, lambda number, frame: got.append(number))
        x = np.ones((1, 1, 4, 8), np.float32)
        for device in clattn.devices():
            clattn.scaled_dot_product_attention(x, x, x, device=device)
            got.clear()
            for number in signals:
                os.kill(os.getpid(), number)
            assert sorted(got) == sorted(signals), (device, got)
    """)


@pytest.mark.by_turns
def test_a_default_that_is_set_during_the_first_call_stays(device):
    run_python(
        SLOW_FIRST_CALL
        + """
chosen = clattn.devices()[int(sys.argv[1])]
clattn.set_default_device(chosen)
first.join()
assert clattn.get_default_device() == chosen
""",
        index_of(device),
    )


def entries(folder):
    """Built programs below a folder (the drivers' .icd files may lie there too)."""
    return sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".icd")


def needs_a_cache(device):
    if device.platform == POCL:
        pytest.skip("PoCL keeps programs itself, in a cache of its own")


def cached_call(device, folder, **env):
    return run_python(CALL, index_of(device), env={"XDG_CACHE_HOME": folder, **env})


@pytest.mark.cpus
def test_the_kernel_cache_is_used(device, tmp_path):
    """Built programs go below XDG_CACHE_HOME/clattn and are not built or written again."""
    needs_a_cache(device)
    built = int(cached_call(device, tmp_path).stdout)
    written = {p: p.stat().st_mtime_ns for p in entries(tmp_path / "clattn")}
    assert written, "nothing was cached"
    assert int(cached_call(device, tmp_path).stdout) <= built - len(written)  # PoCL's count again
    assert {p: p.stat().st_mtime_ns for p in entries(tmp_path / "clattn")} == written


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "flip": lambda data: data[: len(data) // 2] + b"\xff\0\xff" + data[len(data) // 2 + 3 :],
}


def test_a_first_call_prints_nothing(device, tmp_path):
    """PoCL prints the number of clang's warnings, so the test builds more programs on PoCL."""
    dtypes = ("f4", "f2") if device.platform == POCL else ("f4",)
    code = f"""
    import sys
    import clattn
    from support.checks import check_attention
    from support.data import qkv

    device = clattn.devices()[int(sys.argv[1])]
    for options in dict(), dict(softcap=3.0):
        for dtype in {dtypes}:
            for rows in 1, 40:
                check_attention(*qkv((1, 2), rows, 70, 24, dtype=dtype), device=device, **options)
    """
    env = {"XDG_CACHE_HOME": tmp_path, "POCL_CACHE_DIR": tmp_path}
    done = run_python(code, clattn.devices().index(device), env=env)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_damaged_cache_entry_is_rebuilt(device, tmp_path):
    needs_a_cache(device)
    cached_call(device, tmp_path)
    paths = entries(tmp_path / "clattn")
    assert paths, "nothing was cached"
    for name, damage in DAMAGES.items():
        damaged = {path: damage(path.read_bytes()) for path in paths}
        for path, data in damaged.items():
            path.write_bytes(data)
        cached_call(device, tmp_path)
        assert all(path.read_bytes() != damaged[path] for path in paths), name


def as_a_link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def as_a_pipe(path):
    """A reader would wait for a writer."""
    path.unlink()
    os.mkfifo(path)


def of_another_user(path):
    os.chown(path, 65534, 65534)


HOSTILE = [as_a_link, as_a_pipe, lambda path: path.chmod(0o620), lambda path: path.chmod(0o602)]
HOSTILE += [of_another_user] if os.geteuid() == 0 else []


@pytest.mark.cpus
def test_cache_entries_that_others_may_have_written(device, tmp_path):
    """None is read: each is built again, and becomes a file of this user alone."""
    needs_a_cache(device)
    cached_call(device, tmp_path)
    paths = entries(tmp_path / "clattn")
    for start in range(0, len(HOSTILE), len(paths)):
        changed = list(zip(paths, HOSTILE[start:], strict=False))
        for path, change in changed:
            change(path)
        cached_call(device, tmp_path)
        for path, _ in changed:
            status = path.lstat()
            assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_uid == os.geteuid()


@pytest.mark.by_turns
def test_a_cache_that_cannot_be_written(device, tmp_path):
    """No cache is no error: a file where the folder should be, and no home at all.

    PoCL alone cannot do without a folder of its own, so it gets one.
    """
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cached_call(device, blocked, POCL_CACHE_DIR=tmp_path / "pocl")
    cached_call(device, None, HOME="/proc/nonexistent", POCL_CACHE_DIR=tmp_path / "pocl")
    assert blocked.read_text() == "in the way"


def unfinished(folder):
    return {path for path in entries(folder / "clattn") if ".part-" in path.name}


@pytest.mark.by_turns
@pytest.mark.skipif(sys.platform != "linux", reason="process handling as on Linux")
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_fill_the_cache_at_once(device, tmp_path, count):
    """All right, and no temporary file is left. Of four, one is killed when a file appears."""
    env = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORTED_FROM, env.get("PYTHONPATH")]))
    command = [sys.executable, "-c", CALL, str(index_of(device))]
    running = [subprocess.Popen(command, env=env) for _ in range(count)]
    if count == 4:
        victim = running.pop()
        while not entries(tmp_path / "clattn") and victim.poll() is None:
            time.sleep(0.001)
        victim.kill()
        victim.wait()
    assert {p.wait(timeout=120) for p in running} == {0}
    names = {p.name for p in entries(tmp_path / "clattn")}
    cached_call(device, tmp_path)
    assert {p.name for p in entries(tmp_path / "clattn")} == names
    assert len(unfinished(tmp_path)) <= (count == 4)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of files as on Linux")
def test_a_process_that_is_killed_while_it_writes(device, tmp_path):
    """What it leaves is no program, and goes when a program is written a day later."""
    needs_a_cache(device)
    limit = """
import resource, signal
import clattn
clattn.devices()
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the end of a process that writes more
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""
    index, env = index_of(device), {"XDG_CACHE_HOME": tmp_path}
    killed = run_python(limit + CALL, index, env=env, check_exit=False)
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    (left,) = unfinished(tmp_path)
    young = left.with_name(left.name[:-6] + "aaaaaa")
    young.write_bytes(left.read_bytes())
    yesterday = left.stat().st_mtime - 86400 - 60
    os.utime(left, (yesterday, yesterday))
    cached_call(device, tmp_path)
    assert unfinished(tmp_path) == {young}
