# SPDX-License-Identifier: MIT
"""tools/ptx_read.py: what it finds in the text of PTX; and PTX of a driver, which tests execute."""

import json
import re
import sys

import ptx_read
import pytest
from machine_code import nvidia, table
from ptx.device import given_texts, title
from ptx.program import Refused
from support.processes import ROOT, TESTS, run
from support.ptx_device import programs_or_skip, run_on_machine

TEXT = """
.version 7.0
.target sm_80
.address_size 64
.entry k(.param .u64 k_0, .param .u32 k_1)
{{
    .reg .pred %p<9>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<20>;
    .local .align 4 .b8 own[16];
    .shared .align 16 .b8 memory[1024];
    ld.param.u64 %rd1, [k_0];
    ld.param.u32 %r1, [k_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    setp.lt.u32 %p1, %r2, %r1;
    setp.lt.u32 %p2, %r3, %r1;
    shr.u32 %r4, %r2, 5;
    setp.lt.u32 %p3, %r4, %r1;
    and.b32 %r5, %r2, -32;
    {body}
    ret;
}}
"""
BARRIER = "bar.sync 0;"
VOTE = "vote.sync.any.pred %p4, %p1, 0xffffffff;"

# The body of a kernel, and the instructions that some come to without the others.
BODIES = {
    "for all": (f"{BARRIER} {VOTE}", []),
    "by the group's number": (f"@%p2 bra A; {BARRIER} A:", []),
    "by the work-item's number": (f"@%p1 bra A; {BARRIER} A:", ["bar"]),
    "behind the place where ways meet": (f"@%p1 bra A; add.u32 %r9, %r9, 1; A: {BARRIER}", []),
    "by the warp's number, a vote": (f"@%p3 bra A; {VOTE} A:", []),
    "by the warp's number, a barrier": (f"@%p3 bra A; {BARRIER} A:", ["bar"]),
    "by the number of a warp's first": (f"setp.lt.u32 %p5, %r5, %r1; @%p5 bra A; {VOTE} A:", []),
    "by 16 times the warp's number": (
        f"shr.u32 %r9, %r2, 1; and.b32 %r10, %r9, 2147483632; setp.lt.u32 %p5, %r10, %r1;"
        f"@%p5 bra A; {VOTE} A:", []),
    "by 8 times the number of half a warp": (
        f"shr.u32 %r9, %r2, 1; and.b32 %r10, %r9, 2147483640; setp.lt.u32 %p5, %r10, %r1;"
        f"@%p5 bra A; {VOTE} A:", ["vote"]),
    "guarded": (f"@%p1 {VOTE}", ["vote"]),
    "after an early return": (f"@%p1 ret; {BARRIER}", ["bar"]),
    "after a vote, by registers of a block": (
        f"{{ .reg .pred q; vote.sync.any.pred q, %p1, 0xffffffff; selp.u32 %r9, 1, 0, q; }}"
        f"setp.eq.u32 %p5, %r9, 0; @%p5 bra A; {VOTE} A: @%p5 bra B; {BARRIER} B:", ["bar"]),
    "after a vote": (f"{VOTE} @%p4 bra A; {VOTE} A:", []),
    "after a vote, a barrier": (f"{VOTE} @%p4 bra A; {BARRIER} A:", ["bar"]),
    "after a vote of the group, a barrier": (
        f"bar.red.or.pred %p4, 0, %p1; @%p4 bra A; {BARRIER} A:", []),
    "a vote of the group, by the warp's number": (
        "@%p3 bra A; bar.red.or.pred %p4, 0, %p1; A:", ["bar"]),
    "a loop whose count differs": (
        f"A: add.u32 %r9, %r9, 1; {BARRIER} setp.lt.u32 %p5, %r9, %r2; @%p5 bra A;", ["bar"]),
    "a loop whose count is the same": (
        f"A: add.u32 %r9, %r9, 1; {BARRIER} setp.lt.u32 %p5, %r9, %r1; @%p5 bra A;", []),
    "a number that ways decide": (
        f"mov.u32 %r9, 0; @%p1 bra A; mov.u32 %r9, 1; A: setp.eq.u32 %p5, %r9, 0; @%p5 bra B;"
        f"{VOTE} B:", ["vote"]),
    "a register that is used again": (
        f"mov.u32 %r9, %r2; st.global.u32 [%rd1], %r9; mov.u32 %r9, %r1;"
        f"setp.eq.u32 %p5, %r9, 0; @%p5 bra A; {BARRIER} A:", []),
    "a number from memory": (
        f"ld.global.u32 %r9, [%rd1]; setp.eq.u32 %p5, %r9, 0; @%p5 bra A; {BARRIER} A:", []),
    "a number from the stack": (
        f"ld.local.u32 %r9, [own]; setp.eq.u32 %p5, %r9, 0; @%p5 bra A; {BARRIER} A:", ["bar"]),
    "a number of each work-item from memory": (
        "mul.wide.u32 %rd2, %r2, 4; add.s64 %rd2, %rd1, %rd2; ld.global.u32 %r9, [%rd2];"
        f"setp.eq.u32 %p5, %r9, 0; @%p5 bra A; {BARRIER} A:", ["bar"]),
}  # fmt: skip


