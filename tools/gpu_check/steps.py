# SPDX-License-Identifier: MIT
"""The steps of a check. Each step returns a Result, also when it fails."""

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import cuda_machine

from gpu_check import (
    drivers,
    items,
    machine,
    needs,
    opencl_info,
    probes,
    programs,
    running,
    smoke,
    tables,
)

CODE = "csrc", "kernels", "python", "tests", "tools", "cmake", "pyproject.toml", "CMakeLists.txt"
# The rows that say most, of `bench --gpu`, in the order of what is worth most.
KEY_ROWS = ("f16-E128", "f16-E128-causal", "bf16-E128", "f16-E64", "decode-f16-gqa", "f32-E64",
            "backward-f16-E128-causal", "ragged-f16-E128", "decode-pages-16", "ragged-pages-16",
            "backward-f16-E64", "decode-ragged", "decode-int8")  # fmt: skip
CPU_SCALE = 64  # by which their lengths are divided on CPUs
ROW_SECONDS = 60  # without a new row, until a row is taken to hang
PROFILED = ("mma float16 causal", "decode_mma float16 groups", "tiled float32 causal")


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
    asked: str = ""  # what the call asked of the steps


class Check:
    """The common state of all steps: options, folders, the remaining time."""

    def __init__(self, options):
        self.options = options
        self.folder = options.folder.resolve()
        self.site = self.folder / "site"
        self.kept = self.folder / "kept"  # what a later call goes on with
        self.carried = options.carried.resolve()
        self.asked = f"{options.tests} {options.bench}"
        self.end = time.monotonic() + options.limit
        self.found = drivers.find(self.carried)
        variables = drivers.environment(self.found, self.folder) | self._by_cuda()
        self.env = running.make_environment(self.folder, variables)
        self.python, self.python_version = needs.find_python(options.python)
        self._forget_others()

    def _by_cuda(self):
        """Return variables of the tests' loader for machines whose NVIDIA driver has no OpenCL.

        It takes PTX that was carried along where there is no clang.
        """
        cuda = None if self.options.device.startswith("cpu") else drivers.find_cuda()
        self.cuda_says = "" if cuda is None else f"{cuda}, by tools/cuda_machine.py"
        if cuda is None:
            return {}
        folder = self.folder / "cuda"
        if (self.carried / "cuda").is_dir():
            shutil.copytree(self.carried / "cuda", folder, dirs_exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return cuda_machine.environment(folder, str(cuda))
        except (cuda_machine.MissingError, OSError) as error:
            self.cuda_says = f"{cuda} is of no use: {error}"
            return {}

    def _forget_others(self):
        """Remove what an earlier call kept of other code or of another device."""
        digest = hashlib.sha256(self.options.device.encode())
        for name in CODE:
            top = needs.ROOT / name
            for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
                if file.is_file() and "__pycache__" not in file.parts:
                    digest.update(str(file.relative_to(needs.ROOT)).encode() + file.read_bytes())
        mark = self.kept / "code.txt"
        if not mark.exists() or mark.read_text() != digest.hexdigest():
            shutil.rmtree(self.kept, ignore_errors=True)
            self.kept.mkdir(parents=True)
            mark.write_text(digest.hexdigest())

    @property
    def brought(self):
        """Files that are worth keeping, besides the report and the results; folders are zipped."""
        names = ("bench.json", "tuned.json", "suite.jsonl", "profile.txt")
        files = {name: self.kept / name for name in names}
        return files | {"programs.zip": self.kept / "programs", "logs.zip": self.folder / "logs"}

    @property
    def device(self):
        """What OpenCL says of the device, from the first step; {} if it has not run."""
        file = self.kept / "device.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def left(self):
        """Return the seconds that are left to the step."""
        return max(self.end - time.monotonic(), 1.0)

    def result_file(self, name):
        return self.kept / "results" / f"{name}.json"

    def load(self, name):
        """Return the result that a step has left, or None."""
        file = self.result_file(name)
        return Result(**json.loads(file.read_text())) if file.exists() else None

    def begin(self, name, file):
        """Return a file of a step; without what an earlier call kept if this one asks anew."""
        path = self.kept / file
        if name in (self.options.steps or ()):
            path.unlink(missing_ok=True)
        return path

    def environment(self, **more):
        """Return the environment of commands. Variants that are wrong here are left out."""
        wrong = sorted(wrong_variants(self.kept / "smoke.jsonl"))
        left_out = {"CLATTN_KERNEL": ",".join(f"-{word}" for word in wrong)} if wrong else {}
        return dict(self.env, **left_out, **more)

    def run(self, name, command, seconds, **more):
        log = self.folder / "logs" / f"{name}.log"
        return running.run(command, seconds, env=self.environment(**more), log=log, cwd=needs.ROOT)

    def run_watched(self, name, command, file, seconds_each):
        """Run a command as long as it goes on writing to a file."""
        log = self.folder / "logs" / f"{name}.log"
        start = time.monotonic()
        with log.open("w") as output:
            process = running.launch(command, output, self.environment(), needs.ROOT)
        stopped = items.wait(process, file, seconds_each, self.left)
        running.kill_group(process)
        said, seconds = log.read_text(errors="replace"), time.monotonic() - start
        return running.Done(process.returncode, said, seconds, bool(stopped))

    def run_items(self, step, command, names, seconds_each, **more):
        """Run items in processes of their own; returns their lines by name."""
        path = self.begin(step, f"{step}.jsonl")
        log = self.folder / "logs" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)

        def start(rest):
            with log.open("a") as file:
                process = running.launch(
                    [*command, path, *rest], file, dict(self.env, **more), needs.ROOT
                )
            return process, log

        items.supervise(path, names, start, seconds_each, self.left)
        return items.ended(path)

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


