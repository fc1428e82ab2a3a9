"""``python -m clattn demo``: denoise a photograph with one attention call."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import clattn
from clattn._commands import timing
from clattn._commands.demo import measuring
from clattn._commands.demo.denoising import (
    PATCH,
    FloatArray,
    Problem,
    attention,
    non_local_means,
    psnr,
)
from clattn._host.facts import format_bytes
from clattn._host.progress import open_bar


class DemoError(Exception):
    """A message for the user, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's arguments to `parser`."""
    parser.add_argument(
        "image",
        metavar="IMAGE",
        nargs="?",
        type=Path,
        help="a picture, of which the centre is used (default: a photograph from matplotlib)",
    )
    parser.add_argument(
        "--size",
        metavar="N",
        type=_number(int, PATCH),
        default=128,
        help="edge of the crop in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--sigma",
        type=_number(float, 1e-3),
        default=0.1,
        help="standard deviation of the noise added, where white is 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=_number(int, 0),
        default=0,
        help="seed of the noise (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        type=Path,
        default=Path("demo.png"),
        help="the PNG to write (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="WORDS",
        help='where to run: "cpu", "gpu:1", or part of a device\'s name',
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    try:
        _run(arguments)
    except DemoError as error:
        print(f"clattn demo: {error}", file=sys.stderr)
        return error.status
    return 0


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """Return an argument's type: a finite number of at least `least`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number of {least} or more")
        return value

    return parse


def _choose_device(words: str | None) -> clattn.Device:
    try:
        if words is None:
            return clattn.get_default_device()
        with clattn.use_device(words) as device:
            return device
    except ValueError as error:  # words, or CLATTN_DEVICE, that name no device
        raise DemoError(str(error), 2) from error


def _run(arguments: argparse.Namespace) -> None:
    try:
        from clattn._commands.demo import pictures
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "PIL"):
            raise
        message = f'{error.name} is missing; install it with: pip install "clattn[demo]"'
        raise DemoError(message, 1) from None
    try:
        clean = pictures.load_image(arguments.image, arguments.size)
    except pictures.PictureError as error:
        raise DemoError(str(error), 2) from error
    device = _choose_device(arguments.device)

    noise = np.random.default_rng(arguments.seed).standard_normal(clean.shape, np.float32)
    noisy = clean + np.float32(arguments.sigma) * noise
    problem = non_local_means(noisy, arguments.sigma)
    count = len(problem.value)
    _line("device", f"{device.name} ({device.platform})")
    _line("query, key", f"{problem.query.shape} {problem.query.dtype}, the patches")
    _line("value", f"{problem.value.shape} {problem.value.dtype}, the pixels")
    _line("attn_mask", f"{problem.mask.shape} {problem.mask.dtype}")

    denoised, timing = _measure(problem, device, clean, noisy)
    before, after = psnr(noisy, clean), psnr(denoised, clean)
    title = (
        f"Non-local means as one attention call: {count:,} pixels attend to {count:,}"
        f"\nclattn on {device.name}: {timing.seconds * 1e3:.0f} ms"
    )
    panels = {
        f"noisy, {before:.1f} dB": noisy,
        f"denoised, {after:.1f} dB": denoised,
        "original": clean,
    }
    try:
        pictures.save_panels(arguments.output, title, panels)
    except OSError as error:
        raise DemoError(f"cannot write {arguments.output}: {error}", 1) from error
    print(f"\nwrote {arguments.output}")


def _measure(
    problem: Problem, device: clattn.Device, clean: FloatArray, noisy: FloatArray
) -> tuple[FloatArray, measuring.Timing]:
    """Print every figure; return the denoised picture and clattn's time."""
    with open_bar(4, sys.stdout) as show:
        show(0, "float64 NumPy")
        exact = measuring.exact_rows(problem)
        show(1, "clattn")
        first = measuring.time_first_call(problem, device)
        denoised, grown = timing.measure_memory(lambda: attention(problem, device))
        denoised = denoised.reshape(clean.shape)
        own = measuring.time_clattn(problem, device, exact)
        _line("error", f"{own.error:.1e} at most, {len(exact.rows)} rows against float64 NumPy")
        _line("PSNR", f"{psnr(noisy, clean):.2f} dB noisy, {psnr(denoised, clean):.2f} dB denoised")
        used = "not measured" if grown is None else f"at most {grown / 2**20:.1f} MiB more"
        everything = format_bytes(4.0 * len(problem.value) ** 2)
        _line("memory", f"{used} during the call; the scores alone would be {everything}")
        _line("first call", f"{first * 1e3:.0f} ms, opening the device and building the kernel")

        print(f"\n{'':<24} {'ms':>9} {'error':>9}")
        _print_timing(own)
        show(2, "torch")
        _print_timing(measuring.time_torch(problem, exact))
        show(3, "NumPy")
        _print_timing(measuring.time_numpy(problem, exact))
    return denoised, own


def _line(label: str, text: str) -> None:
    print(f"{label:<11} {text}", flush=True)


def _print_timing(timing: measuring.Timing | None) -> None:
    if timing is not None:
        figures = f"{timing.name:<24} {timing.seconds * 1e3:>9.1f} {timing.error:>9.1e}"
        print(f"{figures}  {timing.note}".rstrip(), flush=True)
