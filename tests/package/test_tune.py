# SPDX-License-Identifier: MIT
"""python -m clattn tune: what wins, what is kept and used, and what is ignored.

The clock is made up: `clock` says how long a call takes with some knobs. The knobs are numbers of a
plan, so that no programs are built.
"""

import ast
import json
import math
import os
import sys
import warnings
from dataclasses import dataclass, field

import clattn
import numpy as np
import pytest
import support.tuning as tuning
from clattn import _core
from clattn._commands.main import main
from clattn._commands.tune import candidates, search
from clattn._host import tuning as host_tuning
from clattn._host.tuning import Class, Winner
from support.helpers import run, run_cli

MANY, FEW = Class("float32", 64, "many"), Class("float32", 64, "few")
BOTH = ("float32-64-many", "float32-64-few")
GUARD_ROWS = 150  # query rows of the problem that a winner must not lose


@dataclass
class Clock:
    """Times of calls, relative to the plan's rule."""

    device: object
    factors: dict = field(default_factory=dict)  # by (knob, value)
    guard: dict = field(default_factory=dict)  # where they differ on the guard problem

    def shortest(self, call, seconds, least, most):
        rows = call().shape[2]
        time = 1e-3
        for *_, knobs in _core.tuned(self.device):
            for item in knobs.items():
                time *= self.guard.get(item, 1) if rows == GUARD_ROWS else self.factors.get(item, 1)
        return time


@pytest.fixture(autouse=True)
def quick(device, tmp_path, monkeypatch):
    """Small problems, few candidates, a cache folder of one's own, nothing tuned."""
    pytest.importorskip("rich")
    if device.type != "cpu":
        pytest.skip("the candidates are those of CPUs")
    tuning.clear(device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CLATTN_TUNING", raising=False)
    shapes = {("many", True): (((1, 2, 2, 200, 90),), ((1, 2, 2, GUARD_ROWS, 90),)),
              ("few", True): (((1, 2, 2, 20, 90),), ((1, 2, 2, 30, 90),)),
              ("threshold", True): (tuple((1, 8, 2, L, 90) for L in (2, 3, 5)),
                                    ((1, 8, 1, 2, 90),))}  # fmt: skip
    monkeypatch.setattr(candidates, "_SHAPES", shapes)
    monkeypatch.setattr(candidates, "_STAGES", {"cpu": (("CHUNKS",), ("TILES",))})
    yield
    tuning.clear(device)


@pytest.fixture
def clock(device, monkeypatch):
    made_up = Clock(device)
    monkeypatch.setattr(search, "shortest", made_up.shortest)
    return made_up


def tune(device, *classes, options=()):
    return main(["tune", "--device", device.platform, "--classes", *(classes or BOTH[:1]),
                 *options])  # fmt: skip


def kept(device):
    with open(host_tuning.path_of(device)) as file:
        return json.load(file)["winners"]


def in_use(device):
    return {Class(*entry[:3]): entry[4] for entry in _core.tuned(device)}


# --- what wins -------------------------------------------------------------------------------


def test_the_fastest_wins_and_is_used(device, clock, capsys):
    """The best of each stage, together; the table has the times before and after."""
    clock.factors = {("CHUNKS", 4): 0.9, ("CHUNKS", 8): 0.8, ("TILES", 2): 0.5}
    assert tune(device) == 0
    winner = kept(device)[BOTH[0]]
    assert winner["knobs"] == {"CHUNKS": 8, "TILES": 2}
    assert winner["variant"] == "cpu"
    assert math.isclose(winner["rule_seconds"], 1e-3)
    assert math.isclose(winner["seconds"], 0.4e-3)
    assert in_use(device) == {MANY: {"CHUNKS": 8, "TILES": 2}}
    said = capsys.readouterr().out
    assert "150%" in said and "CHUNKS=8 TILES=2" in said and device.name in said
    assert "classes measured: 1; better than the rule: 1" in said


def test_a_threshold_between_variants(device, clock):
    """Several problems are timed together."""
    one = Class("float32", 64, "threshold")
    clock.factors = {("ROWS", 24): 0.9, ("ROWS", 32): 0.8}
    assert tune(device, str(one)) == 0
    assert in_use(device) == {one: {"ROWS": 32}}
    assert math.isclose(kept(device)[str(one)]["rule_seconds"], 3e-3)


@pytest.mark.parametrize(("factor", "wins"), [(0.96, True), (0.98, False), (1.5, False)])
def test_a_gain_of_less_than_three_per_cent_is_none(device, clock, factor, wins):
    """The class counts as measured, and its calls follow the rule."""
    clock.factors = {("CHUNKS", 4): factor}
    clock.factors |= {("CHUNKS", n): 2 for n in (2, 6, 8, 12)}
    assert tune(device) == 0
    assert kept(device)[BOTH[0]]["knobs"] == ({"CHUNKS": 4} if wins else {})
    assert in_use(device) == ({MANY: {"CHUNKS": 4}} if wins else {})


def test_a_winner_must_not_lose_elsewhere(device, clock, capsys):
    clock.factors, clock.guard = {("CHUNKS", 4): 0.8}, {("CHUNKS", 4): 1.1}
    assert tune(device) == 0
    assert in_use(device) == {}
    assert "slower on the" in capsys.readouterr().out


def test_a_few_lucky_rounds_are_no_win():
    assert search._is_faster([0.9] * 9)
    assert search._is_faster([0.9] * 7 + [1.2] * 2)
    assert not search._is_faster([0.9] * 6 + [1.2] * 3)
    assert not search._is_faster([0.98] * 9)


def spoil(monkeypatch, device, change, knob=("CHUNKS", 4)):
    """Calls with this knob give what `change` makes of the result."""
    attend = clattn.scaled_dot_product_attention

    def spoilt(*args, **options):
        result = attend(*args, **options)
        found = any(knob in knobs.items() for *_, knobs in _core.tuned(device))
        return change(result) if found else result

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", spoilt)


def one_wrong(result):
    result[0, 0, -2, 3] += 1e-4
    return result


def one_nan(result):
    result[0, 1, 1, 3] = np.nan
    return result


def does_not_build(result):
    raise clattn.DeviceError("attention_cpu does\nnot [/build]")


def other_bits():
    """A change in the last place, in every second call."""
    calls = []

    def change(result):
        calls.append(1)
        if len(calls) % 2:
            result[0, 0, 0, 0] = np.nextafter(result[0, 0, 0, 0], np.float32(9))
        return result

    return change


def test_what_is_wrong(device):
    """More than rounding explains, in a row that is compared with float64."""
    problems = candidates.problems_of(MANY, device)
    check = search._Check(problems.checked, device)
    check.run()
    exact, right = check._exact, check._reference
    for share, is_right in ((0.1, True), (1.5, False)):
        check._result = lambda share=share: right + np.float32(share * exact.allowed)
        if is_right:
            check.run()
            continue
        with pytest.raises(search._WrongError, match="wrong: error"):
            check.run()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (one_wrong, "wrong: error 1"),
        (one_nan, "wrong: error inf"),
        (other_bits(), "not the same bits"),
        (does_not_build, "attention_cpu does not [/build]"),
    ],
    ids=["wrong", "nan", "other-bits", "does-not-build"],
)
def test_a_wrong_candidate_is_a_row_of_the_table(
    device, clock, monkeypatch, capsys, change, reason
):
    """Though it would be the fastest; the second best wins."""
    clock.factors = {("CHUNKS", 4): 0.5, ("CHUNKS", 8): 0.8}
    spoil(monkeypatch, device, change)
    assert tune(device) == 0
    assert in_use(device) == {MANY: {"CHUNKS": 8}}
    said = " ".join(capsys.readouterr().out.split())
    assert "CHUNKS=4" in said and all(word in said for word in reason.split())


