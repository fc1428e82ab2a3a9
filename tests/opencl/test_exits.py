# SPDX-License-Identifier: MIT
"""Processes that end at any moment: exit handlers, daemon threads, signals, forks, pending calls.

Such a process must not crash or hang. CLATTN_STRESS is the number of moments within the calls of
daemon threads at which a process ends; tools/try_pythons.py sets CLATTN_STRESS.
"""

import os
import signal
import sys

import pytest
from support.processes import index_of, run_on, run_python

MOMENTS = max(2, int(float(os.environ.get("CLATTN_STRESS", 0))))

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # 3.12 warns of every fork
    pytest.mark.by_turns,
]

CALLS = """
import signal, threading, time, warnings
from functools import partial

warnings.simplefilter("ignore", DeprecationWarning)
small, large, huge = (np.broadcast_to(np.ones((rows, 64), np.float32), (1, h, rows, 64))
                      for h, rows in ((1, 4), (4, 1024), (8, 131072)))

def call(array):
    return clattn.scaled_dot_product_attention(array, array, array, device=device)

def daemons(*works):
    def repeat(work):
        while True:
            work()
    for work in works:
        threading.Thread(target=repeat, args=(work,), daemon=True).start()
"""


def ends(device, code, *args, status=0, env=None):
    """The code's process ends by itself, with that status, and says nothing. Returns its output."""
    done = run_on(device, CALLS + code, *args, timeout=50, check_exit=False, env=env)
    assert (done.returncode, done.stderr) == (status, "")
    return done.stdout


def test_exit_handlers_may_call(device):
    """Arrays, Tensors that nobody waits for, and the device's first call."""
    code = """
import atexit
tensor = clattn.tensor(small, device)
kept = []
atexit.register(lambda: kept.append(call(call(tensor))))
atexit.register(lambda: print((call(tensor).numpy() == 1).all()))
atexit.register(lambda: print((call(small) == 1).all()))
"""
    assert ends(device, code) == "True\n" * 2
    code = """
import atexit, sys
import numpy as np
from support.checks import check_attention
from support.data import qkv

def first():
    import clattn
    check_attention(*qkv((1, 2), 17, 33, 8), device=clattn.devices()[int(sys.argv[1])],
        is_causal=True)

atexit.register(first)
"""
    assert not run_python(code, index_of(device)).stderr


PENDING = """
kept = [clattn.tensor(large, device)]
for _ in range(10):
    kept.append(call(kept[-1]))
"""


@pytest.mark.parametrize(
    "last",
    ["", "del kept", "sys.exit()", "os._exit(0)",
     "for name in list(sys.modules): name.startswith('clattn') and sys.modules.pop(name)\n"
     "del clattn, call, kept, device; gc.collect()"],
)  # fmt: skip
def test_pending_calls(device, last):
    ends(device, PENDING + last)


DAEMONS = {
    "arrays": "daemons(partial(call, large), partial(call, small))",
    "pending": "tensor = clattn.tensor(small, device)\n"
    "daemons(*[lambda: call(call(tensor))] * 3, lambda: clattn.empty_cache(device))",
    "long": "daemons(partial(call, huge), lambda: call(clattn.tensor(huge, device)).numpy())",
    "cache": """
cache = clattn.KVCache(1, 1, 4096, 64, device=device)
token = large[:, :1]
def step():
    try:
        cache.append(token, token)
    except ValueError:
        cache.reset()
    cache.attend(token[:, :, :1])
daemons(step, step, step)
""",
}


@pytest.mark.parametrize("work", DAEMONS)
def test_daemon_threads_in_calls(device, work):
    for moment in range(MOMENTS):
        ends(device, DAEMONS[work] + "\ntime.sleep(float(sys.argv[2]))", 0.05 * moment)


def test_daemon_threads_that_build(device, tmp_path):
    """The exit handlers of a driver destroy what its compiler uses: the exit waits for it."""
    code = """
daemons(partial(call, small))
time.sleep(float(sys.argv[2]))
"""
    for moment in range(MOMENTS // 2):
        folder = tmp_path / str(moment)
        env = {"XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": folder}
        ends(device, code, 0.05 + 0.1 * moment, env=env)


def test_daemon_threads_that_open():
    """The exit waits for the thread that loads the drivers, not for one that waits for this."""
    code = """
import sys, threading, time
import clattn
for _ in range(2):
    threading.Thread(target=clattn.devices, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""
    for moment in range(4 * MOMENTS):
        done = run_python(code, 0.02 * moment, timeout=50, check_exit=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("work", ["call(huge)", "call(clattn.tensor(huge, device)).numpy()"])
@pytest.mark.parametrize("handled", [False, True])
def test_termination_of_a_call(device, work, handled):
    """SIGTERM ends the process at once; a handler runs in the middle of the call."""
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" if handled else ""
    code += "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n" + work
    ends(device, code, status=7 if handled else -signal.SIGTERM)


FORKS = """
tensor, kept = clattn.tensor(large, device), []
works = {"arrays": lambda: call(large), "pending": lambda: kept.append(call(call(tensor)))}
thread = threading.Thread(target=lambda: [works[sys.argv[2]]() for _ in range(6)])
right = call(large)
thread.start()
for n in range(3):
    time.sleep(0.02)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        if n:
            try:
                call(small)
            except clattn.DeviceError as error:
                assert "fork" in str(error)
        sys.exit(n)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == n
thread.join()
assert all((result == right).all() for result in [call(large), *map(np.asarray, kept)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("work", ["arrays", "pending"])
def test_fork_in_the_middle_of_a_call(device, work):
    """The child ends as an interpreter does: drivers would wait for their parent's calls."""
    ends(device, FORKS, work)


@pytest.mark.skipif(sys.platform == "win32", reason="spawn alone")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork", "fork after use"])
def test_multiprocessing(device, method):
    code = """
import multiprocessing, pytest
method, _, used = sys.argv[2].partition(" ")
if used:
    call(small)
with multiprocessing.get_context(method).Pool(2) as pool:
    attend = partial(pool.apply, clattn.scaled_dot_product_attention, (small,) * 3)
    if used:
        with pytest.raises(clattn.DeviceError, match="fork"):
            attend({"device": int(sys.argv[1])})
    else:
        assert (attend({"device": int(sys.argv[1])}) == small).all()
"""
    set_up = CALLS if method != "fork" else CALLS.replace("device=device", "device=None")
    code = "device = None\n" + set_up + code
    head = "import gc, os, sys\nimport clattn\nimport numpy as np\n"
    done = run_python(head + code, index_of(device), method, timeout=50)
    assert not done.stderr
