# SPDX-License-Identifier: MIT
"""machine.py: what instructions compute, by the PTX ISA, and what the machine refuses."""

import numpy as np
import pytest
from ptx.machine import Machine, Refused
from references.attention import bfloat16

# Each work-item has its number of x in %r1 and %f1, its 16 bytes of local memory at %r3, and
# leaves %r0 in y.
TEXT = """
.version 7.0
.target sm_80
.address_size 64
.entry k(.param .u64 .ptr .global .align 4 k_0, .param .u64 .ptr .global .align 4 k_1)
{{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<40>;
    .reg .f32 %f<20>;
    .reg .b64 %rd<20>;
    .local .align 4 .b8 own[16];
    .shared .align 16 .b8 memory[1040];
    ld.param.u64 %rd0, [k_0];
    ld.param.u64 %rd1, [k_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r9, %ctaid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
    ld.global.u32 %r1, [%rd3];
    mov.b32 %f1, %r1;
    mov.u64 %rd5, memory;
    cvt.u32.u64 %r3, %rd5;
    mad.lo.s32 %r3, %r2, 16, %r3;
    mov.u32 %r0, 7;
    {body}
    st.global.u32 [%rd4], %r0;
    ret;
}}
"""


def run(body, x, groups=1):
    """Returns what the body leaves in %r0 of each work-item. There are as many as numbers."""
    machine = Machine(TEXT.format(body=body), "k", len(x))
    y = np.zeros(4 * len(x), np.uint8)
    x = np.ascontiguousarray(x)
    machine.launch(groups, [(x.view(np.uint8), x.ctypes.data), (y, y.ctypes.data)])
    return y.view(np.uint32)


NUMBERS = np.arange(64, dtype=np.uint32)


# --- arithmetic -----------------------------------------------------------------------

INTEGERS = np.array([0, 1, 7, 100, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 7], np.uint32)
SIGNED = INTEGERS.view(np.int32).astype(np.int64)
WIDE = INTEGERS.astype(np.int64)

OF_INTEGERS = {
    "add.s32 %r0, %r1, -5;": SIGNED - 5,
    "sub.s32 %r0, 3, %r1;": 3 - SIGNED,
    "mul.lo.s32 %r0, %r1, 1000001;": SIGNED * 1000001,
    "mul.hi.s32 %r0, %r1, 1717986919;": SIGNED * 1717986919 >> 32,
    "mad.lo.s32 %r0, %r1, -80, %r1;": SIGNED * -79,
    "div.s32 %r0, %r1, 7;": np.trunc(SIGNED / 7).astype("i8"),
    "rem.s32 %r0, %r1, 7;": np.fmod(SIGNED, 7),
    "div.u32 %r0, %r1, 7;": WIDE // 7,
    "rem.u32 %r0, %r1, 7;": WIDE % 7,
    "min.s32 %r0, %r1, 5;": np.minimum(SIGNED, 5),
    "max.u32 %r0, %r1, 5;": np.maximum(WIDE, 5),
    "neg.s32 %r0, %r1;": -SIGNED,
    "not.b32 %r0, %r1;": ~WIDE,
    "xor.b32 %r0, %r1, 0x1ff;": WIDE ^ 0x1FF,
    "popc.b32 %r0, %r1;": np.bitwise_count(INTEGERS),
    "cvt.s64.s32 %rd9, %r1; popc.b64 %r0, %rd9;": np.bitwise_count(SIGNED.view("u8")),
    "shl.b32 %r0, %r1, 3;": WIDE << 3,
    "shl.b32 %r0, %r1, 32;": WIDE * 0,
    "shr.u32 %r0, %r1, 3;": WIDE >> 3,
    "shr.s32 %r0, %r1, 3;": SIGNED >> 3,
    "shr.s32 %r0, %r1, 40;": SIGNED >> 31,
    "bfe.u32 %r0, %r1, 3, 5;": WIDE >> 3 & 31,
    "bfe.s32 %r0, %r1, 29, 3;": SIGNED >> 29,
    "mul.wide.s32 %rd9, %r1, -3; shr.u64 %rd9, %rd9, 16; cvt.u32.u64 %r0, %rd9;": SIGNED * -3 >> 16,
    "cvt.s64.s32 %rd9, %r1; shr.s64 %rd9, %rd9, 33; cvt.u32.u64 %r0, %rd9;": SIGNED >> 33,
    "cvt.s64.s32 %rd9, %r1; mov.u32 %r9, 7; shr.s64 %rd9, %rd9, %r9; cvt.u32.u64 %r0, %rd9;": SIGNED
    >> 7,
    "cvt.u16.u32 %h1, %r1; cvt.s32.s8 %r0, %h1;": INTEGERS.astype("u1").view("i1").astype("i8"),
    "setp.lt.s32 %p1, %r1, 7; selp.b32 %r0, 1, 0, %p1;": SIGNED < 7,
    "setp.lt.u32 %p1, %r1, 7; not.pred %p1, %p1; selp.b32 %r0, 1, 0, %p1;": WIDE >= 7,
    "setp.gt.u32 %p1, %r1, 7; @!%p1 bra L; mov.u32 %r0, 9; L:": np.where(WIDE > 7, 9, 7),
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r0, {%h2, %h1};": WIDE >> 16 | WIDE << 16,
    "cvt.rn.f32.s32 %f2, %r1; mov.b32 %r0, %f2;": SIGNED.astype("f4").view("u4"),
    "mov.u64 %rd9, own; cvta.local.u64 %rd8, %rd9; cvta.to.local.u64 %rd9, %rd8;"
    "st.local.u32 [%rd9+4], %r1; ld.u32 %r0, [%rd8+4];": WIDE,
    "st.u32 [%rd4], %r1; ld.u32 %r0, [%rd4];": WIDE,
    "setp.gt.u32 %p1, %r1, 7; @%p1 mov.u32 %r0, 9;": np.where(WIDE > 7, 9, 7),
}


