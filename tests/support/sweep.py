# SPDX-License-Identifier: MIT
"""Faults, swept: the n-th call of each function fails, for every operator, until none is left.

A child process runs the sweeps, with the loader opencl_sweep.c or with failing_memory.c preloaded.
After each fault the call either has raised an exception that names the failure, or has given the
right result; nothing has leaked; the next call is right.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import re
import sys
import warnings
from pathlib import Path
from types import CodeType, FunctionType

import clattn
import numpy as np
from references.attention import bfloat16, float16
from support.data import draw
from support.tensors import CALLS

MEMORY = {"CL_OUT_OF_RESOURCES": -5, "CL_OUT_OF_HOST_MEMORY": -6}
ALLOCATES = {"CL_MEM_OBJECT_ALLOCATION_FAILURE": -4}
QUEUE = {"CL_INVALID_COMMAND_QUEUE": -36, "CL_INVALID_CONTEXT": -34, "CL_DEVICE_NOT_AVAILABLE": -2}
WAITS = {"CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST": -14, "CL_INVALID_EVENT": -58}
BUFFER = {"CL_INVALID_MEM_OBJECT": -38, "CL_INVALID_VALUE": -30}
BUILD = {"CL_INVALID_VALUE": -30, "CL_COMPILER_NOT_AVAILABLE": -3}

# The errors that each function may give, by the specification, and a code of no specification.
FUNCTIONS = {
    "clGetPlatformIDs": {"CL_PLATFORM_NOT_FOUND_KHR": -1001},
    "clGetPlatformInfo": {"CL_INVALID_PLATFORM": -32},
    "clGetDeviceIDs": {"CL_DEVICE_NOT_FOUND": -1, "CL_INVALID_PLATFORM": -32},
    "clGetDeviceInfo": {"CL_INVALID_DEVICE": -33, "CL_INVALID_VALUE": -30},
    "clCreateContext": {"CL_DEVICE_NOT_AVAILABLE": -2, "CL_INVALID_DEVICE": -33},
    "clReleaseContext": {"CL_INVALID_CONTEXT": -34},
    "clCreateCommandQueue": {"CL_INVALID_QUEUE_PROPERTIES": -35},
    "clReleaseCommandQueue": {"CL_INVALID_COMMAND_QUEUE": -36},
    "clCreateProgramWithSource": {"CL_INVALID_CONTEXT": -34},
    "clCreateProgramWithBinary": {"CL_INVALID_BINARY": -42},
    "clBuildProgram": {"CL_BUILD_PROGRAM_FAILURE": -11} | BUILD,
    "clGetProgramInfo": {"CL_INVALID_PROGRAM": -44},
    "clGetProgramBuildInfo": {"CL_INVALID_PROGRAM": -44},
    "clReleaseProgram": {"CL_INVALID_PROGRAM": -44},
    "clCreateKernel": {"CL_INVALID_KERNEL_NAME": -46, "CL_INVALID_PROGRAM_EXECUTABLE": -45},
    "clReleaseKernel": {"CL_INVALID_KERNEL": -48},
    "clSetKernelArg": {"CL_INVALID_ARG_INDEX": -49, "CL_INVALID_ARG_SIZE": -51},
    "clSetKernelArgSVMPointer": {"CL_INVALID_ARG_INDEX": -49, "CL_INVALID_ARG_VALUE": -50},
    "clGetKernelWorkGroupInfo": {"CL_INVALID_DEVICE": -33},
    "clCreateBuffer": {"CL_INVALID_BUFFER_SIZE": -61} | ALLOCATES,
    "clReleaseMemObject": {"CL_INVALID_MEM_OBJECT": -38},
    "clEnqueueReadBuffer": QUEUE | WAITS | BUFFER | ALLOCATES,
    "clEnqueueWriteBuffer": QUEUE | BUFFER | ALLOCATES,
    "clEnqueueMapBuffer": {"CL_MAP_FAILURE": -12} | QUEUE | BUFFER | ALLOCATES,
    "clEnqueueUnmapMemObject": QUEUE | BUFFER,
    "clEnqueueNDRangeKernel": {"CL_INVALID_KERNEL_ARGS": -52, "CL_INVALID_WORK_GROUP_SIZE": -54}
    | QUEUE
    | ALLOCATES,
    "clWaitForEvents": WAITS,
    "clGetEventInfo": {"CL_INVALID_EVENT": -58},
    "clRetainEvent": {"CL_INVALID_EVENT": -58},
    "clReleaseEvent": {"CL_INVALID_EVENT": -58},
    "clFlush": QUEUE,
    "clFinish": QUEUE,
}
# Functions that open a device.
FIRST_FUNCTIONS = ("clGetPlatformIDs", "clGetDeviceIDs", "clCreateContext", "clCreateCommandQueue")
UNKNOWN = {"-9999": -9999}
ENDLESS = 5000  # more calls of a function than an operator makes
UNMOVED = 10  # results in a row after which no allocation is left that may fail


def errors_of(function):
    """The errors that the function may give: {name: code}."""
    return FUNCTIONS[function] | MEMORY | UNKNOWN


def operations(device, everything=True):
    """Every operator, with arrays and Tensors: {title: function that returns NumPy arrays}.

    Without `everything` those are left out whose programs are their own, and take seconds to build.
    """
    made = {}

    def add(title, run, forced=""):
        def result():
            clattn._core.force(forced)
            try:
                return [np.array(a) for a in run()]
            finally:
                clattn._core.force()

        made[title] = result

    for title, call in CALLS.items():
        attends = "query" in call.arrays or "Q" in call.arrays or "directml" in title
        matrix = "diagonal" in title or title in ("tril", "triu")
        forced = "reference" if attends and not matrix else ""
        tensors = {name: clattn.tensor(a, device) for name, a in call.arrays.items()}
        add(f"{title}, arrays", lambda c=call: c.run(device=device).values(), forced)
        add(
            f"{title}, Tensors", lambda c=call, t=tensors: c.run(lambda n, _: t[n]).values(), forced
        )
    attend = clattn.scaled_dot_product_attention
    wide = [draw((1, 4, 96, 16), seed=n) for n in range(3)]
    rows = [draw((1, 2, n, 16), seed=n) for n in (1, 600, 601)]
    rows[2] = rows[2][:, :, :600]
    for kernel, arrays in (("cpu", wide), ("decode_cpu", rows)):
        tensors = [clattn.tensor(a, device) for a in arrays]
        out = np.empty_like(arrays[0])
        strided = np.empty((*arrays[0].shape, 2), "f4")[..., 0]
        on_device = clattn.tensor(out, device)
        cases = {
            "arrays": lambda a=arrays: [attend(*a, device=device)],
            "Tensors": lambda t=tensors: [attend(*t)],
            "a chain": lambda t=tensors: [attend(attend(attend(*t), *t[1:]), *t[1:])],
            "out": lambda a=arrays, o=out: [attend(*a, out=o, device=device)],
            "strided out": lambda a=arrays, o=strided: [attend(*a, out=o, device=device)],
            "out on the device": lambda t=tensors, o=on_device: [attend(*t, out=o)],
            "NaN": lambda a=arrays: [attend(a[0] * np.nan, *a[1:], device=device)],
            "NaN, Tensors": lambda t=tensors, a=arrays: [
                attend(clattn.tensor(a[0] * np.nan, device), *t[1:])
            ],
        }
        for title, run in cases.items():
            add(f"{kernel}, {title}", run, kernel)
    tensor = clattn.tensor(wide[0], device)
    for title, run in other_operators(device, wide, tensor).items():
        if everything or "flex" not in title:
            add(title, run, "reference" if "merge" in title else "cpu")

    def cached(dtype="float32"):
        cache = clattn.KVCache(1, 4, 128, 16, dtype=dtype, device=device)
        cache.append(wide[1], wide[2])
        cache.truncate(90)
        cache.append(clattn.tensor(wide[1][:, :, :3], device), wide[2][:, :, :3])
        cache.append(wide[1][:, :, :4], wide[2][:, :, :4], [3])
        cache.reorder([0])
        copy = cache.copy()
        lse = copy.attend(wide[0], score_mod=lambda s, b, h, i, j: s - 0.125 * j, return_lse=True)
        return [cache.attend(wide[0]), cache.attend(tensor[:, :, :2]), *lse]

    add("KVCache", cached, "reference")
    add("KVCache, int4", lambda: cached("int4"), "reference")

    def paged(dtype, *parts):
        cache = clattn.PagedKVCache(9, 32, 4, 16, dtype=dtype, device=device)
        first, second = cache.open(2)
        rows = [array[0].swapaxes(0, 1) for array in wide[1:]]
        cache.append([first, second], *rows, [0, 40, 96])
        branch = cache.fork(first)
        cache.append([branch], *(clattn.tensor(array[:3], device) for array in rows))
        cache.truncate(second, 20)
        cache.close(first)
        query = wide[0][0].swapaxes(0, 1)
        output = cache.attend(query[:4], [branch, second, branch], [0, 1, 3, 4])
        on_device = cache.attend(clattn.tensor(query[:3], device), [branch])
        table = cache.block_table([branch, second])
        kept = (np.array(getattr(cache, part))[table[0, 0]] for part in parts)
        return [output, on_device, *kept]

    for dtype, *parts in (("float32", "key", "value"), ("int4", "key", "value_offset")):
        add(f"PagedKVCache, {dtype}", lambda d=dtype, p=parts: paged(d, *p), "reference")
    add("Tensor", lambda: [clattn.tensor(wide[0], device), tensor.T.reshape(-1), tensor[0, 1:]])
    add("tril of a Tensor", lambda: [clattn.tril(tensor)])
    return made


def other_operators(device, arrays, tensor):
    """Calls with the user's functions, with more results, and in other types: {title: function}."""
    attend = clattn.scaled_dot_product_attention
    tensors = [tensor, *(clattn.tensor(a, device) for a in arrays[1:])]
    table = draw((4, 7), seed=5)
    halves = [[a.astype(dtype) for a in arrays] for dtype in (float16, bfloat16)]
    half_tensors = [[clattn.tensor(a, device) for a in half] for half in halves]
    swapped = [a.astype(a.dtype.newbyteorder(">")) for a in arrays]
    sinks = draw((4,), seed=6)

    def score_mod(s, b, h, i, j):
        return s + clattn.lookup(table, h, (j - i) % 7)

    def mask_mod(b, h, i, j):
        return (i >= j) & (i - j < 40)

    def blocks():
        return clattn.create_block_mask(mask_mod, 1, 4, 96, 96, device=device, BLOCK_SIZE=32)

    mask = blocks()

    def flex(given, **options):
        return clattn.flex_attention(*given, score_mod, **options, return_lse=True, device=device)

    def learn(given, table):
        """The gradients of what the score_mod reads, too."""

        def mod(s, b, h, i, j):
            return s * 0.5 + clattn.lookup(table, h, (j - i) % 7)

        q, k, v = given
        gradients = clattn.flex_attention_backward(v, q, k, v, v, v[..., 0], mod,
                                                   captured=[table], device=device)  # fmt: skip
        return [*gradients[:3], *gradients.captured]

    def parts(q, k, v):
        """No list: CPython 3.11 loses one of which a copy finds no memory."""
        for keys in (slice(40), slice(40, None)):
            yield attend(q, k[:, :, keys], v[:, :, keys], return_lse=True, device=device)

    def bits(half):
        """ml_dtypes crashes where a copy of its bfloat16 finds no memory."""
        return attend(*half, device=device).view(np.uint16)

    def merged(given):
        with clattn.use_device(device):
            return clattn.merge_attention(parts(*given))

    return {
        "create_block_mask": lambda: [blocks().to_dense()],
        "flex_attention, arrays": lambda: flex(arrays, mask_mod=mask_mod),
        "flex_attention, blocks, Tensors": lambda: flex(tensors, block_mask=mask),
        "flex_attention_backward, arrays": lambda: learn(arrays, table),
        "flex_attention_backward, Tensors": lambda: learn(tensors, clattn.tensor(table, device)),
        "merge_attention": lambda: merged(arrays),
        "merge_attention, Tensors": lambda: merged(tensors),
        "sinks and weights": lambda: attend(*arrays, sinks=sinks, return_weights=True,
                                            return_lse=True, device=device),
        "sinks and weights, Tensors": lambda: attend(*tensors, sinks=clattn.tensor(sinks, device),
                                                     return_weights=True),
        "half types": lambda: [bits(half) for half in halves],
        "half types, Tensors": lambda: [attend(*half).numpy().view("u2") for half in half_tensors],
        "the other byte order": lambda: [attend(*swapped, device=device)],
    }  # fmt: skip


