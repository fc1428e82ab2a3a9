# SPDX-License-Identifier: MIT
"""What the steps of a check share: options, folders, the time that is left, and their results."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass, field

import cuda_machine

from gpu_check import drivers, items, needs, running, tables

CODE = "csrc", "kernels", "python", "tests", "tools", "cmake", "pyproject.toml", "CMakeLists.txt"


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

    def why_not(self, wanted):
        """Return why a step that needs packages cannot run; empty if it can."""
        if self.python is None:
            return self.python_version
        lacking = self.lacks(wanted | {"clattn": "0"})
        return f"not there: {', '.join(lacking)}" if lacking else ""

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
