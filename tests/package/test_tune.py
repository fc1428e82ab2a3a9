# SPDX-License-Identifier: MIT
"""python -m clattn tune: what wins, what is kept and used, and what is ignored.

The device seems to be a GPU that `tiled` and `decode_gpu` are made for. The clock is made up:
`clock` says how long a call takes with some knobs. Calls run the kernels for CPUs, for which the
knobs mean nothing, so that no programs are built.
"""

import ast
import itertools
import json
import os
import sys
from dataclasses import dataclass, field, replace

import clattn
import numpy as np
import pytest
import support.tuning as tuning
from clattn import _core
from clattn._commands import tune as tuner
from clattn._commands.bench import contest
from clattn._commands.bench.peers import Call
from clattn._commands.main import main
from clattn._commands.timing import shortest
from clattn._host import tuning as host_tuning
from clattn._host.tuning import Winner
from support.processes import run, run_cli
from support.variants import force

MANY, FEW = "float32-64-many", "float32-64-few"
WINNER = Winner("tiled", {"EC": 32, "KC": 16})

real_call, real_fast_variants = contest.clattn_call, _core.fast_variants


@dataclass
class Clock:
    """Times of calls, relative to the plan's rule, and what becomes of results."""

    device: object
    factors: dict = field(default_factory=dict)  # by (knob, value)
    guard: dict = field(default_factory=dict)  # where they differ on the second problem
    spoil: object = None  # changes the results of calls with the knob EC=32
    stop: object = None  # is raised by the first call that is timed in the class of few rows

    def call(self, problem, device):
        row = replace(problem.row, on_device=False)

        def result():
            found = real_call(replace(problem, row=row), device).result()
            return self.spoil(found, row) if self.spoil and "EC=32" in self.knobs() else found

        return Call(lambda: row, result)

    def knobs(self):
        return [f"{n}={x}" for *_, knobs in _core.tuned(self.device) for n, x in knobs.items()]

    def shortest(self, call, seconds, least, most):
        row = call()
        if self.stop and 16 <= row.shape[3] <= 128:
            raise self.stop
        factors = self.guard if row.name == "guard" else self.factors
        return 1e-3 * np.prod([factors.get(knob, 1) for knob in self.knobs()])


