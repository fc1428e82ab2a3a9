# SPDX-License-Identifier: MIT
"""clattn.mpi: rings of processes that mpirun starts, and the layouts without any process."""

import re
import shutil
import subprocess
import sys

import clattn
import numpy as np
import pytest
import simulate_ring
from clattn._arguments.operands import Operands
from clattn._parts import sums
from clattn._parts.ring import Schedule, Share, part_lengths, pieces
from references.attention import attention, tolerance
from support.checks import assert_close
from support.data import qkv
from support.processes import ROOT, index_of, run, run_python

LAYOUTS = ["contiguous", "zigzag"]
SECONDS = 100  # a run that hangs ends


@pytest.fixture(scope="module")
def mpirun():
    """The command that starts processes, without their number."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    command = shutil.which("mpirun")
    if not command:
        pytest.skip("mpirun is not installed: apt-get install openmpi-bin")
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip(f"mpirun is not Open MPI's: {version[:40]!r}")
    return [command, "--allow-run-as-root", "--oversubscribe", "-n"]


def run_ranks(mpirun, ranks, device, *what, env=None):
    """Every case is right on every rank."""
    command = [*mpirun, str(ranks), sys.executable, "-m", "support.mpi_ranks"]
    command += [str(index_of(device)), *what]
    done = run(command, timeout=SECONDS, check_exit=True, env=env, cwd=None)
    *failed, count = done.stdout.splitlines()
    assert not failed, "\n".join(failed)
    assert int(count.split()[0]) > 10, count


@pytest.mark.by_turns
def test_every_rank_gets_its_part_of_the_single_call(device, mpirun):
    run_ranks(mpirun, 2, device, "results", "gradients")


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_any_number_of_ranks(mpirun, ranks):
    # With this level of MPI, clattn starts no thread for messages.
    env = {"MPI4PY_RC_THREAD_LEVEL": "serialized"} if ranks == 3 else None
    what = ["results"] if ranks == 4 else ["results", "gradients"]
    run_ranks(mpirun, ranks, clattn.devices()[0], *what, env=env)


def test_what_one_rank_refuses_all_refuse(mpirun):
    """Attention that fails in the middle included: no rank waits for ever."""
    run_ranks(mpirun, 3, clattn.devices()[0], "errors")


def test_the_example_of_the_page_runs(mpirun, tmp_path):
    page = (ROOT / "docs" / "mpi.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "ring.py").write_text("".join(blocks))
    command = [*mpirun, "2", sys.executable, str(tmp_path / "ring.py")]
    said = run(command, timeout=SECONDS, check_exit=True, env=None, cwd=None).stdout
    # A rank writes its line's end apart from the line, and those of two ranks may mingle.
    lines = sorted(re.findall(r"rank \d has \d+ of \d+ positions", said))
    assert lines == [f"rank {r} has 2048 of 4096 positions" for r in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [7, 10])
def test_more_ranks_than_processes(device, ranks, layout):
    """The schedule and the shares of all ranks, one after the other."""
    query, key, value = qkv(L=33, S=47)
    options = {"is_causal": "lower_right", "window": (20, None)}
    rows, keys = (pieces(part_lengths(n, ranks, layout), layout) for n in (33, 47))
    schedule = Schedule(rows, keys, *options.values())
    right = attention(query, key, value, **options)
    allowed = tolerance(query, key, value, **options)

    def taken(array, where):
        return np.concatenate([array[..., a : a + n, :] for a, n in where], axis=-2)

    for rank in range(ranks):
        own = rows.of(rank)
        given = {"is_causal": True, "window": options["window"]}
        operands = Operands(taken(query, own), key, value)
        share = Share(operands, own, schedule.band.shift, **given)
        for step in range(schedule.steps):
            there = keys.of((rank - step) % ranks)
            part = {"key": taken(key, there), "value": taken(value, there)}
            with clattn.use_device(device):
                share.attend(part, there, schedule.seen(step)[rank])
        count = sum(n for _, n in own)
        out, lse = np.zeros((2, 3, count, 8)), np.full((2, 3, count), -np.inf)
        share.write(out, lse)
        assert_close(out, taken(right[0], own), 4 * taken(allowed[0], own))
        assert_close(lse, *(taken(a[..., None], own)[..., 0] for a in (right[1], 4 * allowed[1])))


# Rows of two parts, (out, base, total) each, and the result, (out, lse).
LOW = np.finfo(np.float32).min
MERGED = {
    "both have keys": ((1, 900, 1), (2, 900, 1), (1.5, 900 + np.log(2))),
    "two keys and one": ((1, -5, 2), (4, -5, 1), (2, -5 + np.log(3))),
    "the lowest scores": ((1, LOW, 2), (4, LOW, 1), (2, LOW)),
    "far apart": ((1, LOW, 1), (4, -LOW, 1), (4, -LOW)),
    "one has keys": ((5, -900, 1), (0, -np.inf, 0), (5, -900)),
    "one has scores of -inf": ((5, -900, 1), (np.nan, -np.inf, 0), (5, -900)),
    "one has scores below all floats": ((5, -900, 1), (np.nan, LOW, 0), (5, -900)),
    "none has keys": ((0, -np.inf, 0), (0, -np.inf, 0), (0, -np.inf)),
    "a score of NaN": ((np.nan, 3, np.nan), (2, 1, 1), (np.nan, np.nan)),
    "a score of inf": ((np.nan, np.inf, np.nan), (2, 1, 1), (np.nan, np.nan)),
}


def test_parts_are_merged_in_any_order():
    for name, (first, second, (out, lse)) in MERGED.items():
        parts = [
            sums.Sums(*(np.array(x, np.float32)[None] for x in ([a], b, c)))
            for a, b, c in (first, second)
        ]
        for order in (parts, parts[::-1]):
            with np.errstate(all="raise"):
                merged = sums.finish(sums.merge(order))
            np.testing.assert_allclose(merged[0], [[out]], rtol=1e-7, err_msg=name)
            np.testing.assert_allclose(merged[1], [lse], rtol=1e-7, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_parts_are_the_whole_once(ranks, layout):
    for total in (0, 1, ranks, 2 * ranks - 1, 101):
        lengths = part_lengths(total, ranks, layout)
        assert sum(lengths) == total and max(lengths) - min(lengths) <= 1 + (layout == "zigzag")
        where = pieces(lengths, layout)
        for rank, length in enumerate(lengths):
            assert sum(n for _, n in where.of(rank)) == length
        covered = [p for rank in range(ranks) for a, n in where.of(rank) for p in range(a, a + n)]
        assert sorted(covered) == [*range(total)]
        assert layout == "zigzag" or covered == [*range(total)]


def test_zigzag_parts_are_r_and_its_mirror():
    assert pieces([5, 4, 4], "zigzag").of(0) == [(0, 3), (11, 2)]
    assert pieces([5, 4, 4], "zigzag").of(2) == [(5, 2), (7, 2)]


def causal_work(ranks, layout, total=1009):
    """Keys that each rank's rows see, in each step: (steps, ranks)."""
    where = pieces(part_lengths(total, ranks, layout), layout)
    schedule = Schedule(where, where, True)

    def count(rows, keys):
        (row, length), (key, width) = rows, keys
        return np.clip(np.arange(row, row + length) + 1 - key, 0, width).sum()

    work = np.zeros((ranks, ranks))
    for step in range(schedule.steps):
        seen = schedule.seen(step)
        for rank in range(ranks):
            for r, rows in enumerate(where.of(rank)):
                for k, keys in enumerate(where.of((rank - step) % ranks)):
                    pairs = count(rows, keys)
                    assert seen[rank, r, k] == (pairs > 0)
                    work[step, rank] += pairs
        np.testing.assert_array_equal(simulate_ring.pairs(schedule, step, True), work[step])
    assert work.sum() == total * (total + 1) // 2
    return work


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zigzag_gives_all_ranks_the_same_causal_work(ranks):
    """Within 5 %, in all steps together and in each."""
    for work in (causal_work(ranks, "zigzag").sum(0), *causal_work(ranks, "zigzag")):
        assert work.max() <= 1.05 * work.min()


