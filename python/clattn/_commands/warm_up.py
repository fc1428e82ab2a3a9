"""``python -m clattn warm-up``: build programs ahead of time."""

import argparse
import sys

import clattn
from clattn._arguments.dtypes import FLOATS
from clattn._host import drivers
from clattn.warming import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add("--dtypes", metavar="DTYPE", nargs="+", choices=FLOATS, default=["float32"],
        help=f"of {', '.join(FLOATS)} (default: float32)")  # fmt: skip
    add("--kinds", metavar="KIND", nargs="+", choices=KINDS, default=["prefill", "decode"],
        help=f"of {', '.join(KINDS)} (default: prefill decode)")  # fmt: skip
    add("--head-sizes", metavar="E", nargs="+", type=_size, default=[64, 128],
        help="sizes of a row of query, key and value (default: 64 128)")  # fmt: skip
    add("--device", metavar="WORDS",
        help='where to run: "cpu", "gpu:1", or part of a device\'s name')  # fmt: skip
    add("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of 1 or more")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        seconds = clattn.warm_up(
            arguments.dtypes,
            arguments.kinds,
            arguments.device,
            head_sizes=arguments.head_sizes,
            progress=not arguments.quiet,
        )
    except ValueError as error:  # words, or CLATTN_DEVICE, that name no device
        print(f"clattn warm-up: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing; install it with: pip install {error.name}"
        print(f"clattn warm-up: {message}", file=sys.stderr)
        return 1
    folder = drivers.cache_folder()
    print(f"ready in {seconds:.1f} s; programs are kept in {folder or 'memory only'}")
    return 0
