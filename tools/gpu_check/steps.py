# SPDX-License-Identifier: MIT
"""The steps of a check. Each step returns a Result, also when it fails."""

import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import drivers
import machine
import needs
import running
import tables

HERE = Path(__file__).resolve().parent
SHARES = {"tests": 0.65, "bench": 0.95}  # of the remaining time, if other steps follow


@dataclass
class Result:
    """The result of a step. `is_fine` is None if the step did not apply."""

    name: str
    is_fine: bool | None
    summary: str
    body: str = ""
    unmeasured: list[str] = field(default_factory=list)  # what was not measured, and why
    seconds: float = 0.0
    when: str = ""


class Check:
    """The common state of all steps: options, folders, the remaining time."""

    def __init__(self, options):
        self.options = options
        self.folder = options.folder.resolve()
        self.site = self.folder / "site"
        self.carried = options.carried.resolve()
        self.end = time.monotonic() + options.limit
        self.found = drivers.find(self.carried)
        variables = drivers.environment(self.found, self.folder)
        self.env = running.make_environment(self.folder, variables)
        self.python, self.python_version = needs.find_python(options.python)

    def left(self, name=""):
        """Return the seconds that a step may take: a share of the rest, if other steps follow."""
        share = SHARES[name] if name in SHARES and self.options.steps[-1] != name else 1.0
        return max(share * (self.end - time.monotonic()), 1.0)

    def run(self, name, command, seconds, **more):
        log = self.folder / "logs" / f"{name}.log"
        env = dict(self.env, **more)
        return running.run(command, seconds, env=env, log=log, cwd=needs.ROOT)

    def versions(self, names):
        """Return the versions of the packages that Python finds."""
        done = self.run("versions", [self.python, "-c", needs.VERSION_CODE, *names], 60)
        return json.loads(done.said.splitlines()[-1]) if done.is_fine else {}

    def lacks(self, wanted):
        """Return the packages of a dict that are missing or too old."""
        have = self.versions(wanted)
        return [
            name for name, least in wanted.items()
            if name not in have or not needs.is_new_enough(have[name], least)
        ]  # fmt: skip

    def install(self, name, arguments, seconds):
        """Install packages without an index, by Python's own pip or by the carried one."""
        wheels = self.carried / "wheels"
        own = [self.python, "-m", "pip"]
        carried = sorted(wheels.glob("pip-*.whl"))
        has_own = self.run("pip", [*own, "--version"], 60).is_fine
        command = own if has_own or not carried else [self.python, f"{carried[-1]}/pip"]
        target = self.folder / "tmp" / f"install-{name}"
        shutil.rmtree(target, ignore_errors=True)
        command += ["install", "--quiet", "--no-index", "--find-links", wheels]
        done = self.run(f"install-{name}", [*command, "--target", target, *arguments], seconds)
        if done.is_fine:
            self._merge(target)
        shutil.rmtree(target, ignore_errors=True)
        return done

    def _merge(self, target):
        """Add a folder to the installed packages; pip itself would overwrite other programs."""
        for package in target.glob("*/__init__.py"):
            shutil.rmtree(self.site / package.parent.name, ignore_errors=True)
        shutil.copytree(target, self.site, symlinks=True, dirs_exist_ok=True)


def check_devices(check):
    """Describe the machine, and what OpenCL says of its devices."""
    done = check.run("opencl", [sys.executable, HERE / "opencl_info.py"], min(check.left(), 90))
    devices, problem = [], done.ended()
    if done.is_fine:
        devices, problem = json.loads(done.said.splitlines()[-1]), "no device"
    wanted = [d for d in devices if _is_named(d, check.options.device)]
    body = [tables.make_table(("", ""), machine.describe(check)), tables.describe_devices(devices)]
    if not devices:
        body.append(tables.as_code(done.tail()))
    if wanted:
        summary = ", ".join(f"{d['name']} ({d['platform']})" for d in wanted)
    elif devices:
        names = ", ".join(d["name"] for d in devices)
        summary = f"no device is {check.options.device!r}; there are {names}"
    else:
        summary = f"OpenCL lists no device: {problem}"
    return Result("devices", bool(wanted), summary, "\n\n".join(body))


