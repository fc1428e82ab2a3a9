"""The command ``python -m clattn tune``: find the best tiles for a GPU, by timing them."""

import argparse
import fnmatch
import itertools
import math
import os
import statistics
import sys
import time

import clattn
from clattn import Device, _core
from clattn._commands.bench.exact import exact_rows
from clattn._commands.bench.peers import Call, first_line
from clattn._commands.bench.rows import Row, draw
from clattn._commands.common import CommandError, add_device, find_device, number
from clattn._commands.timing import TURN_SECONDS, shortest
from clattn._host import tuning

Knobs = dict[str, int]

SECONDS = 120.0
GAIN = 0.03  # a candidate that gains less loses
ROUNDS = (3, 9)  # a candidate has to win the first, then the others

# By the rows of a class, (B, Hq, Hk, L, S): the problem that is timed, another that a winner must
# not lose, and one whose lengths no tile divides, for results.
_SHAPES = {
    "many": ((2, 16, 16, 2048, 2048), (1, 16, 16, 500, 1000), (1, 4, 1, 61, 203)),
    "few": ((1, 32, 32, 128, 2048), (1, 32, 32, 40, 1000), (1, 4, 2, 21, 203)),
    "decode": ((1, 32, 8, 1, 16384), (4, 32, 32, 1, 1024), (1, 4, 2, 3, 403)),
}
# Knobs that are tried together, in turn.
_STAGES = {
    "mma": (("MT", "BN", "STRIP", "QUERIES"), ("WARPS",), ("STAGES",)),
    "tiled": (("TILING",), ("EC",), ("KC",)),
    "decode_gpu": (("SPLITS",),),
    "decode_mma": (("SPLITS",),),
}


