# SPDX-License-Identifier: MIT
"""Kernels that may become clattn's, each with a prediction: are they right, and how fast?

python -m gpu_check.experiments --device WORDS --carried FOLDER FILE EXPERIMENT... writes lines of
JSON to the file: items.py
"""

import argparse
import json
import sys

from gpu_check import boxes, decoding, halves, items, prefill, rates
from gpu_check.experiment import prepare, run
from gpu_check.opencl import ROOT, Context, joined

EXPERIMENTS = {
    experiment.name: experiment
    for module in (rates, boxes, prefill, halves, decoding)
    for experiment in module.EXPERIMENTS
}


def listed():
    """Return what the report says of each experiment, in the order in which they run."""
    return [
        {"name": name, "claim": e.claim, "predicted": e.predicted, "unit": e.unit}
        for name, e in EXPERIMENTS.items()
    ]


def one(context, name, carried):
    experiment = EXPERIMENTS[name]
    return run(context, experiment, joined(ROOT, experiment.source()), carried)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print names and predictions as JSON")
    parser.add_argument("--prepare", action="store_true", help="keep clang's PTX in the folder")
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--carried", default="")
    parser.add_argument("file", nargs="?")
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT")
    arguments = parser.parse_args()
    if arguments.list:
        print(json.dumps(listed()))
        return
    if arguments.prepare:
        sys.exit(prepare(arguments.carried, EXPERIMENTS.values()))
    context = Context(arguments.device)
    items.work("experiments", arguments.file, arguments.names,
               lambda name: one(context, name, arguments.carried))  # fmt: skip


if __name__ == "__main__":
    main()
