# SPDX-License-Identifier: MIT
"""Barriers of some warps in tools/ptx: what is handed over, what the machine refuses."""

import numpy as np
import pytest
import test_ptx_machine
from ptx.machine import Refused

# Two warps. The first one writes 16 bytes of local memory for each work-item, and the second one
# reads them.
BODY = """
    cvt.u32.u64 %r20, %rd5;
    and.b32 %r21, %r2, 15;
    mul.wide.u32 %rd9, %r21, 16;
    add.s64 %rd9, %rd0, %rd9;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared.b64 [%r20+1024], 32;
    {started}
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra SECOND;
    {write}
    bra DONE;
SECOND:
    {read}
DONE:
"""
NUMBERS = test_ptx_machine.NUMBERS

STARTED = "bar.sync 0;"
STORE = "st.shared.u32 [%r3], %r1;"
COPY = "cp.async.cg.shared.global [%r3], [%rd9], 16;"
LOAD = "ld.shared.u32 %r0, [%r3+-512];"
ARRIVE = "mbarrier.arrive.shared.b64 %rd10, [%r20+1024];"
COPIED = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20+1024];"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p3, [%r20+1024], 0;"
AT_ONCE = "mbarrier.try_wait.parity.shared.b64 %p3, [%r20+1024], 1;"
CAME, COME = "bar.arrive 1, 64;", "bar.sync 1, 64;"


def run(write, read, started=STARTED):
    return test_ptx_machine.run(BODY.format(write=write, read=read, started=started), NUMBERS)


@pytest.mark.parametrize(("write", "read", "numbers"), [
    (STORE + ARRIVE, WAIT + LOAD, NUMBERS[:32]),
    (COPY + COPIED, WAIT + LOAD, NUMBERS[:32] % 16 * 4),
    (STORE + CAME, COME + LOAD, NUMBERS[:32]),
    (STORE + COME, COME + LOAD, NUMBERS[:32]),
    # The first warp writes again when the second one has read.
    (STORE + CAME + "bar.sync 2, 64;" + STORE, COME + LOAD + "bar.arrive 2, 64;", NUMBERS[:32]),
    # A copy that another barrier waits for has come, too, when a later one has.
    (COPY + CAME + COPIED, COME + WAIT + LOAD, NUMBERS[:32] % 16 * 4),
])  # fmt: skip
def test_handing_over(write, read, numbers):
    got = run(write, read)
    np.testing.assert_array_equal(got[32:], numbers)
    assert (got[:32] == 7).all()


@pytest.mark.parametrize(("write", "read", "says"), [
    # The second warp comes first here.
    (STORE + ARRIVE, LOAD, "never written"),
    (STORE + ARRIVE, AT_ONCE + LOAD, "never written"),
    (ARRIVE + STORE, WAIT + LOAD, "race"),
    (STORE, WAIT + LOAD, r"all warps wait.*warps \[1\] at line"),
    (ARRIVE + ARRIVE + WAIT, WAIT, "all warps wait"),  # two phases have ended
    ("setp.lt.u32 %p4, %r2, 16; @%p4 " + ARRIVE, WAIT, "all warps wait"),
    (COPY + CAME + COPIED, COME + LOAD, "on its way"),
    (COPY + CAME + COPIED, COME + AT_ONCE + LOAD, "on its way"),
    (COPIED + COPY, WAIT + LOAD, "on its way"),
    (COPY + CAME, COME + LOAD, "on its way"),
    (CAME + STORE, COME + LOAD, "race"),
    (STORE + CAME, "bar.sync 2, 64;" + LOAD, "all warps wait"),
    (STORE + CAME, "bar.sync 1, 96;", "waits for 96 work-items, not 64"),
    (STORE + CAME, "bar.sync 1, 48;", "no whole warps"),
    (STORE + CAME, "bar.sync 16, 64;", "no barrier 16"),
    (STORE + CAME + STORE, COME + LOAD, "race"),
    (STORE + CAME, "setp.gt.u32 %p4, %r2, 40; @%p4 bra DONE;" + COME, "lanes"),
    (STORE + ARRIVE, "mbarrier.try_wait.parity.shared.b64 %p3, [%r20+1032], 0;", "no barrier"),
])  # fmt: skip
def test_refused(write, read, says):
    with pytest.raises(Refused, match=says):
        run(write, read)


def test_a_start_that_nobody_waits_for():
    with pytest.raises(Refused, match="race"):
        run(STORE + ARRIVE, WAIT + LOAD, "")


BOUNDS = ".reqntid 256, 1, 1\n.minnctapersm 1\n"
LESS, MORE = "setmaxnreg.dec.sync.aligned.u32 {};", "setmaxnreg.inc.sync.aligned.u32 {};"


@pytest.mark.parametrize(("first", "second", "bounds", "says"), [
    (LESS.format(24), MORE.format(256), BOUNDS, None),
    (LESS.format(240), MORE.format(256), BOUNDS, None),
    ("", MORE.format(256), BOUNDS, "all warps wait"),
    (LESS.format(248), MORE.format(256), BOUNDS, "all warps wait"),
    (LESS.format(20), "", BOUNDS, "a multiple of 8"),
    (LESS.format(100), "", BOUNDS, "a multiple of 8"),
    (MORE.format(240), "", BOUNDS, "where warps have"),
    ("setp.gt.u32 %p4, %r2, 31; @%p4 bra DONE;" + LESS.format(24), "", BOUNDS, "all warps wait"),
    (LESS.format(24), MORE.format(256), "", "nothing says"),
])  # fmt: skip
def test_registers(monkeypatch, first, second, bounds, says):
    """Two groups of four warps, which begin with 248 registers of a work-item."""
    text = test_ptx_machine.TEXT.replace("k_1)\n{{", f"k_1)\n{bounds}{{{{")
    monkeypatch.setattr(test_ptx_machine, "TEXT", text.replace("1040", "4112"))
    body = f"setp.ge.u32 %p2, %r2, 128; @%p2 bra SECOND; {first} bra DONE; SECOND: {second} DONE:"

    def launch():
        return test_ptx_machine.run(body, np.arange(256, dtype=np.uint32))

    if says is None:
        assert (launch() == 7).all()
        return
    with pytest.raises(Refused, match=says):
        launch()
