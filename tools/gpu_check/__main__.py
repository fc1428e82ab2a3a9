# SPDX-License-Identifier: MIT
"""Check clattn on a machine with a GPU and nothing else, without a network; write a report.

    python3 tools/gpu_check --prepare        # where there is a network: fills build/gpu_carried
    python3 tools/gpu_check                  # on the other machine, with that folder

Finds the OpenCL driver and a loader, builds and installs clattn, runs the tests on the GPU alone
and the rows of `python -m clattn bench --gpu`, and writes build/gpu_check/report.md. A failed step
is reported, and the next step runs. Nothing outside build/gpu_check is changed. The results of a
call with --steps join the report of earlier calls.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import needs
import tables
from steps import STEPS, Check, Result

BUILD = needs.ROOT / "build"


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--prepare", action="store_true", help="fill the folder that is carried, and leave")
    add("--for-python", default=f"3.{sys.version_info[1]}", metavar="X.Y",
        help="--prepare: the other machine's Python (default: %(default)s)")  # fmt: skip
    add("--wheels", type=_split(needs.EVERYTHING), default=list(needs.EVERYTHING), metavar="NAMES",
        help="--prepare: packages to fetch, with commas (default: %(default)s)")  # fmt: skip
    add("--carried", type=Path, default=BUILD / "gpu_carried", metavar="FOLDER",
        help="what was prepared (default: %(default)s)")  # fmt: skip
    add("--folder", type=Path, default=BUILD / "gpu_check", metavar="FOLDER",
        help="all that is written (default: %(default)s)")  # fmt: skip
    add("--report", type=Path, metavar="PATH", help="default: report.md in that folder")
    add("--steps", type=_split_steps, default=list(STEPS), metavar="NAMES",
        help="some of " + ",".join(STEPS))  # fmt: skip
    add("--device", default="gpu", metavar="WORDS",
        help='"gpu" or a part of a name; "cpu" to try this out (default: %(default)s)')  # fmt: skip
    add("--limit", type=float, default=570, metavar="SECONDS",
        help="for all steps of this call (default: %(default)s)")  # fmt: skip
    add("--python", metavar="PATH", help="a Python of 3.11 or later (default: this one, if it is)")
    add("--tests", default="", metavar="ARGUMENTS", help="for pytest: --tests='-k causal'")
    add("--bench", default="", metavar="ARGUMENTS", help="for bench: --bench='--rows decode*'")
    return parser.parse_args(argv)


def _split_steps(text):
    chosen = _split(STEPS)(text)
    return [name for name in STEPS if name in chosen]


def _split(known):
    def names(text):
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; there are {','.join(known)}")
        return found

    return names


def run_steps(check):
    """Run the chosen steps in their order; yields each result when its step ends."""
    for name, step in STEPS.items():
        if name not in check.options.steps:
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            result = step(check)
        except Exception:  # the steps after it still run
            text = traceback.format_exc()
            summary = "gpu_check itself failed: " + text.strip().splitlines()[-1]
            result = Result(name, False, summary, tables.as_code(text), [f"{name}: {summary}"])
        result.seconds = time.monotonic() - start
        result.when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        print(f"{_word(result)}: {result.summary}", flush=True)
        yield result


def _word(result):
    return {True: "passed", False: "FAILED", None: "left out"}[result.is_fine]


def write_report(check):
    """Write the report of all calls so far."""
    results = {}
    for name in STEPS:
        file = check.folder / "results" / f"{name}.json"
        if file.exists():
            results[name] = Result(**json.loads(file.read_text()))
    carried = check.carried / "commit.txt"
    commit = needs.find_commit() or (carried.read_text() if carried.exists() else "")
    rows = [(name, _word(r), f"{r.seconds:.0f}", r.when, r.summary) for name, r in results.items()]
    parts = [
        "# clattn on a GPU",
        f"Commit {commit or 'not known'}; device {check.options.device!r}.",
        tables.make_table(("step", "result", "s", "when", "summary"), rows),
        "## Not measured, and why",
    ]
    unmeasured = [reason for result in results.values() for reason in result.unmeasured]
    unmeasured += [f"{name}: the step was not run" for name in STEPS if name not in results]
    lines = [f"- {' '.join(reason.split())}" for reason in unmeasured]
    parts.append("\n".join(lines) or "Nothing was left out.")
    for name, result in results.items():
        parts += [f"## {name.capitalize()}: {_word(result)}", result.summary, result.body]
    path = check.options.report or check.folder / "report.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def main(argv=None):
    options = parse(argv)
    if options.prepare:
        missing = needs.prepare(options.carried, options.for_python, options.wheels)
        for what in missing:
            print(f"not there: {what}", file=sys.stderr)
        print(options.carried)
        return 1 if any(not what.startswith("a check of PTX") for what in missing) else 0
    check = Check(options)
    folder = check.folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    all_fine = True
    for result in run_steps(check):
        all_fine = all_fine and result.is_fine is not False
        (folder / f"{result.name}.json").write_text(json.dumps(asdict(result)))
        path = write_report(check)  # after each step: the next one may be stopped from outside
    print(f"\nreport: {path}")
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
