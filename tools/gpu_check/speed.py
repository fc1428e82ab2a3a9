# SPDX-License-Identifier: MIT
"""Steps that measure: the benchmark, experiments, first calls, the tuner and a profile."""

import json
import shlex
import shutil
from pathlib import Path

from gpu_check import first_calls, needs, running, tables
from gpu_check.check import Result, describe_items, wrong_variants

# The rows that say most, of `bench --gpu`, in the order of what is worth most.
KEY_ROWS = ("f16-E128", "f16-E128-causal", "bf16-E128", "f16-E64", "decode-f16-gqa", "f32-E64",
            "backward-f16-E128-causal", "ragged-f16-E128", "decode-pages-16", "ragged-pages-16",
            "backward-f16-E64", "decode-ragged", "decode-int8")  # fmt: skip
CPU_SCALE = 64  # by which their lengths are divided on CPUs
ROW_SECONDS = 60  # without a new row, until a row is taken to hang
PROFILED = ("mma float16 causal", "decode_mma float16 groups", "tiled float32 causal")


def check_bench(check):
    """Measure key rows for GPUs, or those that are asked for, as far as time allows."""
    if why := check.why_not(needs.BENCH | {"numpy": needs.BUILD["numpy"]}):
        return Result("bench", False, why, unmeasured=[f"speed: {why}"])
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


def check_experiments(check):
    """Run kernels that may become clattn's, beside what was predicted of them."""
    if why := check.why_not({"numpy": needs.BUILD["numpy"]}):
        return Result("experiments", False, why, unmeasured=[f"experiments: {why}"])
    command = [check.python, "-m", "gpu_check.experiments"]
    asked = check.run("experiments-list", [*command, "--list"], 60)
    if not asked.is_fine:
        return Result("experiments", False, asked.ended(), tables.as_code(asked.tail()))
    listed = {row["name"]: row for row in json.loads(asked.said.splitlines()[-1])}
    command += ["--device", check.options.device, "--carried", check.carried]
    lines = check.run_items("experiments", command, list(listed), 45)
    result = describe_items("experiments", lines, list(listed))
    result.body = f"{tables.describe_experiments(listed, lines)}\n\n{result.body}"
    return result


def check_first_calls(check):
    """Time first calls with empty caches, with clattn's of programs, and with the driver's too."""
    if why := check.why_not({"numpy": needs.BUILD["numpy"]}):
        return Result("first_calls", False, why, unmeasured=[f"first calls: {why}"])
    caches = check.folder / "first_calls"
    shutil.rmtree(caches, ignore_errors=True)
    folders = dict.fromkeys(("XDG_CACHE_HOME", "POCL_CACHE_DIR", "CUDA_CACHE_PATH"), caches)
    names = first_calls.CALLS["cpu" if check.device.get("type") == "cpu" else "gpu"]
    command = [check.python, "-m", "gpu_check.first_calls", "--device", check.options.device]
    found, body = {}, []
    for state, variables in first_calls.STATES.items():
        done = check.run("first_calls", [*command, *names], check.left(), **folders, **variables)
        if not done.is_fine:
            body += [f"With {state} of the caches: {done.ended()}", tables.as_code(done.tail())]
            break
        found[state] = json.loads(done.said.splitlines()[-1])
    titles = ("ms of a first call; full caches:", *first_calls.REPORTED)
    body.insert(0, tables.make_table(titles, first_calls.rows_of(found)))
    is_fine = len(found) == len(first_calls.STATES)
    summary = f"{len(found)} of {len(first_calls.STATES)} processes"
    unmeasured = [] if is_fine else [f"first calls: {summary}"]
    return Result("first_calls", is_fine, summary, "\n\n".join(body), unmeasured)


def check_tune(check):
    """Let clattn's tuner find tiles, for later steps and for the report."""
    if why := check.why_not({}):
        return Result("tune", False, why, unmeasured=[f"tuning: {why}"])
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
    why = check.why_not({"numpy": needs.BUILD["numpy"]})
    why = why or ("" if profiler else "there is no ncu")
    if why:
        return Result("profile", None, why, unmeasured=[f"a profile: {why}"])
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
