# SPDX-License-Identifier: MIT
"""The steps of a check, in their order. Each step returns a Result, also when it fails."""

import json
import os
import shlex
import shutil
import sys
from collections import Counter

from gpu_check import items, machine, needs, opencl_info, probes, programs, smoke, speed, tables
from gpu_check.check import Result, describe_items, wrong_variants


def check_devices(check):
    """Describe the machine, and what OpenCL says of its devices."""
    done = check.run("opencl", [sys.executable, "-m", "gpu_check.opencl_info"], check.left())
    devices, problem = [], done.ended()
    if done.is_fine:
        devices, problem = json.loads(done.said.splitlines()[-1]), "no device"
    wanted = [d for d in devices if opencl_info.is_named(d, check.options.device)]
    body = [tables.make_table(("", ""), machine.describe(check)), tables.describe_devices(devices)]
    if not devices:
        body.append(tables.as_code(done.tail()))
    if wanted:
        (check.kept / "device.json").write_text(json.dumps(wanted[0]))
        summary = ", ".join(f"{d['name']} ({d['platform']})" for d in wanted)
    elif devices:
        names = ", ".join(d["name"] for d in devices)
        summary = f"no device is {check.options.device!r}; there are {names}"
    else:
        summary = f"OpenCL lists no device: {problem}"
    return Result("devices", bool(wanted), summary, "\n\n".join(body))


def check_probes(check):
    """Run small kernels: what the driver takes, computes, and how fast."""
    command = [sys.executable, "-m", "gpu_check.probes", "--device", check.options.device]
    lines = check.run_items("probes", command, list(probes.PROBES), 15)
    return describe_items("probes", lines, list(probes.PROBES))


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
    built = check.install("clattn", arguments, 0.8 * check.left())
    if not built.is_fine:
        body += [f"Building: {built.ended()}", tables.as_code(built.tail(40))]
        if any((check.carried / "wheels").glob("clattn-*.whl")):
            wheel = check.install("clattn", ["clattn", "--no-deps"], check.left())
            body.append(f"clattn's wheel made beforehand, in its place: {wheel.ended()}")
    listing = check.run("listing", [check.python, "-m", "clattn"], check.left(),
                        CLATTN_DEVICE=check.options.device)  # fmt: skip
    body.append(tables.as_code(listing.tail(60)))
    is_fine = built.is_fine and listing.is_fine
    summary = f"in {built.seconds:.0f} s" if is_fine else "clattn lists no such device"
    if not built.is_fine:
        summary = f"building failed: {built.ended()}"
    return Result("build", is_fine, summary, "\n\n".join(body))


def check_smoke(check):
    """Compare each variant with the reference kernel. Later steps leave out those that fail."""
    if why := check.why_not({"numpy": needs.BUILD["numpy"]}):
        return Result("smoke", False, why, unmeasured=[f"smoke calls: {why}"])
    names = smoke.calls(check.device.get("type") or check.options.device)
    command = [check.python, "-m", "gpu_check.smoke", "--device", check.options.device]
    result = describe_items("smoke", check.run_items("smoke", command, names, 60), names)
    if wrong := wrong_variants(check.kept / "smoke.jsonl"):
        result.summary += f"; left out of what follows: {', '.join(sorted(wrong))}"
    return result


def check_programs(check):
    """Bring back what the driver's compiler makes of the kernels, and read it."""
    folder = check.kept / "programs"
    folder.mkdir(exist_ok=True)
    names = programs.names(check.device, check.carried)
    command = [sys.executable, "-m", "gpu_check.programs", "--device", check.options.device]
    command += ["--folder", folder]
    lines = check.run_items("programs", command, names, 60)
    result = describe_items("programs", lines, names)
    found = sorted(folder.glob("*.ptx"))
    if not found:
        result.unmeasured.append("PTX of the driver: its binaries are no PTX")
        return result
    # The reader refuses functions that are called. The reference kernel calls some. Its work-items
    # do nothing together, so there is nothing to find.
    together = [file for file in found if "reference" not in file.name]
    reader = [sys.executable, needs.ROOT / "tools" / "ptx_read.py", *together]
    read = check.run("ptx_read", reader, check.left())
    result.body += f"\n\nDivergence and copies of parameters:\n\n{tables.as_code(read.tail(60))}"
    if not read.is_fine:
        result.is_fine = False
        result.summary += f"; reading the PTX: {read.ended()}"
    return result