def test_a_class_whose_rule_is_wrong_has_failed(device, clock, monkeypatch, capsys):
    """The other classes are tuned, and the exit status says that something is amiss."""
    attend = clattn.scaled_dot_product_attention

    def spoilt(query, *args, **options):
        result = attend(query, *args, **options)
        return result + 0.1 if query.shape[2] == 200 else result

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", spoilt)
    assert tune(device, *BOTH) == 1
    assert list(kept(device)) == [BOTH[1]]
    assert "rule is wrong" in " ".join(capsys.readouterr().out.split())


def test_by_the_real_clock(device):
    """Times are times, whoever wins."""
    assert tune(device) == 0
    [winner] = kept(device).values()
    assert 1e-6 < winner["seconds"] <= winner["rule_seconds"] < 1


# --- resuming --------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    """The classes in the order in which they are tuned; may stop at one."""
    real = search.Tuner.tune
    seen = []

    def recording(self, one, variant):
        seen.append(str(one))
        if stop.get(str(one)):
            raise stop[str(one)]
        return real(self, one, variant)

    stop = {}
    monkeypatch.setattr(search.Tuner, "tune", recording)
    return seen, stop


@pytest.mark.parametrize(
    ("reason", "status", "says"),
    [(KeyboardInterrupt(), 130, "interrupted"), (search.OutOfTime(), 0, "stopped after")],
    ids=["interrupted", "out-of-time"],
)
def test_finished_classes_are_kept(device, clock, order, capsys, reason, status, says):
    """The next run goes on where the last one was stopped."""
    seen, stop = order
    clock.factors = {("TILES", 2): 0.5}
    stop[BOTH[1]] = reason
    assert tune(device, *BOTH) == status
    assert list(kept(device)) == [BOTH[0]]
    said = capsys.readouterr().out
    assert says in said and "classes left: 1;" in said
    stop.clear()
    seen.clear()
    assert tune(device, *BOTH) == 0
    assert seen == [BOTH[1]]
    assert set(kept(device)) == set(BOTH)
    assert in_use(device) == {MANY: {"TILES": 2}, FEW: {"TILES": 2}}
    assert tune(device, *BOTH) == 0
    assert len(seen) == 1


