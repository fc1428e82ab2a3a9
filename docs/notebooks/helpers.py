# SPDX-License-Identifier: MIT
"""What the notebooks share: where outputs were made, shortest times, and pictures of mods."""

import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from platform import python_version

import clattn
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, PowerNorm

BLUE_GREY_RED = LinearSegmentedColormap.from_list("added", ["tab:blue", "0.85", "tab:red"])


def print_machine(*packages: str) -> None:
    """Print the device, its driver, the versions and the date of the outputs below."""
    device = clattn.get_default_device()
    print(f"{device.name}, {device.compute_units} compute units, {device.platform}")
    print(f"driver {device.driver_version}, {date.today()}")
    others = [f"{name} {version(name)}" for name in ("numpy", *packages)]
    print(", ".join([f"clattn {clattn.__version__}", f"Python {python_version()}", *others]))


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call needs."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def shortest(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest seconds of each call.

    The calls take turns, so that other work of the machine disturbs all. The first call of each is
    not measured: it builds kernels, or loads them. Nor is the first of each turn, during which
    threads of the call before may still be awake.
    """
    for call in calls.values():
        call()
    best = dict.fromkeys(calls, np.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            best[name] = min(best[name], seconds_of(call), seconds_of(call))
    return best


def weights_by_definition(
    query: np.ndarray,
    key: np.ndarray,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what mods add to the scores, and the weights, both (B, H, L, S) in float64.

    Added is -inf where the mods exclude a key.
    """
    scores = query.astype(np.float64) @ key.mT / np.sqrt(query.shape[-1])
    indexes = np.ogrid[tuple(slice(size) for size in scores.shape)]
    changed = scores if score_mod is None else score_mod(scores, *indexes)
    if mask_mod is not None:
        changed = np.where(mask_mod(*indexes), changed, -np.inf)
    most = changed.max(axis=-1, keepdims=True)
    weights = np.exp(changed - most)
    sink = 0 if sinks is None else np.exp(sinks[:, None, None] - most)
    return changed - scores, weights / (weights.sum(axis=-1, keepdims=True) + sink)


def draw_mods(added: np.ndarray, weights: np.ndarray) -> None:
    """Draw what mods add to the scores, (L, S), and the weights, (L, S), in one scale for all."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3.6), sharey=True, layout="constrained", dpi=100
    )
    added, weights = np.where(added == -np.inf, np.nan, (added, weights))  # NaN is white
    image = left.imshow(added, BLUE_GREY_RED, vmin=-4, vmax=4)
    figure.colorbar(image, ax=left, extend="both", shrink=0.8, pad=0.03)
    left.set(title="added to the score", xlabel="key", ylabel="query")
    image = right.imshow(weights, norm=PowerNorm(0.5, vmin=0, vmax=1))
    figure.colorbar(image, ax=right, shrink=0.8, pad=0.03)
    right.set(title="weight", xlabel="key")
    plt.show()