def _is_named(device, words):
    kind = words.partition(":")[0].lower()
    return kind == device["type"] or any(
        words.lower() in device[name].lower() for name in ("name", "platform")
    )


def check_build(check):
    """Install missing packages from the wheels, then build and install clattn."""
    if check.python is None:
        return Result("build", False, check.python_version)
    body, notes = [f"Python {check.python_version} ({check.python})"], []
    programs = {name: v for name, v in needs.PROGRAMS.items() if not shutil.which(name)}
    lacking = check.lacks(needs.BUILD | programs | needs.TEST | needs.BENCH | needs.LIMITS)
    for name in lacking:  # one after the other: a missing wheel stops no other package
        done = check.install(name, [name], min(check.left(), 120))
        notes.append(f"{name}: " + ("from its wheel" if done.is_fine else "not there"))
    body += [f"Packages brought along: {', '.join(notes)}"] if notes else []
    arguments = [".", "--no-build-isolation", "--no-deps"]
    arguments += ["-C", f"build-dir={check.folder / 'build'}"]
    if check.found.headers is not None:
        arguments += ["-C", f"cmake.define.CLATTN_OPENCL_INCLUDE_DIR={check.found.headers}"]
    built = check.install("clattn", arguments, check.left())
    if not built.is_fine:
        body += [f"Building: {built.ended()}", tables.as_code(built.tail(40))]
        if any((check.carried / "wheels").glob("clattn-*.whl")):
            wheel = check.install("clattn", ["clattn", "--no-deps"], check.left())
            body.append(f"clattn's wheel made beforehand, in its place: {wheel.ended()}")
    listing = check.run("listing", [check.python, "-m", "clattn"], min(check.left(), 120),
                        CLATTN_DEVICE=check.options.device)  # fmt: skip
    body.append(tables.as_code(listing.tail(60)))
    is_fine = built.is_fine and listing.is_fine
    summary = f"in {built.seconds:.0f} s" if is_fine else "clattn lists no such device"
    if not built.is_fine:
        summary = f"building failed: {built.ended()}"
    return Result("build", is_fine, summary, "\n\n".join(body))


