# SPDX-License-Identifier: MIT
"""python -m clattn bench --rows serve: its rows, the check of results, and its tables."""

import json

import numpy as np
import pytest
from clattn._commands.bench import command, limits
from clattn._commands.bench.exact import exact_rows
from clattn._commands.bench.rows import ROWS, SERVE_TITLES, draw
from clattn._commands.bench.serving import SERVE_ROWS, serve_calls
from clattn._commands.main import main
from references.attention import attention
from support.loops import looped
from support.ragged import seen

SMALL = {row.name: row.scaled(64) for row in SERVE_ROWS}


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_the_rows():
    """Each has a title. None is measured without being asked for."""
    assert [row.name for row in SERVE_ROWS] == list(SERVE_TITLES)
    assert {row.name for row in SERVE_ROWS}.isdisjoint(row.name for row in ROWS)
    assert command._rows("serve") == command._rows("serve*") == list(SERVE_ROWS)
    for row in SERVE_ROWS[:4]:
        keys = [S for _, S in row.lengths]
        assert (len(keys), min(keys), max(keys)) == (64, 16, 4096)
    for row in SERVE_ROWS[7:]:
        assert 2**26 <= row.bytes_read <= 2**26 * 1.07


def test_what_a_row_counts():
    """Pairs, bytes, and the keys that rows see."""
    for row in SMALL.values():
        masks = [seen(L, S, "lower_right") for L, S in row.lengths]
        assert row.pairs == row.shape[1] * sum(int(mask.sum()) for mask in masks)
        whole, i, j = np.zeros(row.shape[3:5], bool), 0, 0
        for mask in masks:
            whole[i : i + mask.shape[0], j : j + mask.shape[1]] = mask
            i, j = i + mask.shape[0], j + mask.shape[1]
        np.testing.assert_array_equal(row.attended(), whole)
        np.testing.assert_array_equal(row.attended(np.array([i - 1])), whole[i - 1 :])
    _, _, Hk, _, S, E = SMALL["serve-int8-E64"].shape
    assert SMALL["serve-int8-E64"].bytes_read == 2 * S * Hk * (E + 4)
    assert SMALL["serve-float8-E64"].bytes_read == 2 * S * Hk * E
    _, _, Hk, _, S, E = SMALL["serve-decode"].shape
    assert SMALL["serve-decode"].bytes_read == 8 * S * Hk * E


@looped("name", SMALL)
def test_all_ways_have_the_same_result(first_device, name):
    """That of the reference, of each sequence; a wrong one is noticed."""
    row = SMALL[name]
    problem = draw(row)
    exact = exact_rows(problem)
    call, others = serve_calls(problem, first_device)
    got = call.result()
    assert exact.is_right(got)
    wrong = got.copy()
    wrong[..., -1, -1] += 0.01
    assert not exact.is_right(wrong)
    ends = row.ends
    right = []
    for b in range(len(row.lengths)):
        rows, keys = (slice(*of[b : b + 2]) for of in ends)
        arrays = problem.query[0, :, rows], *(a[0, :, keys] for a in (problem.key, problem.value))
        mask = seen(*row.lengths[b], "lower_right")
        right.append(attention(*arrays, attn_mask=mask, enable_gqa=True)[0].swapaxes(0, 1))
    for other, call in others.items():
        found = call.run()
        if other == "each":
            found = np.concatenate([np.asarray(part)[0] for part in found])
        elif other == "padded":
            found = np.concatenate([np.asarray(part)[-len(rows) :] for part, rows in
                                    zip(found, right, strict=True)])  # fmt: skip
        elif other == "contiguous":
            found = found[:, :, 0]
        allowed = 5e-3 if row.code else 1e-5  # float16's keys are rounded once more
        np.testing.assert_allclose(found.astype(float), np.concatenate(right), atol=allowed)


def test_rows_on_a_device(device, tmp_path, capsys, monkeypatch):
    """The table, the JSON and the Markdown."""
    pytest.importorskip("pyopencl")
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)
    file, table = tmp_path / "bench.json", tmp_path / "bench.md"
    status = bench("--rows", "serve-mixed", "serve-pages-16", "--scale", 64, "--rounds", 1,
                   "--device", device.platform, "--name", "this", "--json", file,
                   "--markdown", table)  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    assert max(map(len, said.splitlines())) <= 100
    content = json.loads(file.read_text())
    [words] = content["devices"]
    beside = [row["results"][words]["beside_seconds"] for row in content["rows"]]
    assert [list(times) for times in beside] == [["each", "padded"], ["contiguous"]]
    assert all(seconds > 0 for times in beside for seconds in times.values())
    lines = table.read_text().splitlines()
    assert lines[0] == "| call | this, ms | beside each | beside padded | beside contiguous |"
    assert lines[3].startswith(f"| {SERVE_TITLES['serve-pages-16']} | ")
    assert lines[3].count("|  |") == 1, "nothing in the two columns of other rows"
    assert bench("--from", file) == 0
    assert capsys.readouterr().out == table.read_text()


def test_rows_of_serving_stand_alone(capsys):
    assert bench("--rows", "serve", "tiny") == 2
    assert "the rows of 'serve' are measured without others" in capsys.readouterr().err
    assert bench("--rows", "serve", "train") == 2
    assert bench("--rows", "serve", "--list") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(SERVE_TITLES)