class _OutOfTimeError(Exception):
    """The time for tuning is over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add_device(parser)
    add("--seconds", metavar="N", type=number(float, 0, above=True), default=SECONDS,
        help="stop after so long; the next run goes on (default: %(default)g)")  # fmt: skip
    add("--classes", metavar="NAME", nargs="+", type=_classes,
        help="classes of problems, such as 'float16-64-many', or patterns (default: all)"
        )  # fmt: skip
    add("--again", action="store_true", help="forget what earlier runs have found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    forced = os.environ.get("CLATTN_KERNEL", "")
    if forced and not forced.startswith("-"):
        message = f"CLATTN_KERNEL is {forced!r}; expected none, or variants to leave out"
        raise CommandError(message, 2)
    device = find_device(arguments.device)
    if not tuning.is_tunable(device):
        print(f"{device.name}: the rules of CPUs need no tuning")
        return 0
    path = tuning.path_of(device)
    if path is None:
        raise CommandError("there is no cache folder to keep winners in")
    winners, warning = tuning.read(path, device)
    if warning:
        print(f"clattn tune: {warning}", file=sys.stderr)
    chosen = {one for names in arguments.classes or [_core.tunables()[0]] for one in names}
    if arguments.again:
        winners = {one: winner for one, winner in winners.items() if one not in chosen}
    todo = [one for one in _by_value(chosen) if one not in winners and _can_run(one, device)]
    failed = _tune(device, todo, winners, time.monotonic() + arguments.seconds)
    better = sum(bool(winner.knobs) for winner in winners.values())
    print(f"classes measured: {len(winners)}; better than the rule: {better}")
    if winners:
        print(f"kept in {path}")
    if tuning.is_off():
        print("CLATTN_TUNING is off: calls do not use the winners")
    return 1 if failed else 0


def _classes(pattern: str) -> list[str]:
    names = _core.tunables()[0]
    found = fnmatch.filter(names, pattern)
    if not found:
        raise argparse.ArgumentTypeError(f"{pattern!r} names no class; one is {names[0]}")
    return found


def _by_value(chosen: set[str]) -> list[str]:
    """Return the classes in the order of what they are worth: common dtypes and sizes first."""

    def rank(one: str) -> tuple[bool, bool]:
        dtype, size, _ = one.split("-")
        return dtype == "float64", size not in ("64", "128")

    return sorted((one for one in _core.tunables()[0] if one in chosen), key=rank)


def _can_run(one: str, device: Device) -> bool:
    if one.startswith("bfloat16"):
        try:
            import ml_dtypes  # noqa: F401
        except ModuleNotFoundError:
            return False
    return not one.startswith("float64") or device.float64


def _tune(device: Device, todo: list[str], winners: tuning.Winners, end: float) -> bool:
    """Tune classes until `end`, and keep each that is finished. Return whether one has failed."""
    failed = False
    for done, one in enumerate(todo):
        print(f"{one:20}", end="", flush=True)
        try:
            winners[one] = _Tuning(device, one, end).run()
            tuning.write(device, winners)
        except _OutOfTimeError:
            print(f"the time is over\nclasses left: {len(todo) - done}; run the command again")
            break
        except (clattn.DeviceError, MemoryError) as error:
            print(f"failed: {first_line(error)}")
            failed = True
        except OSError as error:
            raise CommandError(f"the winners cannot be kept: {error}") from error
    return failed


def variant_of(one: str, device: Device) -> str:
    """Return the variant that computes the problems of a class."""
    dtype, size, rows = one.split("-")
    left_out = os.environ.get("CLATTN_KERNEL", "").split(",")
    found = [word for word in tuning.variants(device, dtype) if f"-{word}" not in left_out]
    for variant in ("decode_mma", "decode_gpu") if rows == "decode" else ("mma", "tiled"):
        if variant in found and (variant, size) != ("decode_mma", "256"):
            return variant
    raise clattn.DeviceError(f"CLATTN_KERNEL leaves out the variants of {one}")


class _Tuning:
    """The tuning of a class under way."""

    def __init__(self, device: Device, one: str, end: float) -> None:
        from clattn._commands.bench.contest import clattn_call

        dtype, size, rows = one.split("-")
        self._device, self._one, self._end = device, one, end
        self._variant = variant_of(one, device)
        timed, guard, checked = ((*shape, int(size)) for shape in _SHAPES[rows])
        problems = [
            draw(row)
            for row in (
                Row("timed", timed, dtype, on_device=True),
                Row("checked", checked, dtype),
                Row("masked", checked, dtype, mask="bool", is_causal="lower_right"),
            )
        ]
        calls = [clattn_call(problem, device) for problem in problems]
        self._timed = calls[0]
        self._guard = clattn_call(draw(Row("guard", guard, dtype, on_device=True)), device)
        self._checked = list(zip(calls, map(exact_rows, problems), strict=True))
        self._out: list[str] = []

    def run(self) -> tuning.Winner:
        """Try the stages in turn, each with the best of those before, and print what won."""
        rule: Knobs = {}
        self._check(rule)
        best = rule
        legal = _core.tunables()[1][self._variant]
        for names in _STAGES[self._variant]:
            base = best
            for values in itertools.product(*(legal[name] for name in names)):
                candidate = base | dict(zip(names, values, strict=True))
                if self._is_better(candidate, best):
                    best = candidate
        share = self._ratio(self._timed, rule, best, ROUNDS[-1]) if best else 1
        if best and self._ratio(self._guard, rule, best, ROUNDS[-1]) > 1 + GAIN:
            self._out.append(f"{_words(best)} is out: slower on the second problem")
            share = 1
        best = best if share <= 1 - GAIN else rule
        seconds = self._seconds(self._timed, rule)
        gained = f", {1 / share - 1:.0%} faster" if best else ""
        print(f"{self._variant:12}{seconds * 1e3:8.4g} ms   {_words(best)}{gained}")
        for line in self._out:
            print(f"    {line}")
        return tuning.Winner(self._variant, best)

    def _is_better(self, candidate: Knobs, best: Knobs) -> bool:
        """Return whether a candidate is faster than the best so far, and right."""
        try:
            if any(self._ratio(self._timed, best, candidate, n) > 1 - GAIN for n in ROUNDS):
                return False
            self._check(candidate)
        except (clattn.DeviceError, MemoryError) as error:
            self._out.append(f"{_words(candidate)} is out: {first_line(error)}")
            return False
        return True

    def _check(self, knobs: Knobs) -> None:
        """Compare results with exact rows; the allowed error is what rounding explains."""
        self._use(knobs)
        for call, exact in self._checked:
            result = call.result()
            if not exact.is_right(result):
                raise clattn.DeviceError(f"wrong: error {exact.error(result):.1e}")
            if call.result().tobytes() != result.tobytes():
                raise clattn.DeviceError("wrong: not the same bits again")

    def _ratio(self, call: Call, base: Knobs, knobs: Knobs, rounds: int) -> float:
        """Return the median of the times divided by those of `base`, which has its turn before."""
        turns = [(self._seconds(call, base), self._seconds(call, knobs)) for _ in range(rounds)]
        return statistics.median(seconds / of_base for of_base, seconds in turns)

    def _seconds(self, call: Call, knobs: Knobs) -> float:
        """Return the time of a call; the first one of a turn does not count."""
        if time.monotonic() > self._end:
            raise _OutOfTimeError
        self._use(knobs)
        call.run()
        return shortest(call.run, TURN_SECONDS, 1, math.inf) / call.count

    def _use(self, knobs: Knobs) -> None:
        _core.tune(self._device, self._one, self._variant, knobs)


def _words(knobs: Knobs) -> str:
    return " ".join(f"{name}={value}" for name, value in knobs.items()) or "the rule"
