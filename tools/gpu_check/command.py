# SPDX-License-Identifier: MIT
"""Check clattn on a machine with a GPU and nothing else, without a network; bring back a report.

    python3 tools/gpu_check --prepare        # where there is a network: fills build/gpu_carried
    python3 tools/gpu_check                  # on the other machine, with that folder

Each step runs in a process of its own with a share of the time: a step that fails, crashes or
hangs is reported, and the next step runs. What is worth keeping is put into one folder after each
step, report.md first. A later call goes on where an earlier one stopped: it leaves out steps that
have passed, and others go on behind what they have done. Nothing outside the folders is changed.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

from gpu_check import items, needs, running, tables
from gpu_check.check import Check, Result
from gpu_check.speed import KEY_ROWS
from gpu_check.steps import REST, STEPS

BUILD = needs.ROOT / "build"
GRACE = 8  # seconds that a step has for its own summary


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
        help="where steps work, and a later call goes on (default: %(default)s)")  # fmt: skip
    add("--out", type=Path, metavar="FOLDER",
        help="for the report and what goes with it (default: out in that folder)")  # fmt: skip
    add("--steps", type=_split_steps, metavar="NAMES",
        help="run these, also if they have passed: some of " + ",".join(STEPS))  # fmt: skip
    add("--device", default="gpu", metavar="WORDS",
        help='"gpu" or a part of a name; "cpu" to try this out (default: %(default)s)')  # fmt: skip
    add("--seconds", "--limit", type=float, default=570, metavar="N", dest="limit",
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


# --- steps ---------------------------------------------------------------------------------------


def run_steps(check):
    """Run the chosen steps in their order; yields each result when its step ends.

    A step has its weight's share of the time, and as much again where steps before it have left
    time of theirs. One step may take all that is left.
    """
    end = time.monotonic() + check.options.limit
    chosen = check.options.steps or [
        name for name in STEPS if not _has_passed(check, check.load(name))
    ]
    weights = [STEPS[name][1] for name in chosen]
    share = (check.options.limit - GRACE) / max(sum(weights), 1)
    for place, name in enumerate(chosen):
        print(f"== {name}", flush=True)
        seconds = end - time.monotonic() - GRACE - share * sum(weights[place + 1 :])
        if name != REST:
            seconds = min(seconds, 2 * share * weights[place])
        yield run_step(check, name, max(seconds, 1.0))


def run_step(check, name, seconds):
    """Run a step in a process of its own, which keeps its result."""
    file = check.result_file(name)
    file.unlink(missing_ok=True)
    check.end = time.monotonic() + seconds

    def work():
        items.inject(name)
        _keep(check, STEPS[name][0](check))

    done = running.run_apart(work, seconds + GRACE, log=check.folder / "logs" / f"step-{name}.log")
    result = check.load(name)
    if result is None:
        summary = f"the step itself: {done.ended()}"
        body = tables.as_code(done.tail())
        result = Result(name, False, summary, body, [f"{name}: {summary}"])
    result.name = name
    result.seconds = done.seconds
    result.when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    result.asked = check.asked
    _keep(check, result)
    print(f"{_word(result)}: {result.summary}", flush=True)
    return result


def _has_passed(check, result):
    return result is not None and result.is_fine is True and result.asked == check.asked


def _keep(check, result):
    file = check.result_file(result.name)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(result)))
    part.replace(file)


def _word(result):
    return {True: "passed", False: "FAILED", None: "left out"}[result.is_fine]


# --- what is brought back ------------------------------------------------------------------------


def make_report(check, results):
    """Return the report of all calls so far."""
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
    return "\n\n".join(part for part in parts if part) + "\n"


def bring(check):
    """Put all that is worth keeping into one folder: at most eight files. Return the report's."""
    out = check.options.out or check.folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    results = {name: found for name in STEPS if (found := check.load(name))}
    report = out / "report.md"
    report.write_text(make_report(check, results))
    content = {name: asdict(result) for name, result in results.items()}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    for name, file in check.brought.items():
        if file.is_dir():
            _zip(file, out / name)
        elif file.exists():
            shutil.copyfile(file, out / name)
    return report


def _zip(folder, path):
    with tempfile.TemporaryDirectory() as temporary:
        part = Path(temporary) / "part.zip"
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    archive.write(file, str(file.relative_to(folder)))
        shutil.copyfile(part, path)


def main(argv=None):
    options = parse(argv)
    if options.prepare:
        missing = needs.prepare(options.carried, options.for_python, options.wheels, KEY_ROWS)
        for what in missing:
            print(f"not there: {what}", file=sys.stderr)
        print(options.carried)
        return 1 if any(not what.startswith(needs.OPTIONAL) for what in missing) else 0
    check = Check(options)
    path, all_fine = bring(check), True
    for result in run_steps(check):
        all_fine = all_fine and result.is_fine is not False
        path = bring(check)  # after each step: the next one may be stopped from outside
    print(f"\nreport: {path}")
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
