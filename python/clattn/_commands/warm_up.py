"""``python -m clattn warm-up``: build programs ahead of time."""

import argparse

import clattn
from clattn._arguments.dtypes import FLOATS
from clattn._caches.rows import CODES
from clattn._commands.common import CommandError, add_device, find_device, number
from clattn._host import files
from clattn.warming import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to `parser`."""
    add = parser.add_argument
    add("--dtypes", metavar="DTYPE", nargs="+", choices=FLOATS, default=["float32"],
        help=f"of {', '.join(FLOATS)} (default: float32)")  # fmt: skip
    add("--kinds", metavar="KIND", nargs="+", choices=KINDS, default=["prefill", "decode"],
        help=f"of {', '.join(KINDS)} (default: prefill decode)")  # fmt: skip
    add("--head-sizes", metavar="E", nargs="+", type=number(int, 1), default=[64, 128],
        help="sizes of a row of query, key and value (default: 64 128)")  # fmt: skip
    add("--codes", metavar="CODE", nargs="+", choices=tuple(CODES), default=[],
        help=f"of caches, besides dtypes, of {', '.join(CODES)} (default: none)")  # fmt: skip
    add_device(parser)
    add("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    device = find_device(arguments.device)
    try:
        seconds = clattn.warm_up(
            arguments.dtypes,
            arguments.kinds,
            device,
            head_sizes=arguments.head_sizes,
            codes=arguments.codes,
            progress=not arguments.quiet,
        )
    except ModuleNotFoundError as error:  # bfloat16 needs ml_dtypes
        raise CommandError(str(error)) from error
    folder = files.cache_folder()
    print(f"ready in {seconds:.1f} s; programs are kept in {folder or 'memory only'}")
    return 0