@pytest.mark.parametrize(("body", "found"), BODIES.values(), ids=BODIES)
def test_divergence(body, found):
    report = ptx_read.read(TEXT.format(body=body), "k")
    assert [text.split()[-2 if text.startswith("@") else 0] for _, text, _ in report.divergent] or (
        not found
    )
    names = [re.sub(r"^@\S+ ", "", text).partition(".")[0] for _, text, _ in report.divergent]
    assert names == found
    assert report.is_fine == (not found)


@pytest.mark.parametrize(("body", "count"), [
    ("st.local.u32 [own], %r1;", 1),
    ("mov.u32 %r9, %r1; mov.u64 %rd5, own; cvta.local.u64 %rd6, %rd5; st.u32 [%rd6+4], %r9;", 1),
    ("st.local.u32 [own], %r2;", 0),
    ("st.global.u32 [%rd1], %r1;", 0),
    ("add.u32 %r9, %r1, %r2; st.local.u32 [own], %r9;", 0),
])  # fmt: skip
def test_copies_of_parameters(body, count):
    report = ptx_read.read(TEXT.format(body=body), "k")
    assert (len(report.copied), report.stack) == (count, 16)


def test_a_text_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.ptx"
    path.write_text(".func f() { ret; } " + TEXT.format(body=""))
    monkeypatch.setattr(sys, "argv", ["ptx_read.py", str(path)])
    assert ptx_read.main() == 2
    assert "a.ptx: not read: Refused('functions" in capsys.readouterr().out
    with pytest.raises(Refused):
        ptx_read.read(path.read_text(), "k")


@pytest.fixture(scope="module")
def programs():
    return programs_or_skip()


INDEXED = """
typedef struct { int n[8]; } numbers;
__kernel void
indexed(numbers given, __global int *x, int i)
{
    given.n[i & 7] = x[1];
    x[get_global_id(0)] = given.n[x[0] & 7];
}
"""


def test_clang_copies_a_struct_that_is_changed(programs, tmp_path, capsys, monkeypatch):
    kernel, ptx = tmp_path / "k.cl", tmp_path / "k.ptx"
    kernel.write_text(INDEXED)
    nvidia.to_ptx(programs, kernel, (), ptx)
    monkeypatch.setattr(sys, "argv", ["ptx_read.py", str(ptx)])
    assert ptx_read.main() == 1
    assert "stores of parameters to the stack" in capsys.readouterr().out


def test_kernels_for_matrix_units(programs, capsys, monkeypatch):
    """They come to each operation together, and their parameters stay where they are."""
    rows = [row for row in table.NVIDIA if "mma" in row[0]]
    monkeypatch.setattr(ptx_read.table, "NVIDIA", rows[::8])
    monkeypatch.setattr(sys, "argv", ["ptx_read.py", "--kernels"])
    status, said = ptx_read.main(), capsys.readouterr().out
    assert (status, said.count("fine: attention/")) == (0, len(rows[::8])), said


def test_a_branch_of_lanes_in_a_kernel_is_found(programs, tmp_path):
    ptx = tmp_path / "kernel.ptx"
    options = table.with_macros(ROOT / "kernels/attention/mma.cl", ["-DHEAD_E=64"])
    nvidia.to_ptx(programs, ROOT / "kernels/attention/mma.cl", options, ptx)
    text = ptx.read_text()
    branch = "{ .reg .pred q; setp.lt.u32 q, %laneid, 16; @q bra L; } "
    spoilt = re.sub(r"(shfl\.sync.*;)", branch + r"\1 L: ", text, count=1)
    report = ptx_read.read(spoilt, "attention_mma")
    assert [entry[1].partition(".")[0] for entry in report.divergent] == ["shfl"]
    assert ptx_read.read(text, "attention_mma").is_fine


def test_ptx_of_a_driver_is_executed(programs, library, tmp_path, monkeypatch):
    """CLATTN_PTX names its folder. Other programs are clang's."""
    listed = [sys.executable, TESTS / "ptx" / "list_programs.py"]
    done = run(list(map(str, listed)), timeout=60, check_exit=True, env=None, cwd=None)
    tiled = re.compile(r"attention_tiled ARRAYS=0 DTYPE=3 .* MI=4 .* OPTIONS=0 ")
    name = next(filter(tiled.match, json.loads(done.stdout)))
    code = """
from clattn import _core
try:
    check_attention(*qkv((1, 1), 40, 50, 64), is_causal=True, return_lse=True, device=device)
except Exception as error:
    print(machine.refusal)
_core.force("decode_gpu")
check_attention(*qkv((1, 1), 3, 20, 64), return_lse=True, device=device)
print("right")
"""
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "00.ptx").write_text(f"// {name}\n.version 7.0\n")
    monkeypatch.setenv("CLATTN_PTX", str(folder))
    said = run_on_machine(library, code, kernel="tiled").stdout
    assert "there is no kernel attention_tiled" in said and said.endswith("right\n")
    assert given_texts(folder).keys() == {title("attention_tiled", name.split()[1:])}
