# SPDX-License-Identifier: MIT
"""Runs items one after the other in a process that is started again after a fault.

A file has a line of JSON when an item starts and when it ends. So a crash or a hang costs one item,
and a later run goes on behind the items that have ended.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from gpu_check.running import kill_group

FAULT = "CLATTN_CHECK_FAULT"  # for tests: "smoke=crash,tune=hang,probes/launch=fail"


def inject(place):
    """Crash, hang or fail here, if the environment says so."""
    for word in os.environ.get(FAULT, "").split(","):
        where, _, kind = word.partition("=")
        if where == place and kind == "crash":
            os.abort()
        if where == place and kind == "hang":
            time.sleep(3600)
        if where == place:
            raise RuntimeError(f"a fault for tests: {word}")


class Skipped(Exception):
    """An item that this device or machine cannot run, with the reason."""


def write(path, **line):
    with Path(path).open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path):
    """Return the lines of a file, a dict each; a line that was cut off is left out."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def ended(path):
    """Return the lines of the items that have ended, by name."""
    return {line["item"]: line for line in read(path) if line["kind"] != "start"}


def work(step, path, names, function):
    """In the process of its own: run items by a function of the name, which returns (kind, text).

    After an error the process ends, because a device's fault stays with its process.
    """
    for name in names:
        write(path, kind="start", item=name)
        start = time.monotonic()
        try:
            inject(f"{step}/{name}")
            kind, *more = function(name)
        except Skipped as skipped:
            kind, more = "left out", [str(skipped)]
        except Exception as error:
            write(path, kind="failed", item=name, says=f"{type(error).__name__}: {error}")
            traceback.print_exc()
            sys.exit(1)
        seconds = round(time.monotonic() - start, 3)
        write(path, kind=kind, item=name, says=more[0], seconds=seconds, **dict(*more[1:]))


def supervise(path, names, start, seconds_each, left):
    """Run all items that have not ended, as long as time is left.

    `start` starts a process for names, and returns it with its log.
    """
    while (rest := [n for n in names if n not in ended(path)]) and left() > 1:
        process, log = start(rest)
        stopped = wait(process, path, seconds_each, left)
        kill_group(process)
        if process.returncode == 0 and not stopped and rest[0] in ended(path):
            continue
        lines = read(path)
        begun = lines[-1] if lines and lines[-1]["kind"] == "start" else None
        if stopped == "no time is left":
            return
        how = stopped or _describe(process.returncode)
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-6:])
        if begun:
            write(path, kind="failed", item=begun["item"], says=f"{how}\n{tail}".strip())
        elif not (lines and lines[-1]["kind"] == "failed"):
            for name in rest:  # the process does not even begin
                write(path, kind="failed", item=name, says=f"{how}\n{tail}".strip())


def _describe(status):
    return f"ended by signal {-status}" if status < 0 else f"exit status {status}"


def wait(process, path, seconds_each, left):
    """Wait for a process; kill it where an item takes too long. Return why, or ""."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = path.stat().st_size if path.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        is_late = time.monotonic() - since > seconds_each
        if is_late or left() <= 1:
            process.kill()
            process.wait()
            return f"stopped after {seconds_each:.0f} s" if is_late else "no time is left"
        time.sleep(0.05)
    return ""