@pytest.mark.parametrize("body", OF_INTEGERS)
def test_integers(body):
    np.testing.assert_array_equal(
        run(body, INTEGERS), OF_INTEGERS[body].astype("i8").astype("u4"), body
    )


NAN = np.float32(np.nan)
FLOATS = np.array([0, -0.0, 1, -2.5, 3.5, 1e30, -np.inf, 1e-40, 1 / 3, 65520, 1e-8, NAN], "f4")

with np.errstate(all="ignore"):
    OF_FLOATS = {
        "add.rn.f32 %f2, %f1, 0f3F800000;": FLOATS + np.float32(1),
        "mul.rn.f32 %f2, %f1, %f1;": FLOATS * FLOATS,
        "div.rn.f32 %f2, %f1, 0f40400000;": FLOATS / np.float32(3),
        "rcp.rn.f32 %f2, %f1;": np.float32(1) / FLOATS,
        "neg.f32 %f2, %f1;": -FLOATS,
        "abs.f32 %f2, %f1;": np.abs(FLOATS),
        "max.f32 %f2, %f1, 0f3F800000;": np.where(FLOATS > 1, FLOATS, np.float32(1)),
        "max.NaN.f32 %f2, %f1, 0f3F800000;": np.where(
            np.isnan(FLOATS), NAN, np.where(FLOATS > 1, FLOATS, np.float32(1))
        ),
        "fma.rn.f32 %f2, %f1, %f1, %f1;": (
            FLOATS.astype("f8") * FLOATS + FLOATS.astype("f8")
        ).astype("f4"),
        "cvt.rni.f32.f32 %f2, %f1;": np.rint(FLOATS),
        "cvt.rn.f16.f32 %h1, %f1; cvt.f32.f16 %f2, %h1;": FLOATS.astype("f2").astype("f4"),
        "cvt.rn.f16x2.f32 %r5, 0f3F800000, %f1; mov.b32 {%h1, %h2}, %r5; cvt.f32.f16 %f2, %h1;":
            FLOATS.astype("f2").astype("f4"),
        "cvt.rn.bf16x2.f32 %r5, %f1, 0f3F800000; and.b32 %r6, %r5, 0xffff0000; mov.b32 %f2, %r6;":
            FLOATS.astype(bfloat16).astype("f4"),
    }  # fmt: skip