class Loader:
    """The loader opencl_sweep.c in this process."""

    def __init__(self, path, device):
        self.library = ctypes.CDLL(str(path))
        self.library.sweep_living.restype = ctypes.c_long
        self.device = device

    def fail(self, function, n, code):
        self.library.sweep_fail(function.encode(), n, code)

    def end(self):
        return bool(self.library.sweep_end())

    def state(self):
        """What lives once no call is running."""
        gc.collect(0)
        clattn.synchronize(self.device)
        clattn.empty_cache(self.device)
        stats = clattn.memory_stats(self.device)
        return self.library.sweep_living(), stats["allocated_blocks"], stats["allocated_bytes"]


def same(got, expected):
    return len(got) == len(expected) and all(
        a.tobytes() == b.tobytes() and a.shape == b.shape
        for a, b in zip(got, expected, strict=True)
    )


def names(error, function, title, device):
    """Whether the message says what has failed."""
    text = str(error)
    late = re.search(r": kernel '\w+' on device", text) is not None
    memory = isinstance(error, MemoryError) and "memory" in text
    return device.name in text and (function in text or late or memory)


def check_after(loader, title, run, expected, before, failed):
    """Nothing is left over, and the next call is right."""
    try:
        clattn.synchronize(loader.device)
    except clattn.DeviceError:
        assert failed, "an error that no call has had"
    after = loader.state()
    assert after == before, f"living {after}, before {before}"
    assert same(run(), expected), "the next call is wrong"