def wrong_variants(file):
    """Return the variants of which a smoke call failed or was wrong."""
    return {name.split()[0] for name, line in items.ended(file).items() if line["kind"] == "failed"}


def describe_items(name, lines, names):
    """Return the result of a step that ran items."""
    failed = [n for n in names if lines.get(n, {}).get("kind") == "failed"]
    missing = [n for n in names if n not in lines]
    left_out = [n for n in names if lines.get(n, {}).get("kind") == "left out"]
    summary = (
        f"{len(names) - len(failed) - len(missing) - len(left_out)} passed, {len(failed)} failed"
    )
    summary += f", {len(left_out)} left out" if left_out else ""
    summary += f"; no time for {len(missing)}" if missing else ""
    rows = [
        (n, line["kind"].replace("failed", "**FAILED**"), f"{line.get('seconds', 0):.1f}",
         line["says"]) for n, line in lines.items()
    ]  # fmt: skip
    body = tables.make_table((name, "result", "s", ""), rows)
    unmeasured = [f"{name}, {n}: no time" for n in missing]
    return Result(name, not failed and not missing, summary, body, unmeasured)


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
    if lacking := _lacking(check, {"numpy": needs.BUILD["numpy"]}):
        return Result("smoke", False, lacking, unmeasured=[f"smoke calls: {lacking}"])
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
    if lacking := _lacking(check, needs.TEST):
        return Result("tests", False, lacking, unmeasured=[f"the suite: {lacking}"])
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


def check_bench(check):
    """Measure key rows for GPUs, or those that are asked for, as far as time allows."""
    if lacking := _lacking(check, needs.BENCH | {"numpy": needs.BUILD["numpy"]}):
        return Result("bench", False, lacking, unmeasured=[f"speed: {lacking}"])
    file = check.begin("bench", "bench.json")
    asked = shlex.split(check.options.bench)
    command = [check.python, "-m", "clattn", "bench", "--gpu", "--rounds", "5"]
    command += ["--device", check.options.device]
    command += ["--scale", str(CPU_SCALE)] if check.device.get("type") == "cpu" else []
    if asked:
        command += ["--json", file, *asked]
        done = check.run_watched("bench", command, file, ROW_SECONDS)
        return summarise_bench(file, done, {})
    lost, done = {}, running.Done(0, "", 0.0, False)
    while (rest := rows_left(file, lost)) and check.left() > 1:
        part = check.kept / "bench_part.json"
        part.unlink(missing_ok=True)
        asked = ["--json", part, "--rows", *rest]
        done = check.run_watched("bench", [*command, *asked], part, ROW_SECONDS)
        join_bench(file, part)
        still = rows_left(file, lost)
        if still and check.left() > 1:  # the row that it was at has ended the process
            lost[still[0]] = f"{done.ended()}\n{done.tail(6)}"
    return summarise_bench(file, done, lost)


def rows_left(file, lost):
    content = json.loads(file.read_text()) if file.exists() else {"rows": []}
    had = {row["name"] for row in content["rows"]} | lost.keys()
    return [name for name in KEY_ROWS if name not in had]


