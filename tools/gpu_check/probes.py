# SPDX-License-Identifier: MIT
"""What a driver takes, computes and how fast: small kernels, one process for as many as pass.

python -m gpu_check.probes --device WORDS FILE PROBE... writes lines of JSON to the file: items.py
"""

import argparse
import ctypes as c
import itertools
import random
import struct
import time

from gpu_check import items
from gpu_check.items import Skipped
from gpu_check.opencl import HOST_MEMORY, OUT_OF_ORDER, Context, Error, LocalMemory, source_of

PROBES = {}
MIB = 1 << 20
FORMS = (
    "__asm__ volatile", "asm volatile", "__asm__", '"+r"', "{ .reg }", '"memory"', '"n"',
    '__global as "l"', "__local as uint", '__local as "l"', "%%laneid", '"h" and "f"',
    '_Pragma("unroll")', "opencl_unroll_hint", "a comment",
)  # fmt: skip
REFUSED_FORMS = {1, 9}  # those that kernels here do not use
VERBOSE = "-cl-nv-verbose"
NVIDIA_OPTIONS = (VERBOSE, "-cl-nv-maxrregcount=64", "-cl-nv-opt-level=0", "-cl-nv-arch sm_90a",
                  "-cl-nv-arch=sm_90a", "-cl-fast-relaxed-math")  # fmt: skip


def probe(name, least_capability=0.0):
    """Add a probe: a function of a Context that returns text, or raises."""

    def add(function):
        def run(context):
            have = float(context.facts.get("capability", 0))
            if have < least_capability:
                raise Skipped(f"for NVIDIA's GPUs of capability {least_capability} or more")
            return function(context)

        PROBES[name] = run
        return function

    return add


def expect(condition, text):
    if not condition:
        raise Error(text)


def brief(error):
    return " ".join(str(error).split())[:200]


def floats(numbers):
    return struct.pack(f"{len(numbers)}f", *numbers)


def unpacked(kind, data):
    return struct.unpack(f"{len(data) // struct.calcsize(kind)}{kind}", data)


def half(x):
    """The bits of the nearest float16."""
    try:
        return struct.unpack("H", struct.pack("e", x))[0]
    except OverflowError:
        return 0x7C00 | (0x8000 if x < 0 else 0)