@pytest.mark.parametrize("body", OF_FLOATS)
def test_floats(body):
    got = run(body + "mov.b32 %r0, %f2;", FLOATS).view("f4")
    np.testing.assert_array_equal(got, OF_FLOATS[body], body)


def test_powers_of_two():
    """To two units of the last place. Results below the smallest normal number are 0."""
    x = np.array([-200, -126.5, -125.9, -3.7, -1e-40, 0, 0.3, 1, 127, 128, np.inf, NAN], "f4")
    got = run("ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r0, %f2;", x).view("f4")
    with np.errstate(over="ignore"):
        right = np.where(x < -126, np.float32(0), np.exp2(x))
    np.testing.assert_allclose(got, right, rtol=1.25 * 2.0**-22)
    np.testing.assert_array_equal(got[4:6], 1)


COMPARED = {
    "eq": [0, 1, 0, 0], "ne": [1, 0, 1, 0], "lt": [1, 0, 0, 0], "ge": [0, 1, 1, 0],
    "equ": [0, 1, 0, 1], "neu": [1, 0, 1, 1], "leu": [1, 1, 0, 1], "gtu": [0, 0, 1, 1],
    "num": [1, 1, 1, 0], "nan": [0, 0, 0, 1],
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_comparisons(name):
    """With a smaller number, an equal one, a larger one, and NaN."""
    x = np.array([1, 2, 3, np.nan], "f4")
    body = f"setp.{name}.f32 %p1, %f1, 0f40000000; selp.u32 %r0, 1, 0, %p1;"
    np.testing.assert_array_equal(run(body, x), COMPARED[name])


def test_to_integers():
    x = np.array([-1.5, 2.9, 1e20, -1e20, np.nan, 2.0**31], "f4")
    right = [-1, 2, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    got = run("cvt.rzi.s32.f32 %r0, %f1;", x).view("i4")
    np.testing.assert_array_equal(got, right)


def test_branches_meet_again():
    """After loops of different lengths the warp is whole, as the shuffle requires."""
    body = """
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
    A: setp.ge.u32 %p1, %r5, %r2;
    @%p1 bra C;
    and.b32 %r7, %r5, 1;
    setp.eq.s32 %p2, %r7, 0;
    @%p2 bra B;
    add.s32 %r6, %r6, %r5;
    B: add.s32 %r5, %r5, 1;
    bra.uni A;
    C: shfl.sync.bfly.b32 %r0, %r6, 1, 31, 0xffffffff;
    """
    sums = np.array([sum(range(1, n, 2)) for n in range(64)])
    np.testing.assert_array_equal(run(body, NUMBERS), sums.reshape(-1, 2)[:, ::-1].ravel())


# --- warps ----------------------------------------------------------------------------

# Local memory is four matrices of 8 x 8, whose numbers count from 0.
PAIR = """
    add.s32 %r6, %r5, 1;
    cvt.rn.f32.s32 %f2, %r5;
    cvt.rn.f32.s32 %f3, %r6;
    cvt.rn.f16x2.f32 %r7, %f3, %f2;
    st.shared.u32 [%r3+{at}], %r7;
    add.s32 %r5, %r5, 2;
"""
LOAD = """
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r3];
"""
MATRICES = "shl.b32 %r5, %r2, 3;" + "".join(PAIR.format(at=at) for at in (0, 4, 8, 12)) + LOAD


@pytest.mark.parametrize("n", range(4))
def test_matrices_are_loaded(n):
    """Lane 13 has columns 2 and 3 of row 3 of each matrix; transposed, rows 2 and 3 of column 3."""
    for trans, right in (("", [26, 27]), (".trans", [19, 27])):
        body = MATRICES.format(trans=trans) + f"mov.b32 %r0, %r{10 + n};"
        words = run(body, NUMBERS[:32])
        np.testing.assert_array_equal(words[13:14].view("f2"), np.array(right) + 64 * n)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products(kind):
    """One number in A and one in B, at places that the ISA's figures give: row 3 of A, column 5
    of B, the sum over their column and row 10. Lane 13 has it of A in the lower half of its third
    register, and lane 21 of B in its second one, the result is lane 14's second number."""
    one = {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    body = f"""
    mov.u32 %r10, 0;
    setp.eq.s32 %p1, %r2, 13;
    selp.b32 %r12, {one}, 0, %p1;
    setp.eq.s32 %p1, %r2, 21;
    selp.b32 %r15, {one}, 0, %p1;
    mov.f32 %f2, 0f3F000000;
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f4, %f5, %f6, %f7}},
        {{%r10, %r10, %r12, %r10}}, {{%r10, %r15}}, {{%f2, %f2, %f2, %f2}};
    """
    for n in range(4):
        got = run(body + f"mov.b32 %r0, %f{4 + n};", NUMBERS[:32]).view("f4")
        right = np.full(32, 0.5, "f4")
        right[14] += n == 1
        np.testing.assert_array_equal(got, right)


def test_votes():
    body = """setp.eq.s32 %p1, %r2, 40;
    { .reg .pred p; vote.sync.any.pred p, %p1, 0xffffffff; selp.u32 %r0, 1, 0, p; }"""
    np.testing.assert_array_equal(run(body, NUMBERS), NUMBERS >= 32)


@pytest.mark.parametrize("voter", [40, 1000])
def test_votes_of_a_work_group(voter):
    body = f"""setp.eq.s32 %p1, %r2, {voter};
    {{ .reg .pred p; bar.red.or.pred p, 0, %p1; selp.u32 %r0, 1, 0, p; }}"""
    np.testing.assert_array_equal(run(body, NUMBERS), voter < len(NUMBERS))


COPY = """
    mul.wide.u32 %rd6, %r2, 16;
    add.s64 %rd7, %rd0, %rd6;
    setp.lt.u32 %p3, %r2, 16;
    selp.u32 %r8, 16, 0, %p3;
    selp.b64 %rd7, %rd7, 0, %p3;
    cp.async.cg.shared.global [%r3], [%rd7], 16, %r8;
    cp.async.commit_group;
"""
WAIT = "cp.async.wait_group 0;"


def test_copies():
    """A copy of 0 bytes writes zeros."""
    got = run(COPY + WAIT + "ld.shared.u32 %r0, [%r3+8];", NUMBERS)
    np.testing.assert_array_equal(got, np.where(NUMBERS < 16, 4 * NUMBERS + 2, 0))


# --- what is refused ------------------------------------------------------------------

OTHER = "xor.b32 %r4, %r2, 32; shl.b32 %r4, %r4, 4; add.s32 %r4, %r4, 1024;"  # another warp's
WRITE, READ = "st.shared.u32 [%r3], %r2;", "ld.shared.u32 %r0, [%r3];"
READ_OTHER, WRITE_OTHER = "ld.shared.u32 %r0, [%r4];", "st.shared.u32 [%r4], %r2;"
BARRIER = "bar.sync 0;"
FEW = "setp.lt.u32 %p1, %r2, {}; @%p1 bra L;"

REFUSED = {
    "reads beyond a buffer": ("ld.global.u32 %r0, [%rd3+4];", "out of bounds: 4 bytes at 0x100"),
    "reads before a buffer": ("ld.global.u32 %r0, [%rd3+-4];", "no buffer|out of bounds"),
    "reads no buffer": ("mov.u64 %rd9, 0; ld.global.u32 %r0, [%rd9];", "no buffer is at 0x0"),
    "beyond local memory": ("st.shared.u32 [%r3+1024], %r0;", "out of bounds"),
    "beyond its own memory": ("mov.u64 %rd9, own; ld.local.u32 %r0, [%rd9+16];", "out of bounds"),
    "misaligned": ("ld.global.u32 %r0, [%rd0+2];", "misaligned"),
    "misaligned vector": ("ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3+8];", "misaligned"),
    "nobody has written": (READ, "byte 0 of local memory is read and was never written"),
    "reads what another warp writes": (OTHER + WRITE + READ_OTHER, "a race: another warp or group"),
    "writes what another warp reads": (
        OTHER + WRITE + BARRIER + READ + WRITE_OTHER, "another warp has read before this writes"),
    "writes what another warp writes": (OTHER + WRITE + WRITE_OTHER, "another warp or group"),
    "all write": ("st.shared.u32 [memory], %r2;", "two warps write at once"),
    "writes what another warp writes to a buffer": (
        "st.global.u32 [%rd1], %r2; ", "two warps write at once"),
    "reads a copy before it is there": (COPY + READ, "a copy is on its way when this reads"),
    "writes before a copy is there": (COPY + WRITE, "a copy is on its way when this writes"),
    "reads another warp's copy": (COPY + WAIT + OTHER + READ_OTHER, "another warp or group"),
    "copies what another warp reads": (
        OTHER + WRITE + BARRIER + READ_OTHER + COPY, "another warp has read before this writes"),
    "waits for too few": (COPY + "cp.async.wait_group 1;" + READ, "a copy is on its way"),
    "copies a part": (COPY.replace("16, 0", "8, 0"), "a copy of a part"),
    "ends before a barrier": (FEW.format(32) + BARRIER + "L:", "some work-items have ended"),
    "a part of a warp at a barrier": (FEW.format(9) + BARRIER + "L:", "of warp 0 execute it"),
    "two barriers": (FEW.format(32) + BARRIER + "bra.uni M; L:" + BARRIER + "M:", "different"),
    "a part of a warp": (
        FEW.format(9) + "shfl.sync.bfly.b32 %r0, %r1, 1, 31, 0xffffffff; L:", "execute it, not"),
    "lanes that are not named": ("shfl.sync.bfly.b32 %r0, %r1, 1, 31, 0xffff;", "execute it, not"),
    "a product of a part of a warp": (
        FEW.format(40) + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f4, %f5, %f6, %f7},"
        "{%r4, %r4, %r4, %r4}, {%r4, %r4}, {%f4, %f4, %f4, %f4}; L:", "of warp 1 execute it"),
    "division by zero": ("div.u32 %r0, %r1, 0;", "a division by zero"),
    "runs for ever": ("L: bra.uni L;", "does not come to an end"),
    "not known": ("clz.b32 %r0, %r1;", "the instruction clz.b32 is not known here"),
    "not known of a known name": ("add.sat.s32 %r0, %r1, 1;", "add.sat.s32 is not known here"),
    "a register of another type": ("add.s32 %rd9, %r1, 1;", "is no register of s32"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(body, words, monkeypatch):
    monkeypatch.setattr("ptx.machine.MOST_BLOCKS", 100)
    with pytest.raises(Refused, match=words):
        run(body, NUMBERS)


def test_groups_do_not_touch_what_others_write():
    with pytest.raises(Refused, match=r"line 28, group 1: .*another warp or group has written"):
        run("", NUMBERS, groups=2)


def test_barriers_make_it_right():
    run(OTHER + WRITE + BARRIER + READ_OTHER + BARRIER + WRITE_OTHER, NUMBERS)
    run(COPY + WAIT + BARRIER + OTHER + READ_OTHER, NUMBERS)


def test_atomics():
    """By all warps at once, and by work-items of a warp one after the other."""
    body = """
    mov.u32 %r5, 0;
    setp.eq.s32 %p1, %r2, 0;
    @!%p1 bra L;
    st.shared.u32 [%r3], %r5;
    L: bar.sync 0;
    atom.shared.max.s32 %r6, [memory], %r2;
    atom.shared.or.b32 %r6, [memory], 64;
    bar.sync 0;
    ld.shared.u32 %r0, [memory];
    """
    np.testing.assert_array_equal(run(body, NUMBERS), 127)
