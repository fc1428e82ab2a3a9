"""The command line: ``python -m clattn`` and its commands."""

import argparse
import os
import sys
from collections.abc import Sequence

import clattn
from clattn import _core
from clattn._commands import doctor, listing, tune, warm_up
from clattn._commands.bench import command as bench
from clattn._commands.common import CommandError
from clattn._commands.demo import command as demo
from clattn._host import drivers

INTERRUPTED = 130  # the exit status of a shell's command after Ctrl-C

# By name: the module, a line for the list of commands, and what its own help says.
_COMMANDS = {
    "demo": (demo, "denoise a photograph with one attention call",
             "Denoise a photograph by non-local means, as one attention call."),
    "bench": (bench, "time attention beside other implementations",
              "Time attention beside other implementations that are installed, in turn."),
    "tune": (tune, "find the best tiles for a GPU",
             "Time tiles of kernels on a GPU, and keep those that beat the defaults."),
    "warm-up": (warm_up, "build programs ahead of time",
                "Build the programs of later calls, and keep them on disk."),
    "doctor": (doctor, "examine drivers, devices and the cache, for a report of a problem",
               "Say what there is, try a call on each device, and say what to do."),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m clattn",
        description="Attention on OpenCL devices. Without a command: list the devices.",
    )
    parser.add_argument("--version", action="version", version=f"clattn {clattn.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, (module, line, description) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=line, description=description))
    parser.set_defaults(run=listing.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return the exit status.

    0: all is well. 1: something failed, or a result was wrong. 2: wrong arguments. 130: Ctrl-C.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        drivers.check_environment()
    except ValueError as error:
        parser.error(str(error))
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        message, status = str(error), error.status
    except _core.SettingError as error:  # of a variable that is read when OpenCL is opened
        message, status = str(error), 2
    except clattn.DeviceError as error:
        message, status = str(error), 1
    except MemoryError as error:
        message, status = f"there is not enough memory: {error}".rstrip(": "), 1
    except KeyboardInterrupt:
        message, status = "interrupted", INTERRUPTED
    print(f"clattn {arguments.command or ''}".rstrip() + f": {message}", file=sys.stderr)
    return status


def run() -> int:
    """Run the command of this process, whose reader, such as ``head``, may leave early."""
    try:
        return main()
    except BrokenPipeError:
        # Python flushes the stream again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