def bfloat16(x):
    """The bits of the nearest bfloat16, ties to even."""
    bits = struct.unpack("I", struct.pack("f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def shortest(function, count):
    """The shortest time of some calls, and the one in the middle."""
    times = []
    for _ in range(count):
        start = time.monotonic()
        function()
        times.append(time.monotonic() - start)
    return min(times), sorted(times)[count // 2]


# --- what the compiler takes ---------------------------------------------------------------------


@probe("inline PTX", 5.0)
def inline_ptx(context):
    refused = {}
    for form, words in enumerate(FORMS):
        try:
            program = context.build(source_of("forms.cl"), f"-DFORM={form}")
            numbers = context.buffer(struct.pack("32I", *range(32)))
            context.run(program.kernel("forms"), 32, 32, numbers)
            right = unpacked("I", context.read(numbers, 128)) == tuple(range(3, 35))
            refused |= {} if right else {form: f"{words}: wrong numbers"}
        except Error as error:
            refused[form] = f"{words}: {brief(error)}"
    text = "; ".join(refused.values()) or "all forms"
    expect(not refused.keys() - REFUSED_FORMS, text)
    return f"all forms that kernels use; not: {text}" if refused else text


@probe("NVIDIA's options", 5.0)
def nvidia_options(context):
    source = source_of("plain.cl")
    takes = []
    for option in NVIDIA_OPTIONS:
        try:
            log = context.build(source, option).log()
            takes.append(f"{option}: yes" + (", with a log" if "registers" in log else ""))
        except Error as error:
            takes.append(f"{option}: {brief(error)}")
    return "; ".join(takes)


@probe("binary")
def binary(context):
    program = context.build(source_of("plain.cl"))
    data, text = program.binary(), program.ptx()
    again = context.load(data)
    count_in(context, again.kernel("given_memory"), 1024)
    target = [line for line in text.splitlines() if line.startswith((".version", ".target"))]
    kind = f"PTX, {' '.join(target)}" if text else "no PTX"
    return (f"{len(data)} bytes, {kind}; built in {program.seconds * 1e3:.0f} ms, "
            f"loaded again in {again.seconds * 1e3:.0f} ms")  # fmt: skip


@probe("PTX for sm_90a", 9.0)
def other_target(context):
    """Can PTX be changed and loaded? Then instructions beyond OpenCL's compiler can be reached."""
    text = context.build(source_of("plain.cl")).ptx()
    expect(text, "the binary is no PTX")
    lines = [".target sm_90a" if line.startswith(".target") else line for line in text.splitlines()]
    program = context.load(("\n".join(lines) + "\n").encode())
    count_in(context, program.kernel("given_memory"), 1024)
    return "PTX for sm_90a can be loaded, and runs"


# --- what it computes ----------------------------------------------------------------------------


@probe("half types")
def half_types(context):
    program = context.build(source_of("plain.cl"))
    every = [h for h in range(1 << 16) if h & 0x7C00 != 0x7C00]
    data = struct.pack(f"{len(every)}H", *every)
    output = context.buffer(4 * len(every))
    context.run(program.kernel("load_halves"), len(every), 1, context.buffer(data), output)
    loaded = unpacked("f", context.read(output, 4 * len(every)))
    wrong = sum(a != b for a, b in zip(loaded, unpacked("e", data), strict=True))
    expect(not wrong, f"vload_half: {wrong} of {len(every)} wrong")
    finite = sorted(set(loaded))
    ties = [(a + b) / 2 for a, b in itertools.pairwise(finite)]
    numbers = [*ties, *(random.Random(0).uniform(-70000, 70000) for _ in range(4096)), 65519.0]
    numbers = unpacked("f", floats(numbers))
    output = context.buffer(2 * len(numbers))
    given = context.buffer(floats(numbers))
    context.run(program.kernel("store_halves"), len(numbers), 1, given, output)
    stored = unpacked("H", context.read(output, 2 * len(numbers)))
    wrong = sum(a != half(b) for a, b in zip(stored, numbers, strict=True) if b)
    expect(not wrong, f"vstore_half_rte: {wrong} of {len(numbers)} wrong")
    return "vload_half and vstore_half_rte exact, ties too"


def count_in(context, kernel, size, own=False):
    wrong = context.buffer(1024)
    more = () if own else (LocalMemory(size), c.c_uint(size))
    context.run(kernel, 256, 256, wrong, *more)
    count = sum(unpacked("I", context.read(wrong, 1024)))
    expect(count == 0, f"{count} of {size} bytes wrong")


@probe("local memory")
def local_memory(context):
    said = []
    for size, own in ((48 << 10, True), ((48 << 10) + 16, True), (48 << 10, False),
                      (64 << 10, False), (100 << 10, False), (200 << 10, False)):  # fmt: skip
        try:
            program = context.build(source_of("plain.cl"), f"-DBYTES={size}" if own else "")
            name = "own_memory" if own else "given_memory"
            count_in(context, program.kernel(name), size, own)
            outcome = "yes"
        except Error as error:
            outcome = brief(error)
        said.append(f"{size} bytes {'declared' if own else 'given'}: {outcome}")
    text = f"the device says {context.facts['local memory']}; " + "; ".join(said)
    too_small = context.facts["local memory"] < 48 << 10
    expect(said[0].endswith("yes") or too_small, text)
    return text


@probe("a buffer of 6 GiB")
def large_buffer(context):
    size = 6 << 30
    if not context.is_gpu or context.facts["memory"] < 2 * size:
        raise Skipped("for GPUs with 12 GiB")
    kernel = context.build(source_of("plain.cl")).kernel("write_ends")
    large = context.buffer(size)
    context.run(kernel, 2, 1, large, c.c_ulong(size // 4 - 1))
    ends = [unpacked("I", context.read(large, 4, at=at))[0] for at in (0, size - 4)]
    expect(ends == [77, 78], f"its ends hold {ends}")
    return f"works; the device says {context.facts['largest buffer'] / 2**30:.1f} GiB"


def warp_options(context, name):
    matrix = int(context.has_matrix_units)
    return f"-DWARP={matrix} -DDTYPE={1 if name == 'float16' else 2}"


def how(context):
    return "PTX" if context.has_matrix_units else "emulated"


def multiplies(context, name):
    rounded = half if name == "float16" else bfloat16
    number = random.Random(1)
    matrices = [[number.randint(-8, 8) for _ in range(n)] for n in (256, 128)]
    a, b = (struct.pack(f"{len(m)}H", *map(rounded, m)) for m in matrices)
    sums = [number.randint(-99, 99) for _ in range(128)]
    program = context.build(source_of("warp.cl"), warp_options(context, name))
    output, transposed = context.buffer(512), context.buffer(512)
    given = context.buffer(floats(sums))
    context.run(program.kernel("multiply"), 32, 32, context.buffer(a), context.buffer(b), given,
                output, transposed)  # fmt: skip
    got = unpacked("f", context.read(output, 512))
    a, b = matrices
    for lane in range(32):
        for n in range(4):
            row, column = lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2
            right = sums[4 * lane + n] + sum(
                a[16 * row + k] * b[16 * column + k] for k in range(16)
            )
            found = got[4 * lane + n]
            expect(found == right, f"row {row}, column {column} is {found}, not {right}")
    words = unpacked("H", context.read(transposed, 512))
    for lane in range(32):
        for n in range(8):
            matrix, first = n // 2, 2 * (lane % 4) + n % 2
            row, column = 8 * (matrix % 2) + first, 8 * (matrix // 2) + lane // 4
            found = words[8 * lane + n]
            expect(found == rounded(a[16 * row + column]), f"lane {lane}, transposed matrix {n}")
    return f"{how(context)}: ldmatrix, its transposed form and mma exact on whole numbers"


probe("multiply float16")(lambda context: multiplies(context, "float16"))
probe("multiply bfloat16")(lambda context: multiplies(context, "bfloat16"))


@probe("asynchronous copies")
def copies(context):
    program = context.build(source_of("warp.cl"), warp_options(context, "float16"))
    data = random.Random(2).randbytes(4096)
    output = context.buffer(4096)
    for turn in range(20):  # a copy that is waited for too little may still be right at times
        context.write(output, bytes(4096))
        context.run(program.kernel("copies"), 128, 128, context.buffer(data), output)
        got = context.read(output, 4096)
        for n in range(256):
            place = n // 128 * 128 + 127 - n % 128
            is_empty = n >= 128 and place % 2 == 1
            right = bytes(16) if is_empty else data[16 * place : 16 * place + 16]
            expect(got[16 * n : 16 * n + 16] == right, f"turn {turn}: piece {n} is wrong")
    return f"{how(context)}: two sets, zeros where asked for; 20 turns exact"


@probe("addresses", 8.0)
def addresses(context):
    """From a pointer to a shared address, at several alignments of the array."""
    said, wrong = [], []
    data = random.Random(3).randbytes(512)
    for way, words in enumerate(("cast", "cvt", "cvta")):
        for align in (128, 16, 4):
            options = f"-DWAY={way} -DALIGN={align}" + (" -cl-std=CL3.0" if way == 2 else "")
            try:
                program = context.build(source_of("addresses.cl"), options)
                output, address = context.buffer(512), context.buffer(128)
                given = context.buffer(data)
                context.run(program.kernel("addresses"), 32, 32, given, output, address)
                got = context.read(output, 512)
                right = b"".join(
                    data[16 * (8 * m + lane // 4) + 4 * (lane % 4) :][:4]
                    for lane in range(32) for m in range(4)
                )  # fmt: skip
                place = unpacked("I", context.read(address, 4))[0]
                outcome = ("right" if got == right else "WRONG") + f" at {place}"
            except Error as error:
                outcome = brief(error)
            said.append(f"{words}, aligned to {align}: {outcome}")
            if way == 0 and align >= 16 and "right" not in outcome:
                wrong.append(said[-1])
    expect(not wrong, "; ".join(said))
    return "; ".join(said)


@probe("numbers of a warp")
def warp_numbers(context):
    program = context.build(source_of("warp.cl"), warp_options(context, "float16"))
    number = random.Random(4)
    x = unpacked("f", floats([number.uniform(-140, 20) for _ in range(64)]
                             + [number.uniform(-66000, 66000) for _ in range(64)]))  # fmt: skip
    outputs = [context.buffer(256) for _ in range(4)]
    given = context.buffer(floats(x))
    context.run(program.kernel("numbers"), 64, 64, given, *outputs)
    exchanged, packed, powers, votes = (
        unpacked(kind, context.read(output, 256))
        for kind, output in zip("fIfI", outputs, strict=True)
    )
    expect(exchanged == tuple(x[i ^ 5] for i in range(64)), "an exchange is wrong")
    right = tuple(half(x[i]) | half(x[64 + i]) << 16 for i in range(64))
    expect(packed == right, "rounding to float16 is wrong")
    error = max(abs(p / 2.0**e - 1) for p, e in zip(powers, x, strict=False) if e > -126)
    expect(error < 1e-6, f"exp2 has an error of {error:.1e}")
    expect(all(votes[:32]), "a vote is wrong")
    return f"{how(context)}: exchange, vote and rounding exact; exp2 within {error:.1e}"


# --- how fast it is ------------------------------------------------------------------------------


@probe("launch")
def launch(context):
    kernel = context.build(source_of("plain.cl")).kernel("nothing")
    buffer, queue, count = context.buffer(64), context.make_queue(), 200

    def once():
        context.launch(kernel, 32, 32, queue=queue)
        context.finish(queue)

    def many():
        for _ in range(count):
            context.launch(kernel, 32, 32, queue=queue)
        context.finish(queue)

    context.launch(kernel, 32, 32, buffer, queue=queue)
    many()
    alone, together = shortest(once, 200)[1], shortest(many, 5)[0] / count
    reading = shortest(lambda: context.read(buffer, 4), 200)[1]
    return (f"launched and waited for {alone * 1e6:.1f} us; one of {count} {together * 1e6:.2f} "
            f"us; 4 bytes read {reading * 1e6:.1f} us; Python's share included")  # fmt: skip


@probe("transfers")
def transfers(context):
    largest = (256 if context.is_gpu else 64) * MIB
    buffer, host = context.buffer(largest), context.buffer(largest, HOST_MEMORY)
    address = context.map(host, largest).value
    pinned = (c.c_char * largest).from_address(address)
    said = []
    for size in (64 << 10, 16 * MIB, largest):
        for words, memory in (("pageable", c.create_string_buffer(size)), ("pinned", pinned)):
            part = (c.c_char * size).from_buffer(memory)
            write = shortest(lambda: context.write(buffer, part), 5)[0]  # noqa: B023
            read = shortest(lambda: context.read(buffer, size, into=part), 5)[0]  # noqa: B023
            speed = f"write {size / write / 1e9:.1f}, read {size / read / 1e9:.1f} GB/s"
            said.append(f"{size >> 10} KiB {words}: {speed}")
    return "; ".join(said)


@probe("memory")
def memory(context):
    size = (2048 if context.is_gpu else 64) * MIB
    size = min(size, context.facts["largest buffer"] // MIB * MIB)
    program = context.build(source_of("plain.cl"))
    a, b, small, count = context.buffer(size), context.buffer(size), context.buffer(64), size // 16
    groups = context.facts["compute units"] * (16 if context.is_gpu else 1)
    shape, n = (groups * 256, 256), c.c_uint(count)

    def best(name, *arguments):
        kernel = program.kernel(name)
        return min(context.seconds(kernel, *shape, *arguments) for _ in range(6))

    write, read, copy = (
        size / best("write_words", a, n, c.c_uint(7)) / 1e9,
        size / best("read_words", a, small, n) / 1e9,
        2 * size / best("copy_words", a, b, n) / 1e9,
    )
    last = unpacked("I", context.read(b, 16, at=size - 16))
    expect(last == (7, count - 1, 7 ^ (count - 1), 7), f"a copy ends with {last}")
    return f"{size // MIB} MiB: read {read:.0f}, write {write:.0f}, copy {copy:.0f} GB/s"


def rate(context, kernel, shape, before, work, after=()):
    """Operations per second of a kernel whose argument is a count, in launches of 20 ms."""
    count = 16
    while True:
        seconds = context.seconds(kernel, *shape, *before, c.c_uint(count), *after)
        if seconds > 5e-3 or count > 1 << 26:
            break
        count *= 4
    count = max(1, int(count * 20e-3 / seconds))
    runs = [context.seconds(kernel, *shape, *before, c.c_uint(count), *after) for _ in range(8)]
    return work * count * shape[0] / min(runs), work * count * shape[0] / (sum(runs) / len(runs))


@probe("float32")
def float32(context):
    groups = context.facts["compute units"] * (32 if context.is_gpu else 1)
    kernel = context.build(source_of("plain.cl")).kernel("multiply_add")
    output, more = context.buffer(64), (c.c_float(0.999), c.c_float(0.001))
    best, mean = rate(context, kernel, (groups * 256, 256), (output,), 256.0, more)
    return f"fma: {best / 1e12:.2f} TFLOP/s, {mean / 1e12:.2f} on average"


@probe("matrix units", 8.0)
def matrix_units(context):
    groups, said = context.facts["compute units"] * 8, []
    given, output = context.buffer(bytes(8192)), context.buffer(groups * 1024)
    for name in ("float16", "bfloat16"):
        for chains in (8, 16):
            options = warp_options(context, name) + f" -DCHAINS={chains}"
            kernel = context.build(source_of("matrix_rate.cl"), options).kernel("matrix_rate")
            work = chains * 2.0 * 16 * 8 * 16 / 32
            best, mean = rate(context, kernel, (groups * 256, 256), (given, output), work)
            said.append(f"{name}, {chains} sums of a warp: {best / 1e12:.0f} TFLOP/s, "
                        f"{mean / 1e12:.0f} on average")  # fmt: skip
    return "mma.sync of zeros: " + "; ".join(said)


@probe("queues")
def queues(context):
    """Do two kernels, or a kernel and a transfer, run side by side?"""
    kernel = context.build(source_of("plain.cl")).kernel("spin")
    outputs, count = [context.buffer(256) for _ in range(2)], 1 << 10
    factor = c.c_float(0.5)
    while context.seconds(kernel, 64, 64, outputs[0], c.c_uint(count), factor) < 5e-3:
        count *= 2
    one, other = context.make_queue(), context.make_queue()
    try:
        both = context.make_queue(OUT_OF_ORDER)
    except Error:
        both = None
    data, large = bytes(32 * MIB), context.buffer(32 * MIB)

    def spin(queue, output):
        context.launch(kernel, 64, 64, output, queue=queue)
        context.call("clFlush", queue)

    def time_of(*launches):
        def call():
            for queue, output in launches:
                if output is None:
                    context.write(large, data, queue=queue)
                else:
                    spin(queue, output)
            for queue, _ in launches:
                context.finish(queue)

        return shortest(call, 4)[0] * 1e3

    a, b = outputs
    said = {"one kernel": time_of((one, a)), "two in a queue": time_of((one, a), (one, b)),
            "in two queues": time_of((one, a), (other, b)), "a transfer": time_of((other, None)),
            "a kernel beside it": time_of((one, a), (other, None))}  # fmt: skip
    if both:
        said["in a queue out of order"] = time_of((both, a), (both, b))
    return "; ".join(f"{words} {ms:.1f} ms" for words, ms in said.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("file")
    parser.add_argument("names", nargs="+", choices=list(PROBES), metavar="PROBE")
    arguments = parser.parse_args()
    context = Context(arguments.device)
    items.work("probes", arguments.file, arguments.names,
               lambda name: ("passed", PROBES[name](context)))  # fmt: skip


if __name__ == "__main__":
    main()