def sweep_loader(loader, *, everything, only=None):
    """Sweep all operators when they are warm. Returns {outcome: count}."""
    counts = dict.fromkeys(("raised", "right", "functions"), 0)
    seen = set()
    turn = itertools.count()
    for title, run in operations(loader.device, everything).items():
        if only is not None and only not in title:
            continue
        expected = run()
        assert same(run(), expected), title
        run()
        before = loader.state()
        for function in FUNCTIONS:
            errors = list(errors_of(function).items())
            for n in range(1, ENDLESS):
                chosen = errors if everything else [errors[next(turn) % len(errors)]]
                fired = False
                for word, code in chosen:
                    case = f"{title}: call {n} of {function} gives {word}"
                    fired = one_case(loader, run, expected, before, function, n, code, case, counts)
                    if not fired:
                        break
                if not fired:
                    break
                seen.add(function)
    counts["functions"] = len(seen)
    return counts


def one_case(loader, run, expected, before, function, n, code, case, counts):
    """Fail one call. Returns whether there was one."""
    loader.fail(function, n, code)
    error = got = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = run()
    except (clattn.DeviceError, MemoryError) as raised:
        error = raised
    fired = loader.end()
    try:
        if error is not None:
            assert fired, f"an error without a fault: {error}"
            assert names(error, function, case, loader.device), f"the message is {error}"
        elif fired:
            assert same(got, expected), "a wrong result without an error"
        if fired:
            counts["raised" if error is not None else "right"] += 1
            error = got = None
            check_after(loader, case, run, expected, before, failed=True)
    except Exception as problem:
        raise AssertionError(f"{case}: {problem!r}") from problem
    return fired