def check_tests(check):
    """Run the suite on the device alone, as far as time allows."""
    if lacking := _lacking(check, needs.TEST):
        return Result("tests", False, lacking, unmeasured=[f"the suite: {lacking}"])
    log = check.folder / "logs" / "suite.jsonl"
    log.unlink(missing_ok=True)
    arguments = shlex.split(check.options.tests)
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    command = [check.python, "-m", "pytest", "-q", "-p", "suite_log", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--continue-on-collection-errors", *arguments]
    path = os.pathsep.join([check.env["PYTHONPATH"], str(HERE)])
    words = check.options.device
    done = check.run("tests", command, check.left("tests"), PYTHONPATH=path,
                     CLATTN_SUITE_LOG=str(log), CLATTN_DEVICE=words,
                     CLATTN_TEST_DEVICES=words.partition(":")[0])  # fmt: skip
    return summarise_suite(log, done)


def summarise_suite(log, done):
    """Return the result from the log of a suite and the end of its process."""
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    by_kind = {kind: {} for kind in ("start", "done", "failed", "skipped", "unread", "end")}
    for event in events:
        by_kind[event["kind"]].setdefault(event.get("test"), event)
    failed, skipped, unread = by_kind["failed"], by_kind["skipped"], by_kind["unread"]
    lacking = {name: event for name, event in unread.items() if "ModuleNotFound" in event["says"]}
    broken = failed | {name: event for name, event in unread.items() if name not in lacking}
    passed = by_kind["done"].keys() - failed.keys() - skipped.keys()
    hanging = by_kind["start"].keys() - by_kind["done"].keys() - failed.keys() - skipped.keys()
    summary = f"{len(passed)} passed, {len(broken)} failed, {len(skipped)} skipped"
    body, unmeasured = [], []
    if done.is_late or not by_kind["end"]:
        summary += f"; not all were run: {done.ended()}"
        unmeasured.append(f"part of the suite: {done.ended()}")
        body.append("Running at the end: " + (", ".join(sorted(hanging)) or "none"))
    for name, event in broken.items():
        body.append(f"### {name}\n\n{tables.as_code(event['says'])}")
    for name, event in lacking.items():
        unmeasured.append(f"{name}: {event['says'].splitlines()[-1].lstrip('E ')}")
    reasons = Counter(event["says"] for event in skipped.values())
    if reasons:
        rows = [(str(count), reason) for reason, count in reasons.most_common()]
        body.append(tables.make_table(("skipped", "because"), rows))
    if not passed or not events:
        body.append(tables.as_code(done.tail()))
    ended_well = bool(by_kind["end"]) and not done.is_late
    return Result("tests", bool(passed) and not broken and ended_well, summary,
                  "\n\n".join(body), unmeasured)  # fmt: skip


def check_bench(check):
    """Measure the rows for GPUs, as far as time allows."""
    if lacking := _lacking(check, needs.BENCH | {"numpy": needs.BUILD["numpy"]}):
        return Result("bench", False, lacking, unmeasured=[f"speed: {lacking}"])
    file = check.folder / "bench.json"
    file.unlink(missing_ok=True)
    command = [check.python, "-m", "clattn", "bench", "--gpu", "--rounds", "5"]
    command += ["--device", check.options.device, "--json", file]
    command += shlex.split(check.options.bench)
    done = check.run("bench", command, check.left("bench"))
    if not file.exists() or not file.stat().st_size:
        body = tables.as_code(done.tail())
        return Result("bench", False, done.ended(), body, [f"speed: {done.ended()}"])
    content = json.loads(file.read_text())
    rows = content["rows"]
    bad = [row["name"] for row in rows if row["wrong"] or row["failed"]]
    summary = f"{len(rows)} rows" + (f", wrong or failed: {', '.join(bad)}" if bad else "")
    unmeasured = [f"{label}: {reason}" for label, reason in content["missing"].items()]
    body = [tables.describe_bench(content)]
    if not done.is_fine:
        summary += f"; {done.ended()}"
        body.append(tables.as_code(done.tail()))
    if done.is_late or done.status not in (0, 1):
        unmeasured.append(f"the rows after {rows[-1]['name']}: {done.ended()}")
    return Result("bench", done.is_fine and not bad, summary, "\n\n".join(body), unmeasured)


def _lacking(check, wanted):
    """Return why a step cannot run; empty if it can."""
    if check.python is None:
        return check.python_version
    lacking = check.lacks(wanted | {"clattn": "0"})
    return f"not there: {', '.join(lacking)}" if lacking else ""


def check_ptx(check):
    """Return the output of tools/ptx_check.py, from here or from the machine that prepared."""
    said, why = needs.run_ptx_check(check.left())  # in the Python that runs this
    place = "on this machine"
    carried = check.carried / "ptx_check.txt"
    if not said and carried.exists() and carried.read_text().startswith("exit status"):
        said, place = carried.read_text(), "beforehand, on the machine that prepared the check"
    if not said:
        return Result("ptx", None, why, unmeasured=[f"PTX: {why}"])
    first = said.splitlines()[0]
    return Result("ptx", first == "exit status 0", f"{place}: {first}", tables.as_code(said))


STEPS = {
    "devices": check_devices,
    "build": check_build,
    "tests": check_tests,
    "bench": check_bench,
    "ptx": check_ptx,
}
