"""What the commands share: their arguments, and errors in words."""

import argparse
import importlib
import math
from collections.abc import Callable
from typing import TypeVar

from clattn import Device, _core
from clattn._host.extras import how_to_install

Number = TypeVar("Number", int, float)


class CommandError(Exception):
    """A message for the user and the exit status: 2 for wrong arguments, 1 for all else."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--device`` to a parser."""
    what = 'where to run: "cpu", "gpu:1", or part of a device\'s name'
    parser.add_argument("--device", metavar="WORDS", help=what)


def find_device(words: str | None) -> Device:
    """Return the device that the words name; None: the default device.

    Raises
    ------
    CommandError
        The words, or those of ``CLATTN_DEVICE``, name no device.
    DeviceError
        No device is usable.
    """
    try:
        return _core.find_device(words)
    except ValueError as error:
        raise CommandError(str(error), 2) from error


def number(kind: type[Number], least: Number, *, above: bool = False) -> Callable[[str], Number]:
    """Return the type of an argument: a finite number of at least `least`, or above it."""
    what = "a whole number" if kind is int else "a number"
    range_ = f"above {least}" if above else f"of {least} or more"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value < math.inf or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r}; expected {what} {range_}")
        return value

    return parse


def need(extra: str, *packages: str) -> None:
    """Import packages, which an extra of clattn brings.

    Raises
    ------
    CommandError
        One is not installed.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            message = f"{error.name} is missing; install it with: {how_to_install(extra)}"
            raise CommandError(message) from None