@pytest.fixture(autouse=True)
def clock(device, tmp_path, monkeypatch):
    """Small problems, few candidates, a cache folder of one's own, nothing tuned."""
    tuning.clear(device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CLATTN_TUNING", raising=False)
    monkeypatch.setattr(_core, "fast_variants", lambda *_: ["decode_gpu", "tiled", "reference"])
    shapes = {"many": ((1, 2, 2, 200, 90), (1, 2, 2, 150, 90), (1, 4, 1, 61, 90)),
              "few": ((1, 2, 2, 20, 90), (1, 2, 2, 30, 90), (1, 4, 2, 21, 90)),
              "decode": ((1, 4, 2, 1, 3000), (1, 2, 2, 1, 90), (1, 4, 2, 3, 403))}  # fmt: skip
    monkeypatch.setattr(tuner, "_SHAPES", shapes)
    monkeypatch.setitem(tuner._STAGES, "tiled", (("EC",), ("KC",)))
    made_up = Clock(device)
    monkeypatch.setattr(contest, "clattn_call", made_up.call)
    monkeypatch.setattr(tuner, "shortest", made_up.shortest)
    yield made_up
    tuning.clear(device)


def tune(device, *classes, options=()):
    """The exit status, and the winners that are kept."""
    status = main(["tune", "--device", device.platform, "--classes", *(classes or [MANY]),
                   *options])  # fmt: skip
    return status, host_tuning.read(host_tuning.path_of(device), device)[0]


def test_every_class_has_a_variant_and_problems_of_its_own(monkeypatch, device):
    monkeypatch.undo()
    classes, legal = _core.tunables()
    assert len(classes) == 60 and set(tuner._STAGES) == set(legal)
    for variant, stages in tuner._STAGES.items():
        assert set(itertools.chain(*stages)) <= set(legal[variant])
    for one in classes:
        for _, Hq, Hk, L, _ in tuner._SHAPES[one.split("-")[2]]:
            rows = Hq // Hk * L
            assert one.endswith("decode" if rows < 16 else "few" if rows <= 128 else "many")
    assert tuner._by_value(set(classes))[:2] == ["float16-64-many", "float16-64-few"]
    assert all("float64" in one for one in tuner._by_value(set(classes))[-15:])

    def found(words, classes=classes):
        monkeypatch.setattr(_core, "fast_variants", lambda *_: words)
        return {tuner.variant_of(one, device) for one in classes}

    units = ["decode_mma", "decode_gpu", "mma", "tiled", "reference"]
    assert found(["decode_gpu", "tiled", "reference"]) == {"decode_gpu", "tiled"}
    assert found(units, [MANY, FEW]) == {"mma"}
    assert found(units, ["float16-128-decode"]) == {"decode_mma"}
    assert found(units, ["float16-256-decode"]) == {"decode_gpu"}
    monkeypatch.setenv("CLATTN_KERNEL", "-mma,-decode_mma")
    assert found(units) == {"decode_gpu", "tiled"}
    monkeypatch.setenv("CLATTN_KERNEL", "-mma,-tiled")
    with pytest.raises(clattn.DeviceError, match=f"leaves out the variants of {MANY}"):
        found(units, [MANY])


# --- what wins -------------------------------------------------------------------------------


def test_the_fastest_wins(device, clock, capsys):
    """The best of each stage, together."""
    clock.factors = {"EC=16": 0.9, "EC=64": 0.8, "KC=8": 0.5}
    assert tune(device) == (0, {MANY: Winner("tiled", {"EC": 64, "KC": 8})})
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == [MANY, "tiled", "1", "ms", "EC=64", "KC=8,", "150%", "faster"]
    assert said[1:] == ["classes measured: 1; better than the rule: 1",
                        f"kept in {host_tuning.path_of(device)}"]  # fmt: skip


def test_what_wins_too_little_or_loses_elsewhere_is_out(device, clock, capsys):
    """The class counts as measured, and its calls follow the rule."""
    for clock.factors, clock.guard, knobs in (
        ({"EC=32": 0.96}, {}, {"EC": 32}),
        ({"EC=32": 0.98}, {}, {}),
        ({"EC=32": 0.5}, {"EC=32": 1.02}, {"EC": 32}),
        ({"EC=32": 0.5}, {"EC=32": 1.1}, {}),
    ):
        assert tune(device, options=["--again"]) == (0, {MANY: Winner("tiled", knobs)})
    assert "    EC=32 is out: slower on the second problem\n" in capsys.readouterr().out


def wrong(result, row):
    result[0, 0, -2, 3] += 1e-4
    return result


def does_not_build(result, row):
    raise clattn.DeviceError("attention_tiled does\nnot [/build]")


def other_bits(result, row, calls=itertools.count()):  # noqa: B008
    """A change in the last place, in every second call."""
    if next(calls) % 2:
        result[0, 0, 0, 0] = np.nextafter(result[0, 0, 0, 0], np.float32(9))
    return result


@pytest.mark.parametrize(
    ("change", "reason"),
    [(wrong, "wrong: error 1"), (other_bits, "wrong: not the same bits again"),
     (lambda result, row: result * (np.nan if row.mask else 1), "wrong: error inf"),
     (does_not_build, "attention_tiled does not [/build]")],
    ids=["wrong", "other-bits", "nan-with-a-mask", "does-not-build"],
)  # fmt: skip
def test_a_wrong_candidate_is_out(device, clock, capsys, change, reason):
    """Though it would be the fastest; the second best wins."""
    clock.factors, clock.spoil = {"EC=32": 0.5, "EC=64": 0.8}, change
    assert tune(device) == (0, {MANY: Winner("tiled", {"EC": 64})})
    assert f"    EC=32 is out: {reason}" in capsys.readouterr().out


def test_a_class_whose_rule_is_wrong_has_failed(device, clock, monkeypatch, capsys):
    """The other classes are tuned, and the exit status says that something is amiss."""
    attend = clattn.scaled_dot_product_attention

    def spoilt(query, *args, **options):
        result = attend(query, *args, **options)
        return result + 0.1 if query.shape[2] == 61 else result

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", spoilt)
    assert tune(device, MANY, FEW) == (1, {FEW: Winner("tiled", {})})
    assert "failed: wrong: error 1.0e-01" in capsys.readouterr().out


@pytest.mark.by_turns
@pytest.mark.cpus
def test_by_the_real_clock(device, monkeypatch, capsys):
    """With a kernel for GPUs, whoever wins."""
    monkeypatch.setattr(contest, "clattn_call", real_call)
    monkeypatch.setattr(tuner, "shortest", shortest)
    monkeypatch.setattr(tuner, "TURN_SECONDS", 0)
    force(monkeypatch, "decode_gpu")
    status, winners = tune(device, "float32-64-decode")
    assert status == 0 and winners["float32-64-decode"].variant == "decode_gpu"
    assert "is out: wrong" not in capsys.readouterr().out


# --- resuming --------------------------------------------------------------------------------


def test_finished_classes_are_kept(device, clock, capsys):
    """After Ctrl-C and at the end of the time; the next run goes on."""
    clock.factors = {"KC=8": 0.5}
    clock.stop = KeyboardInterrupt()
    first = {MANY: Winner("tiled", {"KC": 8})}
    assert tune(device, MANY, FEW) == (130, first)
    capsys.readouterr()
    clock.stop = tuner._OutOfTimeError()
    assert tune(device, MANY, FEW) == (0, first)
    said = capsys.readouterr().out
    assert MANY not in said and "the time is over\nclasses left: 1; run" in said
    clock.stop = None
    assert tune(device, MANY, FEW) == (0, first | {FEW: Winner("tiled", {"KC": 8})})
    clock.factors = {}
    assert tune(device, "*-256-*", options=["--seconds", "1e-9"])[0] == 0
    assert "classes left: " in capsys.readouterr().out
    assert tune(device, MANY, options=["--again"])[1] == {
        MANY: Winner("tiled", {}), FEW: Winner("tiled", {"KC": 8})}  # fmt: skip


# --- files -----------------------------------------------------------------------------------

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
    """What another process warns of, and what it has loaded."""
    done = run([sys.executable, "-c", REPORT, device.platform], timeout=100, check_exit=True,
               env={"CLATTN_TUNING": None, **env}, cwd=None)  # fmt: skip
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def file_of(of, text=None, **changes):
    """Write a file of winners, or a text in its place; return its path."""
    host_tuning.write(of, {MANY: WINNER})
    path = host_tuning.path_of(of)
    with open(path) as file:
        content = json.load(file)
    for name, part in changes.items():
        content[name] = content[name] | part if isinstance(part, dict) else part
    with open(path, "wb") as file:
        file.write(json.dumps(content).encode() if text is None else text)
    return path


def test_a_new_process_uses_the_winners(device):
    file_of(device)
    assert report(device) == [[], [(MANY, *WINNER)]]
    assert report(device, CLATTN_TUNING="off") == [[], []]
    done = run_cli(env={"CLATTN_TUNING": "of"}, check_exit=False)
    assert done.returncode == 2 and "CLATTN_TUNING is 'of'; expected" in done.stderr


def test_a_damaged_file_is_worth_one_warning(device):
    path = file_of(device, b"{")
    [[message], loaded] = report(device)
    assert message == f"{path} is ignored: it is damaged; python -m clattn tune writes a new one"
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
    file_of(device, b"{")
    done = run([sys.executable, "-c", STRICT], timeout=100, check_exit=True,
               env={"CLATTN_TUNING": None}, cwd=None)  # fmt: skip
    assert done.stdout == "True True\n"


GOOD = WINNER._asdict()


def test_what_no_tuner_wrote_is_ignored(device):
    """All of a file, if a part is wrong."""
    texts = (b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null", b"{}", b" " * (2 << 20) + b"{}")
    parts = [
        [], None, {"float32-64-some": GOOD}, {FEW: None}, {FEW: {}},
        *({FEW: GOOD | part} for part in (
            {"variant": "fast"}, {"variant": "cpu"}, {"variant": ["tiled"]}, {"more": 1},
            {"knobs": []}, {"knobs": {"EC": 3}}, {"knobs": {"EC": 32.0}},
            {"knobs": {"TILING": True}}, {"knobs": {"XX": 1}}, {"knobs": {"EC": [32]}},
        )),
    ]  # fmt: skip
    for text, winners in [*((text, {}) for text in texts), *((None, part) for part in parts)]:
        path = file_of(device, text, winners=winners)
        found, warning = host_tuning.read(path, device)
        assert (found, warning[: len(path) + 11]) == ({}, f"{path} is ignored"), (text, winners)


def test_a_file_of_another_version_device_or_driver_is_ignored(device):
    """In silence: it was right where it was made. Files of the first format tuned CPUs, too."""
    assert host_tuning.read(file_of(device), device) == ({MANY: WINNER}, "")
    for changes in (
        {"format": 1, "winners": {"float32-64-threshold": GOOD}}, {"clattn": "0"},
        {"kernels": "0"}, {"device": {"name": "another"}},
        {"device": {"driver_version": "another"}}, {"device": {"compute_units": 1000}},
    ):  # fmt: skip
        assert host_tuning.read(file_of(device, **changes), device) == ({}, "")


def test_what_is_no_file_is_not_opened(device):
    path = file_of(device)
    os.unlink(path)
    assert host_tuning.load([device]) == []
    os.mkfifo(path)
    assert host_tuning.load([device]) == []


def test_a_driver_has_a_file_of_its_own(device):
    class Other:
        def __getattr__(self, name):
            return "another" if name == "driver_version" else getattr(device, name)

    assert host_tuning.path_of(Other()) != host_tuning.path_of(device)


def test_winners_that_cannot_be_kept(device, capsys, monkeypatch):
    """The run ends, and nothing is left behind."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
        assert tune(device, MANY, FEW) == (1, {})
    assert "the winners cannot be kept: disk full" in capsys.readouterr().err
    assert os.listdir(os.path.dirname(host_tuning.path_of(device))) == []
    monkeypatch.setattr(host_tuning, "path_of", lambda device: None)
    assert tune(device) == (1, {})
    assert "no cache folder to keep winners in" in capsys.readouterr().err


# --- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [["--seconds", "0"], ["--seconds", "x"], ["--seconds", "nan"],
                                   ["--classes", "float32-65-many"]], ids=" ".join)  # fmt: skip
def test_wrong_arguments(wrong, capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["tune", *wrong])
    assert refusal.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def test_a_forced_variant_is_refused(device, monkeypatch, capsys):
    """It would be tuned in place of the variant that calls have."""
    monkeypatch.setenv("CLATTN_KERNEL", "reference")
    assert tune(device) == (2, {})
    assert "CLATTN_KERNEL is 'reference'; expected none" in capsys.readouterr().err


@pytest.mark.cpus
def test_a_cpu_needs_no_tuning(device, monkeypatch, capsys):
    monkeypatch.setattr(_core, "fast_variants", real_fast_variants)
    assert tune(device) == (0, {})
    assert capsys.readouterr().out == f"{device.name}: the rules of CPUs need no tuning\n"


def test_the_listing_and_bench_say_what_is_tuned(device, monkeypatch):
    """Of devices that can be tuned."""
    pytest.importorskip("rich")
    from clattn._commands import listing
    from clattn._commands.bench import report as bench_report
    from clattn._commands.bench.limits import Limits

    contestants = contest.Contestants({"it": device}, [], {"it": Limits(device)}, {})
    results = bench_report.Results([], contestants, 1)

    def says():
        notes = [note for note in bench_report.notes(results) if note.startswith("clattn it")]
        return dict(listing.facts(device, "it")).get("tuned"), notes

    assert says() == ("no", ["clattn it: not tuned"])
    host_tuning.apply(device, {MANY: WINNER, FEW: WINNER})
    assert says() == ("2 classes of problems", ["clattn it: tuned for 2 classes of problems"])
    assert bench_report.as_json(results)["devices"]["it"]["tuned_classes"] == 2
    monkeypatch.setenv("CLATTN_TUNING", "off")
    assert says()[0] == "off, by CLATTN_TUNING"
    if device.type == "cpu":
        monkeypatch.setattr(_core, "fast_variants", real_fast_variants)
        assert says() == (None, [])
