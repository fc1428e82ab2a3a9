"""Reading and writing pictures, for ``python -m clattn demo``. Needs matplotlib."""

from pathlib import Path

import numpy as np
from matplotlib import cbook
from matplotlib.figure import Figure
from PIL import Image, ImageOps  # a dependency of matplotlib

from clattn._commands.demo.denoising import PATCH, FloatArray

DEFAULT_CENTRE = (204, 264)  # row and column of the face in matplotlib's photograph


class PictureError(Exception):
    """A file that is no picture, or too small a one."""


def load_image(path: Path | None, size: int) -> FloatArray:
    """Return a crop of at most `size` by `size` as RGB in the range 0 to 1.

    The crop is the centre of the picture in the file `path`. None: the face in the photograph
    that comes with matplotlib.
    """
    if path is None:
        path = Path(str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)))
        pixels, centre = _read_rgb(path), DEFAULT_CENTRE
    else:
        pixels = _read_rgb(path)
        centre = (pixels.shape[0] // 2, pixels.shape[1] // 2)
    height, width = pixels.shape[:2]
    if min(height, width) < PATCH:
        raise PictureError(f"{path} has {width}x{height} pixels; expected {PATCH}x{PATCH} or more")
    top = max(0, min(centre[0] - size // 2, height - size))
    left = max(0, min(centre[1] - size // 2, width - size))
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def _read_rgb(path: Path) -> FloatArray:
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
        if picture.mode.startswith(("I", "F")):
            return _single_channel(picture)
        # Transparent pixels become white.
        layer = picture.convert("RGBA")
        page = Image.new("RGBA", layer.size, "white")
        merged = Image.alpha_composite(page, layer).convert("RGB")
        return np.asarray(merged, np.float32) / 255
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PictureError(f"cannot read {path}: {error}") from error


def _single_channel(picture: Image.Image) -> FloatArray:
    """Return a picture of 16-bit, 32-bit or float grey values as RGB in the range 0 to 1."""
    white = np.float32(1 if picture.mode == "F" else 65535)
    grey = np.nan_to_num(np.asarray(picture, np.float32)) / white
    return np.repeat(np.clip(grey, 0, 1)[..., None], 3, axis=2)


def save_panels(path: Path, title: str, panels: dict[str, FloatArray]) -> None:
    """Write pictures side by side to the PNG `path`."""
    figure = Figure(figsize=(11, 4.3), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(panels))
    for axis, (name, image) in zip(axes, panels.items(), strict=True):
        axis.imshow(np.clip(image, 0, 1), interpolation="nearest")
        axis.set_title(name)
        axis.axis("off")
    figure.savefig(path, format="png")
