"""How time and memory of one call grow with S, for ``bench --scaling``.

Each figure comes from a process of its own: memory that an allocator kept from an earlier
call would hide how much this call takes.
"""

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import clattn
from clattn._commands.bench.contest import clattn_call, peer_classes
from clattn._commands.bench.exact import exact_rows
from clattn._commands.bench.peers import Call
from clattn._commands.bench.rows import Problem, Row, draw
from clattn._commands.timing import measure_memory, shortest

SMALLEST, LARGEST = 128, 32768
MOST_SECONDS = 60.0  # of a call
MOST_MEMORY = 0.6  # of the free memory
WARM_ROWS = 512  # of a call that loads everything
SECONDS = 1.0  # of calls whose shortest counts


@dataclass(frozen=True)
class Cost:
    """The cost of one call; memory in bytes beyond the inputs, None: not known."""

    seconds: float
    memory: int | None
    error: float
    allowed: float


@dataclass
class Growth:
    """The costs of one implementation by S, as far as time and memory allow."""

    kind: Literal["device", "peer"]
    name: str  # words for a device, or a peer's label
    costs: dict[int, Cost] = field(default_factory=dict)
    ended: str = ""  # why there are no more

    @property
    def label(self) -> str:
        """The name in tables and charts."""
        return self.name if self.kind == "peer" else f"clattn {self.name}"

    def wrong(self) -> list[int]:
        """Return each S where a result of clattn's is wrong."""
        costs = self.costs.items() if self.kind == "device" else ()
        return [size for size, cost in costs if not cost.error <= cost.allowed]


def sizes_up_to(largest: int) -> list[int]:
    """Return the powers of two that are measured."""
    return [1 << n for n in range(SMALLEST.bit_length() - 1, largest.bit_length())]


def find_growths(devices: Sequence[str]) -> list[Growth]:
    """Return the implementations that can be measured, without costs so far."""
    labels = [make.label for make in peer_classes() if make.counts]
    return [Growth("device", words) for words in devices] + [Growth("peer", n) for n in labels]


def measure_next(growth: Growth, size: int) -> None:
    """Measure an implementation at a size, twice the one before, unless it has ended."""
    reason = growth.ended or _too_much(list(growth.costs.values()))
    if not reason:
        command = [sys.executable, "-m", "clattn._commands.bench.scaling"]
        command += [growth.kind, growth.name, str(size)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            growth.costs[size] = Cost(**json.loads(done.stdout.splitlines()[-1]))
            return
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    growth.ended = growth.ended or f"no S = {size} and more: {reason}"


def _too_much(costs: Sequence[Cost]) -> str:
    """Say whether twice the S would take too much time or memory: four times as much."""
    if not costs:
        return ""
    if 4 * costs[-1].seconds > MOST_SECONDS:
        return f"a call would take more than {MOST_SECONDS:.0f} s"
    memory, free = costs[-1].memory, _free_memory()
    if memory is not None and free is not None and 4 * memory > MOST_MEMORY * free:
        return f"a call could take more than {4 * memory / 2**30:.0f} GiB of memory"
    return ""


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def main(kind: str, name: str, size: int) -> int:
    """Print the cost of one call of a "device" or "peer" as JSON."""
    with ExitStack() as stack:
        prepare: Callable[[Problem], Call | None]
        if kind == "peer":
            prepare = next(make(stack) for make in peer_classes() if make.label == name).prepare
        else:
            device = stack.enter_context(clattn.use_device(name))
            prepare = functools.partial(clattn_call, device=device)
        # A first call loads threads, kernels and libraries before memory is measured. clattn's
        # kernel depends on whether there are few queries, and whether a cache holds the keys.
        rows = SMALLEST if kind == "peer" else min(size, WARM_ROWS)
        keys = SMALLEST if kind == "peer" else size
        warm = prepare(draw(Row("warm", (1, 8, 8, rows, keys, 64))))
        if warm is None:
            print("not supported", file=sys.stderr)
            return 1
        warm.run()
        problem = draw(Row("scaling", (1, 8, 8, size, size, 64)))
        call = prepare(problem)
        assert call is not None
        _, memory = measure_memory(call.run)
        seconds = shortest(call.run, SECONDS, 1, math.inf)
        exact = exact_rows(problem)
        cost = Cost(seconds, memory, exact.error(call.result()), exact.allowed)
    print(json.dumps(asdict(cost)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