def first_calls(library, index, function, n, word, code):
    """What the first calls of a process do while one call fails: the exit status of a process.

    0: the call was not reached. 1: an error was raised. 2: the results were right. Above: wrong.
    """
    library.sweep_fail(function.encode(), n, code)
    matrix = np.arange(12, dtype="f4").reshape(3, 4)
    errors = []
    fired = False
    for _ in range(2):
        try:
            devices = clattn._core.all_devices()
            device = devices[min(index, len(devices) - 1)]  # clGetDeviceIDs hides devices
            results = [clattn.diagonal_matrix(matrix, 0.0, 1, 4, device=device),
                       clattn.tensor(matrix, device).numpy()]  # fmt: skip
            if not same(results, [np.tril(matrix), matrix]):
                return 3
        except (clattn.DeviceError, MemoryError) as error:
            errors.append(str(error))
        fired = bool(library.sweep_end()) or fired
    if not fired:
        return 0 if not errors else 4
    if errors and not any(part in errors[0] for part in (function, word, "memory")):
        return 5
    # A device that fails its probe is not used again in the process.
    if len(errors) == 2 and errors[0] != errors[1]:
        return 6
    return 1 if errors else 2


def sweep_cold(path, index, *, everything):
    """Sweep the first calls of a process, each in a process of its own. {outcome: count}.

    This process must not have opened OpenCL. Each call fails with one of its errors. Without
    `everything` only the first call of some functions fails.
    """
    library = ctypes.CDLL(str(path))
    counts = dict.fromkeys(("raised", "right", "functions"), 0)
    turn = itertools.count()
    for function in FUNCTIONS if everything else FIRST_FUNCTIONS:
        reached = False
        for n in range(1, ENDLESS if everything else 2):
            errors = list(errors_of(function).items())
            word, code = errors[next(turn) % len(errors)]
            child = os.fork()
            if child == 0:
                os._exit(first_calls(library, index, function, n, word, code))
            status = os.waitpid(child, 0)[1]
            case = f"call {n} of {function} gives {word}"
            assert os.WIFEXITED(status), f"{case}: the process dies"
            outcome = os.WEXITSTATUS(status)
            assert outcome <= 2, f"{case}: {outcome}"
            counts["raised"] += outcome == 1
            counts["right"] += outcome == 2
            if outcome == 0:
                break
            reached = True
        counts["functions"] += reached
    return counts