def join_bench(file, part):
    """Add the rows of a part to what was measured before."""
    if not part.exists() or not part.stat().st_size:
        return
    new = json.loads(part.read_text())
    if file.exists():
        old = json.loads(file.read_text())
        new["rows"] = old["rows"] + new["rows"]
        new["peers"] |= old["peers"]
    file.write_text(json.dumps(new))


def summarise_bench(file, done, lost):
    """Return the result from the rows that were measured, and those that ended the process."""
    if not file.exists() or not file.stat().st_size:
        body = tables.as_code(done.tail())
        return Result("bench", False, done.ended(), body, [f"speed: {done.ended()}"])
    content = json.loads(file.read_text())
    rows = content["rows"]
    bad = [row["name"] for row in rows if row["wrong"] or row["failed"]] + list(lost)
    summary = f"{len(rows)} rows" + (f", wrong or failed: {', '.join(bad)}" if bad else "")
    unmeasured = [f"{label}: {reason}" for label, reason in content["missing"].items()]
    unmeasured += [f"{name}: {says.splitlines()[0]}" for name, says in lost.items()]
    body = [tables.describe_bench(content)]
    body += [f"### {name}\n\n{tables.as_code(says)}" for name, says in lost.items()]
    if not done.is_fine:
        summary += f"; {done.ended()}"
        body.append(tables.as_code(done.tail()))
    if done.is_late or done.status not in (0, 1):
        unmeasured.append(f"the rows after {rows[-1]['name']}: {done.ended()}")
    return Result("bench", done.is_fine and not bad, summary, "\n\n".join(body), unmeasured)


def check_tune(check):
    """Let clattn's tuner find tiles, for later steps and for the report."""
    if lacking := _lacking(check, {}):
        return Result("tune", False, lacking, unmeasured=[f"tuning: {lacking}"])
    command = [check.python, "-m", "clattn", "tune"]
    if not check.run("tune", [*command, "--help"], check.left()).is_fine:
        return Result("tune", None, "this clattn has no command tune")
    seconds = max(int(check.left()) - 5, 1)
    command += ["--device", check.options.device, "--seconds", str(seconds)]
    done = check.run("tune", command, check.left())
    found = sorted(Path(check.env["XDG_CACHE_HOME"]).glob("clattn/**/tuned/*.json"))
    if found:
        content = {file.name: json.loads(file.read_text()) for file in found}
        (check.kept / "tuned.json").write_text(json.dumps(content, indent=1) + "\n")
    summary = f"{len(found)} files of winners; {done.ended()}"
    return Result("tune", done.is_fine, summary, tables.as_code(done.tail(60)))


def check_profile(check):
    """Profile some calls, where NVIDIA's profiler is there."""
    profiler = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    lacking = _lacking(check, {"numpy": needs.BUILD["numpy"]}) or (
        "" if profiler else "there is no ncu"
    )
    if lacking:
        return Result("profile", None, lacking, unmeasured=[f"a profile: {lacking}"])
    wrong = wrong_variants(check.kept / "smoke.jsonl")
    names = [name for name in PROFILED if name.split()[0] not in wrong]
    lines = check.folder / "tmp" / "profiled.jsonl"
    command = [profiler, "--set", "full", "--target-processes", "all", check.python, "-m",
               "gpu_check.smoke", "--device", check.options.device, lines, *names]  # fmt: skip
    done = check.run("profile", command, check.left())
    (check.kept / "profile.txt").write_text(done.said)
    is_empty = "No kernels were profiled" in done.said
    summary = "ncu sees no kernel of OpenCL" if is_empty else done.ended()
    unmeasured = [f"a profile: {summary}"] if is_empty or not done.is_fine else []
    return Result("profile", None if is_empty else done.is_fine, summary,
                  tables.as_code(done.tail(40)), unmeasured)  # fmt: skip


def _lacking(check, wanted):
    """Return why a step cannot run; empty if it can."""
    if check.python is None:
        return check.python_version
    lacking = check.lacks(wanted | {"clattn": "0"})
    return f"not there: {', '.join(lacking)}" if lacking else ""


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


# Each step with its weight, of which its share of the time is made.
STEPS = {
    "devices": (check_devices, 10),
    "probes": (check_probes, 50),
    "build": (check_build, 110),
    "smoke": (check_smoke, 70),
    "programs": (check_programs, 60),
    "bench": (check_bench, 90),
    "tune": (check_tune, 60),
    "tests": (check_tests, 90),
    "profile": (check_profile, 20),
    "ptx": (check_ptx, 30),
}
REST = "tests"  # takes all the time that is left