def test_again(device, clock, order):
    """Measures anew, and leaves what other classes have."""
    seen, _ = order
    clock.factors = {("TILES", 2): 0.5}
    assert tune(device, *BOTH) == 0
    clock.factors = {}
    assert tune(device, BOTH[0], options=["--again"]) == 0
    assert seen == [*BOTH, BOTH[0]]
    assert in_use(device) == {FEW: {"TILES": 2}}
    assert [bool(kept(device)[name]["knobs"]) for name in BOTH] == [False, True]


def test_a_stop_within_a_class(device, clock, monkeypatch):
    """The class is not finished, and calls follow the rule."""

    def shortest(*args):
        if in_use(device).get(MANY) == {"CHUNKS": 8}:
            raise KeyboardInterrupt
        return 1e-3

    monkeypatch.setattr(search, "shortest", shortest)
    assert tune(device) == 130
    assert in_use(device) == {}
    assert not os.path.exists(host_tuning.path_of(device))


def test_no_time(device, clock, capsys):
    assert tune(device, options=["--seconds", "1e-9"]) == 0
    assert in_use(device) == {}
    assert not os.path.exists(host_tuning.path_of(device))
    assert "classes left: 1;" in capsys.readouterr().out


# --- files -----------------------------------------------------------------------------------

WINNER = Winner("cpu", {"CHUNKS": 4, "TILES": 2}, 2e-3, 1e-3)
REPORT = """
import sys, warnings, clattn
from clattn import _core
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    devices = clattn.devices()
device = next(d for d in devices if d.platform == sys.argv[1])
print([str(w.message) for w in found if "tune" in str(w.message)])
print(_core.tuned(device))
"""


def report(device, **env):
    """What another process warns of, and what it has loaded of two classes."""
    done = run([sys.executable, "-c", REPORT, device.platform], timeout=100, check_exit=True,
               env={"CLATTN_TUNING": None, **env}, cwd=None)  # fmt: skip
    warned, loaded = (ast.literal_eval(line) for line in done.stdout.splitlines())
    return [warned, [entry for entry in loaded if Class(*entry[:3]) in (MANY, FEW)]]


def change(of, **changes):
    """Write a file, and change some of its parts."""
    path = host_tuning.write(of, {MANY: WINNER})
    with open(path) as file:
        content = json.load(file)
    for name, part in changes.items():
        content[name] = content[name] | part if isinstance(part, dict) else part
    with open(path, "w") as file:
        json.dump(content, file)
    return path


def test_a_new_process_uses_the_winners(device):
    host_tuning.write(device, {MANY: WINNER})
    assert report(device) == [[], [(*MANY, "cpu", WINNER.knobs)]]
    assert "1 class of problems" in run_cli(env={"CLATTN_TUNING": None}).stdout


def test_off(device):
    """For calls and in the listing."""
    host_tuning.write(device, {MANY: WINNER})
    assert report(device, CLATTN_TUNING="off") == [[], []]
    assert "off, by CLATTN_TUNING" in run_cli(env={"CLATTN_TUNING": "off"}).stdout
    done = run_cli(env={"CLATTN_TUNING": "of"}, check_exit=False)
    assert done.returncode == 2 and "CLATTN_TUNING is 'of'; expected" in done.stderr


def test_a_damaged_file_is_worth_one_warning(device):
    path = host_tuning.write(device, {MANY: WINNER})
    with open(path, "w") as file:
        file.write("{")
    [[message], loaded] = report(device)
    assert message == f"{path} is ignored: it is not JSON; python -m clattn tune writes a new one"
    assert loaded == []


STRICT = """
import warnings, clattn
warnings.simplefilter("error")
try:
    clattn.devices()
except RuntimeWarning as warning:
    print("ignored" in str(warning), len(clattn.devices()) > 0)
"""


def test_a_warning_that_is_an_error(device):
    """It is raised once, and the next call works."""
    path = host_tuning.write(device, {MANY: WINNER})
    with open(path, "w") as file:
        file.write("{")
    done = run([sys.executable, "-c", STRICT], timeout=100, check_exit=True,
               env={"CLATTN_TUNING": None}, cwd=None)  # fmt: skip
    assert done.stdout == "True True\n"


