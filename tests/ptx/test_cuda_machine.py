# SPDX-License-Identifier: MIT
"""tools/cuda_machine.py and tools/ptx/cuda_machine.c, with a fake of CUDA's driver: see tools/ptx.

All child processes share a folder of programs, so that each program is compiled once.
"""

import sys
from pathlib import Path

import cuda_machine
import pytest
from support.processes import ROOT, run, run_python
from support.ptx_cuda import SETUP, prepare, run_on_cuda

TOOL = ROOT / "tools" / "cuda_machine.py"
CUDA = "/driver/libcuda.so.1"
PLATFORM = "CUDA by clattn's test loader"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of child processes. They keep verdicts and programs in folders of their own."""
    cache = tmp_path_factory.mktemp("cache")
    return prepare(tmp_path_factory.mktemp("cuda")) | {"XDG_CACHE_HOME": cache}


def test_results(environment):
    """Of kernels in one launch and in two, and of rows that NaN makes the reference compute."""
    code = """
    def used(*kernels):
        assert set(kernels) <= set(cuda.launched), cuda.launched
        cuda.launched.clear()

    assert (device.name, device.nvidia_capability, device.memory_mode) == (
        "a fake of CUDA", 90, "copy"), device
    assert device.driver_version.startswith("CUDA 12.4, ") and "clang" in device.driver_version
    assert list(_core.lacks(device)) == ["96 KiB of local memory"], _core.lacks(device)
    used("probe_device", "probe_exchange", "probe_warp", "probe_local")
    check_attention(*arrays, device=device, rounds_weights=True)
    used("attention_mma")
    q, k, v = qkv((1, 2), 20, 40, 8, dtype=float16)
    k[..., 10, 3], v[..., 15, 5], v[..., 16, 2] = np.nan, np.inf, np.nan
    check_attention(q, k, v, is_causal=True, device=device, rounds_weights=True)
    used("attention_mma", "attention_reference")
    FORCED.words = ("decode_gpu", "")  # what is forced is not compared
    check_attention(*qkv((1, 1), 1, 1200, 64, dtype=float16), device=device)
    used("attention_decode_gpu", "attention_decode_gpu_merge")
    FORCED.words = ("tiled", "")
    check_attention(*qkv((1, 1), 40, 50, 64), device=device, is_causal=True)
    used("attention_tiled")

    x = draw((3, 40, 50))
    np.testing.assert_array_equal(clattn.tril(x, 3), np.tril(x, 3))
    np.testing.assert_array_equal(clattn.triu(clattn.tensor(x, device), -2).numpy(), np.triu(x, -2))
    used("diagonal_band")
    """
    run_on_cuda(environment, code)


def test_threads(environment):
    """Each has to make the device's context its own."""
    code = """
    from concurrent.futures import ThreadPoolExecutor

    x = draw((2, 30, 20))
    with ThreadPoolExecutor(4) as pool:
        for n, y in enumerate(pool.map(lambda n: clattn.tril(x, n), range(8))):
            np.testing.assert_array_equal(y, np.tril(x, n))
    """
    run_on_cuda(environment, code)


def test_other_processes_need_no_compiler(environment):
    """They find PTX in the folder. A program that is not there says so."""
    code = """
    check_attention(*arrays, device=device, return_lse=False)
    assert set(cuda.launched) <= {"attention_mma", "attention_reference"}, cuda.launched
    print(refusal(lambda: sdpa(*qkv((1, 1), 20, 90, 128, dtype=float16), device=device)))
    """
    run_on_cuda(
        environment, "check_attention(*arrays, device=device, return_lse=False)", kernel="mma"
    )
    before = set(Path(environment["CLATTN_CUDA_PROGRAMS"]).iterdir())
    said = run_on_cuda(environment, code, kernel="mma", CLATTN_CUDA_COMPILER="").stdout
    assert "kernel 'attention_mma' does not build on device 'a fake of CUDA'" in said
    assert "there is no compiler for PTX, and the program is not in the folder" in said
    assert set(Path(environment["CLATTN_CUDA_PROGRAMS"]).iterdir()) == before


