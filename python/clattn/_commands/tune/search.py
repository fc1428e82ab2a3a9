"""Tuning of one class: every candidate is built, checked, and timed in turn with the rule."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

import clattn
from clattn import Device, _core
from clattn._commands.bench.contest import clattn_call
from clattn._commands.bench.exact import exact_rows
from clattn._commands.bench.peers import Call, first_line
from clattn._commands.bench.rows import Array, Row, draw
from clattn._commands.timing import TURN_SECONDS, shortest
from clattn._commands.tune.candidates import Knobs, problems_of, stages
from clattn._host.tuning import Class, Winner

GAIN = 0.03  # a candidate that gains less loses
QUICK_ROUNDS = 3  # of all candidates of a stage
ROUNDS = 9  # of the best of them
FASTER = 0.75  # of the rounds, at least
_RULE: Knobs = {}  # no knobs: the plan's own rule


class OutOfTime(Exception):
    """The time for tuning is over; what was measured of the class is lost."""


@dataclass
class Tuned:
    """The result of a class, and the candidates that gave none."""

    one: Class
    winner: Winner
    failed: list[tuple[Knobs, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Tuner:
    """What tuning a class needs: where, until when, and whom to tell of progress."""

    device: Device
    end: float = math.inf  # time.monotonic()
    advance: Callable[[Class, Knobs], None] = lambda one, knobs: None

    def tune(self, one: Class, variant: str) -> Tuned:
        """Find the winner of a class, which is in use afterwards.

        Raises
        ------
        OutOfTime
            The time is over. The class follows the plan's rule.
        """
        knobs = _RULE
        try:
            tuned = _Tuning(self, one, variant).run()
            knobs = tuned.winner.knobs
        finally:
            _core.tune(self.device, *one, variant, knobs)
        return tuned


class _Tuning:
    """The tuning of a class under way."""

    def __init__(self, tuner: Tuner, one: Class, variant: str) -> None:
        self._tuner, self._one, self._variant = tuner, one, variant
        self._problems = problems_of(one, tuner.device)
        self._use(_RULE)
        # These are too large for the reference kernel.
        timed = [_Check(row, tuner.device, "") for row in self._problems.timed]
        self._timed = [check.call for check in timed]
        self._checks = [_Check(self._problems.checked, tuner.device), *timed]
        self._failed: list[tuple[Knobs, str]] = []

    def run(self) -> Tuned:
        """Try the stages in turn, each with the best of the stages before."""
        best = _RULE
        for settings in stages(self._one, self._variant, self._tuner.device):
            candidates = [best | knobs for knobs in settings]
            best = self._best_of(best, [c for c in candidates if self._passes(c)])
        if best and not self._beats_rule(best):
            best = _RULE
        seconds = statistics.median(self._seconds(self._timed, _RULE) for _ in range(3))
        share = 1.0
        if best:
            share = statistics.median(self._ratios(self._timed, _RULE, [best], ROUNDS)[0])
        winner = Winner(self._variant, best, seconds, seconds * share)
        return Tuned(self._one, winner, self._failed)

    def _best_of(self, best: Knobs, candidates: list[Knobs]) -> Knobs:
        """Return the best of a stage: a candidate, or the best so far."""
        if not candidates:
            return best
        ratios = self._ratios(self._timed, best, candidates, QUICK_ROUNDS)
        medians = [statistics.median(rounds) for rounds in ratios]
        quickest = medians.index(min(medians))
        is_quicker = medians[quickest] < 1 - GAIN / 2
        return (
            candidates[quickest] if is_quicker and self._beats(candidates[quickest], best) else best
        )

    def _beats(self, candidate: Knobs, base: Knobs) -> bool:
        """Return whether a candidate is faster than other knobs, in many rounds."""
        return _is_faster(self._ratios(self._timed, base, [candidate], ROUNDS)[0])

    def _beats_rule(self, winner: Knobs) -> bool:
        """Return whether a class is better off with these knobs than with the rule."""
        rows = (*self._problems.guard, self._problems.masked)
        checks = [_Check(row, self._tuner.device) for row in rows]
        if not self._passes(winner, checks) or not self._beats(winner, _RULE):
            return False
        guard = [clattn_call(draw(row), self._tuner.device) for row in self._problems.guard]
        if statistics.median(self._ratios(guard, _RULE, [winner], ROUNDS)[0]) > 1 + GAIN:
            self._failed.append((winner, "slower on the second problem"))
            return False
        return True

    def _passes(self, knobs: Knobs, checks: "list[_Check] | None" = None) -> bool:
        """Return whether a candidate builds and gives right results; else note why."""
        self._tuner.advance(self._one, knobs)
        if time.monotonic() > self._tuner.end:
            raise OutOfTime
        self._use(knobs)
        try:
            for check in checks or self._checks:
                check.run()
        except (clattn.DeviceError, MemoryError, ValueError, _WrongError) as failure:
            self._failed.append((knobs, first_line(failure)))
            return False
        return True

    def _ratios(
        self, calls: list[Call], base: Knobs, candidates: list[Knobs], rounds: int
    ) -> list[list[float]]:
        """Return each candidate's times divided by those of `base`, which has its turn before."""
        found: list[list[float]] = [[] for _ in candidates]
        for _ in range(rounds):
            for ratios, knobs in zip(found, candidates, strict=True):
                of_base = self._seconds(calls, base)
                ratios.append(self._seconds(calls, knobs) / of_base)
        return found

    def _seconds(self, calls: list[Call], knobs: Knobs) -> float:
        """Return the time of these calls; the first one of a turn does not count."""
        if time.monotonic() > self._tuner.end:
            raise OutOfTime
        self._use(knobs)
        seconds = 0.0
        for call in calls:
            call.run()
            seconds += shortest(call.run, TURN_SECONDS, 1, math.inf) / call.count
        return seconds

    def _use(self, knobs: Knobs) -> None:
        _core.tune(self._tuner.device, *self._one, self._variant, knobs)