def library_addresses(name):
    """The first and last address of a library of this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    assert lines, name
    ends = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in lines]
    return min(a for a, _ in ends), max(b for _, b in ends)


def sweep_memory(device, *, everything=True, only=None):
    """Let the n-th allocation of the extension fail, for each operator. {outcome: count}."""
    memory = ctypes.CDLL(None)
    addresses = library_addresses("_core.")
    memory.memory_of(*(ctypes.c_size_t(a) for a in addresses))
    counts = {"raised": 0, "right": 0}
    for title, run in operations(device, everything).items():
        if only is not None and only not in title:
            continue
        expected = run()
        run()
        clattn.empty_cache(device)
        run()
        before = settle(device)
        for n in range(1, ENDLESS):
            clattn.empty_cache(device)
            memory.memory_fail(n)
            got = None
            with contextlib.suppress(MemoryError):
                got = run()
            fired = memory.memory_end()
            if not fired:
                break
            case = f"{title}: allocation {n}"
            assert got is None or same(got, expected), f"{case}: a wrong result without an error"
            counts["right" if got is not None else "raised"] += 1
            got = None
            assert settle(device) == before, f"{case}: {settle(device)}, before {before}"
            assert same(run(), expected), f"{case}: the next call is wrong"
    return counts


def sweep_python(device, *, everything=True, only=None):
    """Let the n-th allocation of the interpreter fail, for each operator. {outcome: count}.

    The methods of PagedKVCache have functions within. Where the interpreter loses the arguments of
    such a method, something may be left over.
    """
    import _testcapi

    counts = {"raised": 0}
    loses = loses_arguments()
    operators = operations(device, everything)
    hold_codes()
    for title, run in operators.items():
        if only is not None and only not in title:
            continue
        expected = run()
        before = settle(device)
        unmoved = 0
        for n in range(1, ENDLESS):
            got = None
            _testcapi.set_nomemory(n, n + 1)
            try:
                got = run()
            except MemoryError:
                pass
            finally:
                _testcapi.remove_mem_hooks()
            assert got is None or same(got, expected), f"{title}: allocation {n}: wrong result"
            if got is not None:
                unmoved += 1
                if unmoved == UNMOVED:
                    break
                continue
            counts["raised"] += 1
            unmoved = 0
            after = settle(device)
            if not (loses and "PagedKVCache" in title):
                assert after == before, f"{title}: allocation {n}: something is left over"
            before = after
        assert same(run(), expected), f"{title}: the next call is wrong"
    return counts


def loses_arguments():
    """Whether the interpreter loses arguments that a function within reads, as CPython 3.11 does.

    That is where it finds no memory for the cells that hold them.
    """
    import _testcapi

    class Kept:
        def keep(self, argument):
            return lambda: (self, argument)

    thing, one = [], Kept()
    one.keep(thing)
    before = sys.getrefcount(thing)
    _testcapi.set_nomemory(1, 2)
    try:
        one.keep(thing)
    except MemoryError:
        pass
    finally:
        _testcapi.remove_mem_hooks()
    return sys.getrefcount(thing) > before


def hold_codes():
    """Hold the code of every function, and of functions within, a hundred times and for ever.

    Python 3.12 and 3.13 release the code once too often where a function finds no memory
    (github.com/python/cpython/issues/122752).
    """
    gc.unfreeze()  # the functions of before the fork
    codes, left = {}, [f.__code__ for f in gc.get_objects() if isinstance(f, FunctionType)]
    while left:
        code = left.pop()
        if id(code) not in codes:
            codes[id(code)] = code
            left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(codes.values()) * 100))


def settle(device):
    gc.collect(0)
    clattn.synchronize(device)
    stats = clattn.memory_stats(device)
    return stats["allocated_blocks"], stats["allocated_bytes"]
