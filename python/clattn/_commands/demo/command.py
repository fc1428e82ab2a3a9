"""``python -m clattn demo``: denoise a photograph with one attention call."""

import argparse
import sys
from pathlib import Path

import numpy as np

import clattn
from clattn._commands import timing
from clattn._commands.common import CommandError, add_device, find_device, need, number
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
        type=number(int, PATCH),
        default=128,
        help="edge of the crop in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--sigma",
        type=number(float, 1e-3),
        default=0.1,
        help="standard deviation of the noise added, where white is 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=number(int, 0),
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
    add_device(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit status."""
    need("demo", "matplotlib", "PIL")
    from clattn._commands.demo import pictures

    try:
        clean = pictures.load_image(arguments.image, arguments.size)
    except pictures.PictureError as error:
        raise CommandError(str(error), 2) from error
    device = find_device(arguments.device)

    noise = np.random.default_rng(arguments.seed).standard_normal(clean.shape, np.float32)
    noisy = clean + np.float32(arguments.sigma) * noise
    problem = non_local_means(noisy, arguments.sigma)
    count = len(problem.value)
    _line("device", f"{device.name} ({device.platform})")
    _line("query, key", f"{problem.query.shape} {problem.query.dtype}, the patches")
    _line("value", f"{problem.value.shape} {problem.value.dtype}, the pixels")
    _line("attn_mask", f"{problem.mask.shape} {problem.mask.dtype}")

    denoised, seconds = _measure(problem, device, clean, noisy)
    before, after = psnr(noisy, clean), psnr(denoised, clean)
    title = (
        f"Non-local means as one attention call: {count:,} pixels attend to {count:,}"
        f"\nclattn on {device.name}: {seconds * 1e3:.0f} ms"
    )
    panels = {
        f"noisy, {before:.1f} dB": noisy,
        f"denoised, {after:.1f} dB": denoised,
        "original": clean,
    }
    try:
        pictures.save_panels(arguments.output, title, panels)
    except OSError as error:
        raise CommandError(f"cannot write {arguments.output}: {error}") from error
    print(f"\nwrote {arguments.output}")
    return 0


def _measure(
    problem: Problem, device: clattn.Device, clean: FloatArray, noisy: FloatArray
) -> tuple[FloatArray, float]:
    """Print every figure; return the denoised picture and clattn's seconds."""
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
        of_torch = measuring.time_torch(problem, exact)
        if of_torch is not None:
            _print_timing(of_torch)
        show(3, "NumPy")
        _print_timing(measuring.time_numpy(problem, exact))
    return denoised, own.seconds


def _line(label: str, text: str) -> None:
    print(f"{label:<11} {text}", flush=True)


def _print_timing(timing: measuring.Timing) -> None:
    figures = f"{timing.name:<24} {timing.seconds * 1e3:>9.1f} {timing.error:>9.1e}"
    print(f"{figures}  {timing.note}".rstrip(), flush=True)
