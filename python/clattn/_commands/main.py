"""The command line: ``python -m clattn`` and its commands."""

import argparse
import os
import sys
from collections.abc import Sequence

import clattn
from clattn._commands import doctor, listing, warm_up
from clattn._commands.bench import command as bench
from clattn._commands.demo import command as demo
from clattn._commands.tune import command as tune
from clattn._host import drivers


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m clattn",
        description="Attention on OpenCL devices. Without a command: list the devices.",
    )
    parser.add_argument("--version", action="version", version=f"clattn {clattn.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="denoise a photograph with one attention call",
            description="Denoise a photograph by non-local means, as one attention call.",
        )
    )
    bench.add_arguments(
        commands.add_parser(
            "bench",
            help="time attention beside other implementations",
            description="Time attention beside other implementations that are installed, in turn.",
        )
    )
    tune.add_arguments(
        commands.add_parser(
            "tune",
            help="find the best tiles for a device",
            description="Time tiles of kernels on a device, and keep those that beat the defaults.",
        )
    )
    warm_up.add_arguments(
        commands.add_parser(
            "warm-up",
            help="build programs ahead of time",
            description="Build the programs of later calls, and keep them on disk.",
        )
    )
    doctor.add_arguments(
        commands.add_parser(
            "doctor",
            help="examine drivers, devices and the cache, for a report of a problem",
            description="Say what there is, try a call on each device, and say what to do.",
        )
    )
    parser.set_defaults(run=listing.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return the exit status."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        drivers.check_environment()
    except ValueError as error:
        parser.error(str(error))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except clattn.DeviceError as error:
        print(error, file=sys.stderr)
        return 1
    return status


def run() -> int:
    """Run the command of this process, whose reader, such as ``head``, may leave early."""
    try:
        return main()
    except BrokenPipeError:
        # Python flushes the stream again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