def _is_faster(ratios: list[float]) -> bool:
    """Return whether candidates of these times win, and not by a few lucky rounds."""
    faster = sum(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) <= 1 - GAIN and faster >= FASTER * len(ratios)


class _WrongError(Exception):
    """A result that differs by more than rounding."""


class _Check:
    """A problem whose right result is known."""

    def __init__(self, row: Row, device: Device, kernel: str = "reference") -> None:
        problem = draw(row)
        self.call = clattn_call(problem, device)
        self._exact = exact_rows(problem)
        with forced(kernel):
            self._reference = self._result()
        error = self._exact.error(self._reference)
        if not error <= self._exact.allowed:
            raise clattn.DeviceError(f"the plan's rule is wrong: error {error:.1e}")

    def run(self) -> None:
        """Compare some rows with exact ones, and all rows with those of the reference kernel.

        Two right results may each differ from the exact one by what rounding explains.
        """
        result = self._result()
        wide = self._exact.result.dtype
        difference = np.abs(result.astype(wide) - self._reference.astype(wide))
        apart = float(np.nan_to_num(difference, nan=np.inf).max())
        error = self._exact.error(result)
        if not error <= self._exact.allowed or not apart <= 2 * self._exact.allowed:
            raise _WrongError(f"wrong: error {max(error, apart):.1e}")
        if self._result().tobytes() != result.tobytes():
            raise _WrongError("wrong: not the same bits again")

    def _result(self) -> Array:
        return np.asarray(self.call.result())


@contextmanager
def forced(kernel: str) -> Iterator[None]:
    """Force a variant, or with "" what the environment says, which may leave variants out."""
    chosen = os.environ.get("CLATTN_KERNEL", "")
    limits = [os.environ.get(f"CLATTN_{name}", "") for name in ("SUB_GROUPS", "LOCAL_MEMORY")]
    _core.force(kernel or chosen, *limits)
    try:
        yield
    finally:
        _core.force(chosen, *limits)


def runs(variant: str, device: Device) -> bool:
    """Return whether the device runs a variant that takes bfloat16."""
    try:
        row = Row(variant, (1, 1, 1, 1, 1, 16), "bfloat16", on_device=device.type != "cpu")
        with forced(variant):
            clattn_call(draw(row), device).run()
    except (ValueError, clattn.DeviceError):
        return False
    return True