def test_programs_that_do_not_build(environment):
    """The compiler refuses the text, or CUDA the PTX. Both logs are in the error."""
    wrong = environment["CLATTN_CUDA_COMPILER"] + " -DHEAD_E=1 -Werror=macro-redefined"
    code = "print(refusal(lambda: sdpa(*qkv((1, 1), 20, 90, 80, dtype=float16), device=device)))"
    said = run_on_cuda(environment, code, kernel="mma", CLATTN_CUDA_COMPILER=wrong).stdout
    assert "does not build on device" in said and "CL_BUILD_PROGRAM_FAILURE" in said
    assert "'HEAD_E' macro redefined" in said
    code = """
    cuda.library.fake_refuse(b".entry attention_mma")
    print(refusal(lambda: sdpa(*arrays, device=device)))
    """
    said = run_on_cuda(environment, code, kernel="mma").stdout
    assert "cuModuleLoadDataEx gave CUDA_ERROR_INVALID_PTX (218):\nptxas fatal: it was" in said
    endings = {file.suffix for file in Path(environment["CLATTN_CUDA_PROGRAMS"]).iterdir()}
    assert endings == {".ptx", ".txt"}


def test_an_older_device_gets_older_ptx(environment, tmp_path):
    code = """
    assert (device.nvidia_capability, list(_core.lacks(device))) == (75, []), device
    assert set(cuda.launched) == {"probe_device", "probe_exchange", "probe_local"}, cuda.launched
    """
    older = environment | {"FAKE_CUDA_CAPABILITY": 75, "XDG_CACHE_HOME": tmp_path}
    run_on_cuda(older, code)
    targets = [ptx.read_text().partition(".target ")[2].partition("\n")[0]
               for ptx in Path(environment["CLATTN_CUDA_PROGRAMS"]).glob("*.ptx")]  # fmt: skip
    assert targets.count("sm_75") == 3 and set(targets) <= {"sm_75", "sm_80"}


def test_launches_that_fail(environment):
    """At once, and then the device is as before; or later, and then it is lost."""
    code = """
    x = clattn.tensor(draw((40, 50)), device)
    cuda.refused = "diagonal_band"
    print(refusal(lambda: clattn.tril(x)))
    cuda.refused = None
    np.testing.assert_array_equal(clattn.tril(x).numpy(), np.tril(x.numpy()))
    cuda.library.fake_fail_later()
    y = clattn.tril(x)
    print(refusal(y.numpy))
    """
    done = run_on_cuda(environment, code)
    first, second = done.stdout.splitlines()
    assert "DeviceError: " in first and "CL_OUT_OF_RESOURCES" in first
    assert "DeviceError: " in second and "tril" in second and "CL_OUT_OF_RESOURCES" in second
    assert [line.rpartition(" gave ")[2] for line in done.stderr.splitlines()] == [
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)",
        "CUDA_ERROR_LAUNCH_FAILED (719)",
    ]


def test_memory_exhausted(environment):
    code = """
    x = draw((700, 700))
    kept = clattn.tensor(x, device)
    cuda.library.fake_leave(x.nbytes // 2)
    print(refusal(lambda: clattn.tensor(x, device)))
    del kept
    np.testing.assert_array_equal(clattn.tensor(x, device).numpy(), x)
    """
    done = run_on_cuda(environment, code)
    assert "MemoryError: no memory for a Tensor of 1960000 bytes" in done.stdout
    assert "CL_MEM_OBJECT_ALLOCATION_FAILURE" in done.stdout
    assert done.stderr == ""


def test_without_cuda(environment):
    code = "import clattn; clattn.devices()"
    nowhere = environment | {"CLATTN_CUDA_LIBRARY": "libno-such-cuda.so.1"}
    done = run_python(code, env=nowhere, check_exit=False)
    assert "no platform (CL_PLATFORM_NOT_FOUND_KHR), so no driver" in done.stderr
    assert "clattn's test loader: libno-such-cuda.so.1: cannot open" in done.stderr


def test_a_user_who_wants_no_driver_gets_none(environment, tmp_path):
    code = "import clattn; print(len(clattn._core.all_devices()))"
    for vendors, status in ((tmp_path, 1), (tmp_path / "missing", 0)):
        wish = environment | {"OCL_ICD_VENDORS": vendors}
        assert run_python(code, env=wish, check_exit=False).returncode == status
    (tmp_path / "any.icd").touch()
    assert run_python(code, env=environment | {"OCL_ICD_VENDORS": tmp_path}).stdout == "1\n"


# --- the tool --------------------------------------------------------------------------------


def tool(environment, *command, check_exit=True, **more):
    folder = Path(environment["CLATTN_CUDA_PROGRAMS"]).parent
    env = {name: environment[name] for name in ("CLATTN_CUDA_LIBRARY", "XDG_CACHE_HOME")} | more
    line = [sys.executable, TOOL, "--folder", folder, *command]
    return run(line, timeout=120, check_exit=check_exit, env=env, cwd=None)