def check_tests(check):
    """Run the suite on the device alone, as far as time allows, behind what has run already."""
    if why := check.why_not(needs.TEST):
        return Result("tests", False, why, unmeasured=[f"the suite: {why}"])
    log, had = check.begin("tests", "suite.jsonl"), check.kept / "suite_had.json"
    had.write_text(json.dumps(tests_that_ended(log)))
    arguments = shlex.split(check.options.tests)
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    command = [check.python, "-m", "pytest", "-q", "-p", "gpu_check.suite_log"]
    command += ["-p", "no:cacheprovider", "-n", str(workers), "--max-worker-restart", "100"]
    command += ["--continue-on-collection-errors", *arguments]
    words = check.options.device
    done = check.run("tests", command, check.left(),
                     CLATTN_SUITE_LOG=str(log), CLATTN_SUITE_HAD=str(had), CLATTN_DEVICE=words,
                     CLATTN_TEST_DEVICES=words.partition(":")[0])  # fmt: skip
    return summarise_suite(log, done)


def tests_that_ended(log):
    """Return the tests that need not run again.

    A test that was running when a call ended runs once more; the second time it is a failure.
    """
    starts, ended = Counter(), set()
    for event in items.read(log):
        if event["kind"] in ("done", "failed"):
            ended.add(event["test"])
        elif event["kind"] == "start":
            starts[event["test"]] += 1
    for test in sorted(starts.keys() - ended):
        if starts[test] > 1:
            says = f"it was running when {starts[test]} calls ended"
            items.write(log, kind="failed", test=test, says=says)
            ended.add(test)
    return sorted(ended)


def summarise_suite(log, done):
    """Return the result from the log of a suite and the end of its process."""
    events = items.read(log)
    by_kind = {
        kind: {} for kind in ("begin", "start", "done", "failed", "skipped", "unread", "end")
    }
    for event in events:
        by_kind[event["kind"]].setdefault(event.get("test"), event)
        if event["kind"] == "begin":  # of another call: what it could not read may be read now
            by_kind["end"].clear()
            by_kind["unread"].clear()
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


def check_ptx(check):
    """Return the output of tools/machine_code, from here or from the machine that prepared."""
    said, why = needs.run_machine_code(check.left())  # in the Python that runs this
    place = "on this machine"
    carried = check.carried / "machine_code.txt"
    if not said and carried.exists() and carried.read_text().startswith("exit status"):
        said, place = carried.read_text(), "beforehand, on the machine that prepared the check"
    if not said:
        return Result("ptx", None, why, unmeasured=[f"PTX: {why}"])
    first = said.splitlines()[0]
    return Result("ptx", first == "exit status 0", f"{place}: {first}", tables.as_code(said))


# What is worth most comes first. The weights are seconds, of 570 on an H200. Each step has its
# share of the time. A second call runs the tests that are left.
STEPS = {
    "devices": (check_devices, 5),
    "build": (check_build, 45),
    "smoke": (check_smoke, 50),
    "bench": (speed.check_bench, 170),
    "experiments": (speed.check_experiments, 100),
    "first_calls": (speed.check_first_calls, 25),
    "tests": (check_tests, 105),
    "programs": (check_programs, 25),
    "probes": (check_probes, 25),
    "tune": (speed.check_tune, 10),
    "profile": (speed.check_profile, 5),
    "ptx": (check_ptx, 5),
}
REST = "tests"  # takes all the time that is left
