# SPDX-License-Identifier: MIT
"""tools/simulate_float32.py: how a matrix unit adds, and what becomes of attention's errors."""

import numpy as np
import pytest
import simulate_float32 as simulation

H100, V100 = simulation.FORMS[:2]


@pytest.mark.parametrize(("form", "product", "added"), [
    (H100, 2.0**-25, 16 * 2.0**-25),  # whole units
    (H100, 2.0**-26, 0),  # each is cut off before it is added
    (H100, 1.5 * 2.0**-25, 16 * 2.0**-25),
    (H100, -(2.0**-26), 0),  # towards zero
    (H100, 2.0**-29, 0),
    (V100, 2.0**-24, 0),
    (V100, 2.0**-23, 16 * 2.0**-23),
])  # fmt: skip
def test_sums_are_cut_off(form, product, added):
    a, b = np.full((1, 16), product), np.ones((16, 1))
    assert simulation.add_products(np.ones((1, 1)), a, b, form) == 1 + added


def test_a_sum_is_cut_off_as_a_float():
    a, b = np.full((1, 1), 2.0**-24), np.ones((1, 1))
    assert simulation.add_products(np.ones((1, 1)), a, b, H100) == 1


def test_halves_hold_numbers():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 2**14
    for dtype in ("float16", "tf32"):
        high, low = simulation.split(x, dtype)
        assert np.abs(high + low - x).max() <= np.abs(x).max() * 2.0**-23
        assert np.abs(high - x).max() > np.abs(x).max() * 2.0**-14


def test_sums_of_blocks_are_exact_enough():
    problems = {name: arrays for name, *arrays in simulation.problems(4, 1024, 64)}
    shares = {form.name: simulation.share(form, problems["offset"]) for form in simulation.FORMS}
    assert shares["float16 by blocks"] < 1
    assert shares["TF32 by blocks"] < 1
    assert shares["float16, all in the unit"] > 1
    assert shares["TF32, all in the unit"] > 1