def test_a_command_and_its_children_find_the_device(environment):
    code = f"""{SETUP}
from argparse import Namespace
from clattn._commands import listing
listing.run(Namespace())
"""
    child = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    said = tool(environment, "--", sys.executable, "-c", child).stdout
    assert f"platform       {PLATFORM}" in said
    assert "matrix units   NVIDIA's, of capability 9.0" in said
    assert tool(environment, "--", "false", check_exit=False).returncode == 1


def test_the_command_is_the_listing(environment, tmp_path):
    said = tool(environment, check_exit=False, XDG_CACHE_HOME=tmp_path)
    assert PLATFORM in said.stdout, said


def test_a_folder_is_filled_without_a_gpu(environment, tmp_path):
    """A machine with a GPU and without clang then finds the same programs."""
    code = """
import clattn, numpy as np
x = np.ones((40, 50), np.float32)
assert not clattn.tril(x).any(), "launches do nothing"
print(clattn.get_default_device().compute_units)
"""
    made = tmp_path / "programs"
    line = ("--without-gpu", "--units", "7", "--folder", tmp_path, "--", sys.executable, "-c", code)
    assert tool(environment, *line).stdout == "7\n"
    there = environment | {"CLATTN_CUDA_PROGRAMS": made, "CLATTN_CUDA_COMPILER": ""}
    run_on_cuda(there, "x = draw((40, 50)); assert (clattn.tril(x) == np.tril(x)).all()")


def test_a_server_builds_nothing_after_warm_up(environment, tmp_path):
    """Packed rows and pages have programs of their own for matrix units."""
    code = """
import clattn, numpy as np
clattn.warm_up(["float16"], ["paged"], head_sizes=[64])
before = clattn._core.built_programs()[0]
rows = lambda n, heads: np.zeros((n, heads, 64), np.float16)
cache = clattn.PagedKVCache(300, 16, 2, 64, dtype="float16")
sequences = cache.open(2)
for ends in (0, 200, 350), (0, 1, 2), (0, 17, 19), (0, 3000, 3001):
    for heads in 2, 8:
        key = rows(ends[-1], 2)
        clattn.varlen_attn(rows(ends[-1], heads), key, key, ends, ends, enable_gqa=True)
    cache.append(sequences, key, key, cu_seq=ends)
    cache.attend(rows(ends[-1], 8), sequences, cu_seq_q=ends)
print(before > 0, clattn._core.built_programs()[0] - before)
"""
    line = ("--without-gpu", "--folder", tmp_path, "--", sys.executable, "-W", "ignore", "-c", code)
    assert tool(environment, *line, CLATTN_TRIALS="off").stdout == "True 0\n"


def test_without_a_driver(environment, tmp_path):
    nowhere = {"CLATTN_CUDA_LIBRARY": "libno-such-cuda.so.1"}
    done = tool(environment, check_exit=False, **nowhere)
    assert done.returncode == 2
    assert "cuda_machine: there is no driver for CUDA: libno-such-cuda.so.1" in done.stderr


def test_without_compilers(environment, tmp_path, monkeypatch):
    """What another machine has left is used; PTX of another clang is not."""
    monkeypatch.setattr(cuda_machine.nvidia, "find_programs", lambda: ((None, None), []))
    with pytest.raises(cuda_machine.MissingError, match="no clang or no libclc, and no PTX in"):
        cuda_machine.environment(tmp_path, CUDA)
    monkeypatch.setattr(cuda_machine, "C_COMPILER", None)
    assert (tmp_path / "libOpenCL.so.1").exists()
    (tmp_path / "programs" / "made_by.txt").write_text("clang of another machine\nand so on")
    added = cuda_machine.environment(tmp_path, CUDA)
    assert added["CLATTN_CUDA_LIBRARY"] == CUDA
    paths = added["LD_LIBRARY_PATH"].split(":")
    assert (paths[0], paths[-1]) == (str(tmp_path), "/driver")
    assert added["CLATTN_CUDA_COMPILER"] == ""
    assert added["CLATTN_CUDA_MADE_BY"] == "clang of another machine"
    monkeypatch.undo()
    old = tmp_path / "programs" / "0.ptx"
    for stays in (False, True):
        old.touch()
        assert cuda_machine.environment(tmp_path, CUDA)["CLATTN_CUDA_COMPILER"]
        assert old.exists() == stays
    monkeypatch.setattr(cuda_machine, "C_COMPILER", None)
    with pytest.raises(cuda_machine.MissingError, match=r"no C compiler, and no libOpenCL.so.1 in"):
        cuda_machine.environment(tmp_path / "new", CUDA)
