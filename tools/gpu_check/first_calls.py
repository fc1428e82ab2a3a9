# SPDX-License-Identifier: MIT
"""Times the first call of each variant, in a process whose caches others have filled or not.

python -m gpu_check.first_calls --device WORDS CALL... prints a line of JSON: by the name of a call,
seconds of the first one less those of the second; "device" has those of opening OpenCL.
"""

import argparse
import json
import os
import time

from gpu_check import smoke

# Calls of smoke.py, each the first one of its programs.
CALLS = {
    "gpu": ("mma float16 causal", "decode_mma float16 groups", "tiled float32 causal",
            "decode_gpu float32 groups"),
    "cpu": ("cpu float32 causal", "decode_cpu float32 groups"),
}  # fmt: skip
# Processes one after the other, in the same folders: the caches that are full, and variables. The
# third one fills the driver's cache with what it makes of clattn's programs.
WITHOUT_DRIVERS = {"CUDA_CACHE_DISABLE": "1"}
STATES = {
    "none": WITHOUT_DRIVERS,
    "clattn's": WITHOUT_DRIVERS,
    "clattn's, filling the driver's": {},
    "both": {},
}
REPORTED = ("none", "clattn's", "both")


def seconds_of(name, device):
    """Return how much longer the first call takes than the second one."""
    import clattn

    word, dtype, case = name.split()
    arrays, options = smoke.problem(word, dtype, case)
    clattn._core.force(word)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        clattn.scaled_dot_product_attention(*arrays, device=device, **options)
        times.append(time.perf_counter() - start)
    return times[0] - times[1]


def seconds_to_open(device):
    """Return the seconds in which clattn opens OpenCL and finds the device."""
    import clattn

    start = time.perf_counter()
    clattn._core.find_device(device)
    return time.perf_counter() - start


def rows_of(found):
    """Return the rows of a table: a call, and for each reported state its milliseconds."""
    calls = dict.fromkeys(call for seconds in found.values() for call in seconds)
    reported = [found.get(state, {}) for state in REPORTED]
    return [
        (call, *(f"{1e3 * seconds[call]:.0f}" if call in seconds else "" for seconds in reported))
        for call in calls
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("names", nargs="+", metavar="CALL")
    arguments = parser.parse_args()
    os.environ.pop("CLATTN_KERNEL", None)  # calls name their variants
    found = {"device": seconds_to_open(arguments.device)}
    found |= {name: seconds_of(name, arguments.device) for name in arguments.names}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