def test_contiguous_causal_work_is_uneven():
    work = causal_work(4, "contiguous").sum(0)
    assert work.max() > 6 * work.min()


def test_zigzag_is_faster_in_the_simulation():
    """At least 1.5 times with 4 ranks; on a slow network both layouts wait for it."""
    for network, least, most in ((10, 1.5, 2), (1e-5, 1, 1.1)):
        options = simulate_ring.parse(["--network", str(network)])
        rows = {layout: simulate_ring.simulate(4, layout, options) for layout in LAYOUTS}
        assert rows["zigzag"]["least"] >= 0.95 * rows["zigzag"]["most"]
        gain = rows["contiguous"]["seconds"] / rows["zigzag"]["seconds"]
        assert least <= gain <= most


def test_a_window_ends_the_round_early():
    where = pieces(part_lengths(800, 8, "contiguous"), "contiguous")
    assert [Schedule(where, where, True, (w, 0)).steps for w in (0, 100, 101, None)] == [1, 2, 3, 8]


def test_clattn_does_not_import_mpi():
    code = """
        import sys
        import clattn
        assert "mpi4py" not in sys.modules
        sys.modules["mpi4py"] = None
        try:
            import clattn.mpi
        except ImportError as error:
            assert 'pip install "mpi4py>=4.0"' in str(error), error
        else:
            raise AssertionError
    """
    run_python(code)


def test_an_import_starts_no_mpi():
    """Nor needs it: a page's examples and its docstrings are read in processes without ranks."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    code = """
        import mpi4py
        mpi4py.rc.initialize = False
        import clattn.mpi
        from mpi4py import MPI
        assert not MPI.Is_initialized()
    """
    run_python(code)