GOOD = WINNER._asdict()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[" * 100_000, "not JSON"),
        (b"[]", "no object"), (b"null", "no object"), (b"{}", "no device"),
        (b" " * (2 << 20) + b"{}", "too large"),
    ],
    ids=["empty", "cut", "no-text", "deep", "list", "null", "no-device", "large"],
)  # fmt: skip
def test_bytes_that_no_tuner_wrote(device, content, reason):
    path = host_tuning.write(device, {MANY: WINNER})
    with open(path, "wb") as file:
        file.write(content)
    found, warning = host_tuning.read(path, device)
    assert found == {} and f"{path} is ignored" in warning and reason in warning


@pytest.mark.parametrize(
    "winners",
    [
        [], {"float32-64-some": GOOD}, {BOTH[0]: None}, {BOTH[0]: {}},
        *({BOTH[0]: GOOD | part} for part in (
            {"variant": "fast"}, {"variant": "reference"}, {"variant": ["cpu"]}, {"more": 1},
            {"knobs": []}, {"knobs": {"CHUNKS": 3}}, {"knobs": {"CHUNKS": 4.0}},
            {"knobs": {"TILES": True}}, {"knobs": {"XX": 1}}, {"knobs": {"CHUNKS": [4]}},
            {"seconds": 0.0}, {"seconds": "1"}, {"seconds": 1e300}, {"rule_seconds": -1.0},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_winners_that_no_tuner_wrote(device, winners):
    """None of the file's winners is used, the good ones neither."""
    path = change(device, winners=None)
    with open(path) as file:
        content = json.load(file)
    good = {BOTH[1]: GOOD}
    content["winners"] = good | winners if isinstance(winners, dict) else winners
    with open(path, "w") as file:
        json.dump(content, file)
    found, warning = host_tuning.read(path, device)
    assert found == {} and "is ignored" in warning


@pytest.mark.parametrize(
    "changes",
    [{"format": 2}, {"clattn": "0"}, {"kernels": "0"}, {"device": {"name": "another"}},
     {"device": {"driver_version": "another"}}, {"device": {"compute_units": 1000}}],
    ids=str,
)  # fmt: skip
def test_a_file_of_another_version_device_or_driver_is_ignored(device, changes):
    """In silence: it was right where it was made."""
    path = host_tuning.write(device, {MANY: WINNER})
    assert host_tuning.read(path, device) == ({MANY: WINNER}, "")
    assert host_tuning.read(change(device, **changes), device) == ({}, "")


def test_what_is_no_file_is_not_opened(device):
    path = host_tuning.write(device, {MANY: WINNER})
    os.unlink(path)
    os.mkfifo(path)
    assert host_tuning.read(path, device) == ({}, "")


def test_a_driver_has_a_file_of_its_own(device):
    class Other:
        def __getattr__(self, name):
            return "another" if name == "driver_version" else getattr(device, name)

    assert host_tuning.path_of(Other()) != host_tuning.path_of(device)


def test_a_folder_that_cannot_be_written(device, clock, capsys, monkeypatch):
    """Winners hold for the process, and nothing is left behind."""
    folder = os.path.dirname(host_tuning.path_of(device))
    clock.factors = {("TILES", 2): 0.5}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
        assert tune(device) == 0
    said = capsys.readouterr().out
    assert "cannot be kept: disk full" in said and "kept in" not in said
    assert in_use(device) == {MANY: {"TILES": 2}}
    assert os.listdir(folder) == []


def test_no_warning_without_a_file(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host_tuning.load([device]) == []
    assert report(device) == [[], []]


# --- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--seconds", "x"], ["--seconds", "nan"],
                                   ["--classes", "float32-65-many"]], ids=" ".join)  # fmt: skip
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["tune", *wrong])
    assert refusal.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def test_an_unknown_device(capsys):
    assert main(["tune", "--device", "no such device"]) == 2
    assert "no such device" in capsys.readouterr().err


def test_a_forced_variant_is_refused(device, monkeypatch, capsys):
    """It would be tuned in place of the variant that calls have."""
    monkeypatch.setenv("CLATTN_KERNEL", "reference")
    assert tune(device) == 2
    assert "CLATTN_KERNEL is 'reference'; expected none" in capsys.readouterr().err


def test_bench_says_whether_it_ran_tuned(device):
    pytest.importorskip("rich")
    from clattn._commands.bench import report as bench_report
    from clattn._commands.bench.contest import Contestants
    from clattn._commands.bench.limits import Limits

    results = bench_report.Results(
        [], Contestants({"cpu": device}, [], {"cpu": Limits(device)}, {}), 1
    )
    assert "clattn cpu: not tuned" in list(bench_report.notes(results))
    host_tuning.apply(device, {MANY: WINNER, FEW: WINNER})
    assert "clattn cpu: tuned for 2 classes of problems" in bench_report.notes(results)
    assert bench_report.as_json(results)["devices"]["cpu"]["tuned_classes"] == 2
