# SPDX-License-Identifier: MIT
"""python -m clattn bench --gpu: its rows at small sizes on every device, and torch's backends."""

import json
import time
from contextlib import ExitStack

import clattn
import numpy as np
import pytest
from clattn._commands.bench import command, contest, exact, limits, peers, torch_peers
from clattn._commands.bench.exact_gradients import exact_gradients
from clattn._commands.bench.gpu import ALL_GPU_ROWS, BACKWARD_ROWS, SEQUENCE_ROWS
from clattn._commands.bench.rows import GPU_ROWS, ROWS, Row, draw
from clattn._commands.main import main

MIB = 1 << 20
HALVES = ("float16", "bfloat16")


@pytest.fixture
def no_peers(monkeypatch):
    """Limits in no time, and nothing to compare with."""
    monkeypatch.setattr(limits, "READ_BYTES", MIB)
    monkeypatch.setattr(limits, "LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(contest, "peer_classes", lambda on_gpu: [])
    monkeypatch.setattr(torch_peers, "find_product", lambda: None)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


# --- rows ------------------------------------------------------------------------------------


def test_the_rows_are_what_gpus_are_judged_by():
    have = {(r.dtype, r.shape[3], r.shape[5], r.is_causal) for r in GPU_ROWS if r.mask is None}
    for dtype in HALVES:
        assert {(dtype, 8192, E, causal) for E in (64, 128) for causal in (False, True)} <= have
    assert {("float16", 2048, 64, False), ("float16", 2048, 128, False)} <= have
    assert any(dtype == "float32" and L > 1 for dtype, L, _, _ in have)
    for row in GPU_ROWS:
        _, Hq, Hk, L, _, _ = row.shape
        assert row.on_device == (not row.name.endswith("-host"))
        assert ("gqa" in row.name) == (Hq != Hk) or row.name == "decode-64M"
        if row.limit == "read":
            assert L <= 8
            assert row.bytes_read >= 64 * MIB
        else:
            assert row.limit == ("product" if row.dtype in HALVES else "fma")
    names = [row.name for row in (*ROWS, *ALL_GPU_ROWS)]
    assert len({*names}) == len(names)


def test_rows_of_backward_passes_and_sequences():
    have = {(row.dtype, row.shape[5], row.is_causal) for row in BACKWARD_ROWS}
    assert have == {(t, E, causal) for t in HALVES for E in (64, 128) for causal in (False, True)}
    assert all(row.trains == "backward" and row.flop == row.backward_flop for row in BACKWARD_ROWS)
    for row in SEQUENCE_ROWS:
        assert row.on_device and row.shape[3:5] == tuple(map(sum, zip(*row.lengths, strict=True)))
        assert (row.limit == "read") == all(rows == 1 for rows, _ in row.lengths)
        assert row.limit != "read" or row.bytes_read >= 128 * MIB  # more than a cache holds
    assert {row.page_size for row in SEQUENCE_ROWS} == {0, 16, 64, 256}
    assert {row.code for row in SEQUENCE_ROWS} == {"", "int8", "float8_e4m3fn"}


def test_rows_scaled_down():
    row = Row("a", (8, 32, 8, 4096, 8192, 128), "float16", is_causal=True, window=512)
    assert row.scaled(1) == row
    small = row.scaled(64)
    assert small.shape == (2, 32, 8, 64, 128, 128)
    assert (small.dtype, small.window, small.is_causal) == ("float16", 16, True)
    assert row.scaled(4096).shape[3:5] == (16, 16)
    assert Row("b", (1, 8, 8, 1, 8192, 64)).scaled(64).shape == (1, 8, 8, 1, 128, 64)


# --- time ------------------------------------------------------------------------------------


def test_calls_that_are_waited_for_together():
    asked = []

    def run_some(count):
        asked.append(count)
        time.sleep(0.002 * count)

    call = peers.repeated(run_some, lambda: None)
    call.run()
    assert asked == [1, 1, call.count]
    assert 1 < call.count <= 6
    assert peers.repeated(lambda count: time.sleep(0.03), lambda: None).count == 1
    assert peers.repeated(lambda count: None, lambda: None).count == peers.MOST_CALLS


def test_the_time_of_a_call_is_its_share(device, monkeypatch, no_peers):
    """Of ten calls that take 20 ms and a wait of 10 ms."""
    call = peers.Call(lambda: time.sleep(0.03), lambda: None, 10)
    monkeypatch.setattr(contest, "clattn_call", lambda problem, device: call)
    monkeypatch.setattr(exact.Exact, "_errors", lambda self, result: np.zeros(1))
    row = Row("a", (1, 1, 1, 8, 8, 16), on_device=True)
    rivals = contest.Contestants({"d": device}, [], {"d": limits.Limits(device)}, {})
    measured = contest.measure(row, rivals, 1)
    assert 0.003 <= measured.seconds["d"] < 0.03
    assert measured.rate("d") == row.flop / measured.seconds["d"]


# --- the command -----------------------------------------------------------------------------


def test_rows_on_a_device(device, tmp_path, capsys, monkeypatch, no_peers):
    """Tensors go in, host arrays where the row says so; times, rates and errors come out."""
    attend, kinds = clattn.scaled_dot_product_attention, set()

    def watch(query, *args, **options):
        kinds.add((type(query), query.shape))
        return attend(query, *args, **options)

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", watch)
    file = tmp_path / "bench.json"
    rows = ("f16-E128-2k", "f16-E128-2k-host", "decode-64M", "f32-E64-causal")
    status = bench("--gpu", "--scale", 64, "--rows", *rows, "--rounds", 1,
                   "--device", device.platform, "--json", file)  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0
    assert "TFLOP/s" in said and "GB/s" in said
    content = json.loads(file.read_text())
    assert [row["name"] for row in content["rows"]] == [*rows]  # in the order of --rows
    [words] = content["devices"]
    for row in content["rows"]:
        result = row["results"][words]
        work = row["bytes_read"] if row["limit"] == "read" else row["flop"]
        assert result["rate"] == pytest.approx(work / result["seconds"])
        assert 0 < result["error"] <= row["allowed_error"]
        assert (result["limit_share"] is None) == (row["limit"] == "product")
        assert row["wrong"] == row["notes"] == [] and row["failed"] == {}
    prefill = (2, 16, 32, 128)
    assert {(clattn.Tensor, prefill), (np.ndarray, prefill)} <= kinds
    assert {kind for kind, shape in kinds if shape != prefill} == {clattn.Tensor}


def test_rows_of_each_kind_are_measured_together(first_device, tmp_path, capsys, no_peers):
    """A backward pass, packed keys, pages beside contiguous keys, codes beside float16."""
    file = tmp_path / "bench.json"
    rows = ("f16-E64", "backward-f16-E64-causal", "ragged-f16-E64", "decode-pages-16",
            "decode-int8")  # fmt: skip
    assert bench("--gpu", "--scale", 256, "--rows", *rows, "--rounds", 1,
                 "--device", first_device.platform, "--json", file) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "contiguous" in said and "float16" in said
    content = json.loads(file.read_text())
    found = {row["name"]: row for row in content["rows"]}
    assert tuple(found) == rows
    [words] = content["devices"]
    beside = {name: row["results"][words].get("beside_seconds", {}) for name, row in found.items()}
    assert {name: [*others] for name, others in beside.items() if others} == {
        "decode-pages-16": ["contiguous"], "decode-int8": ["float16"],
    }  # fmt: skip
    for row in content["rows"]:
        assert 0 < row["results"][words]["error"] <= row["allowed_error"] and not row["failed"]
    backward = found["backward-f16-E64-causal"]
    seconds = backward["results"][words]["seconds"]
    assert backward["results"][words]["rate"] == pytest.approx(backward["flop"] / seconds)


def test_a_row_that_fails_is_said_and_the_next_one_measured(
    device, tmp_path, capsys, monkeypatch, no_peers
):
    attend = clattn.scaled_dot_product_attention

    def break_halves(query, *args, **options):
        if query.dtype == np.float16:
            raise clattn.DeviceError("no such\nregister")
        return attend(query, *args, **options)

    monkeypatch.setattr(clattn, "scaled_dot_product_attention", break_halves)
    file = tmp_path / "bench.json"
    status = bench("--gpu", "--scale", 128, "--rows", "f16-E64", "f32-E64", "--rounds", 1,
                   "--device", device.platform, "--json", file)  # fmt: skip
    assert status == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "f16-E64: FAILED on " in said and "no such register" in said
    broken, fine = json.loads(file.read_text())["rows"]
    assert (broken["name"], fine["name"]) == ("f16-E64", "f32-E64")
    [words] = broken["failed"]
    assert broken["results"] == {} and words in fine["results"]


def test_what_is_measured_is_written_after_each_row(device, tmp_path, monkeypatch, no_peers):
    """So that a run that is stopped leaves what it has."""
    file, measure = tmp_path / "bench.json", contest.measure

    def stop_at_the_second(row, *args):
        if row.name == "f32-E64-causal":
            raise KeyboardInterrupt
        return measure(row, *args)

    monkeypatch.setattr(contest, "measure", stop_at_the_second)
    assert bench("--gpu", "--scale", 128, "--rows", "f32-E64*", "--rounds", 1,
                 "--device", device.platform, "--json", file) == 130  # fmt: skip
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["f32-E64"]


def test_list(capsys):
    assert bench("--list", "--gpu") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:]] == [row.name for row in ALL_GPU_ROWS]
    assert "backward" in next(line for line in said if line.startswith("backward-f16-E128 "))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--scale", "2"], "--gpu"),
    (["--gpu", "--rows", "tiny"], "none of --gpu"),
    (["--rows", "f16-E64"], "none without --gpu"),
])  # fmt: skip
def test_options_that_do_not_fit(arguments, words, capsys):
    assert bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_patterns_find_rows_of_both_tables():
    found = command._rows("decode-f*")
    assert found == [row for row in ALL_GPU_ROWS if row.name.startswith("decode-f")]


# --- limits ----------------------------------------------------------------------------------


def test_a_measurement_takes_long_enough(device, monkeypatch, no_peers):
    """The work of a launch grows until its time can be measured; the shortest time counts."""
    asked = []

    class Kernels:
        def __init__(self, device):
            pass

        def read(self, size, passes):
            assert size == 2 * 8 * 8 * 4
            asked.append(passes)
            return 0.001 * passes + 0.1 * (len(asked) % 2), passes * 1e6, None

        def fma(self, dtype, steps):
            return 1.0, 4e9, None

        def exp(self, steps):
            return 1.0, 1e9, None

    monkeypatch.setattr(limits, "LEAST_SECONDS", 0.015)
    monkeypatch.setattr(limits, "Kernels", Kernels)
    limit = limits.Limits(device)
    row = Row("a", (1, 1, 1, 1, 8, 8), limit="read")
    assert limit.measure(row) == pytest.approx(1e9)
    assert asked == [1, 1, 4, 4, 16, 16]
    assert limit.measure(row) == pytest.approx(limit.read[512]) == pytest.approx(1e9)
    assert asked[6:] == [16, 16]
    grouped = Row("b", (1, 64, 1, 1, 8, 8), limit="read")  # its 512 pairs take 8 ns and 1 ns each
    assert limit.measure(grouped) == pytest.approx(512 / (512 * 9e-9))


def test_products_of_matrices_are_a_limit_where_they_are_measured(device):
    row = Row("a", (1, 1, 1, 8, 8, 16), "float16", limit="product")
    rates = iter([3e12, 2e12])
    limit = limits.Limits(device, lambda dtype: next(rates) if dtype == "float16" else 0.0)
    assert (limit.measure(row), limit.measure(row)) == (3e12, 2e12)
    assert limit.product == {"float16": 3e12}
    measured = contest.Measured(row, 0.0, seconds={"d": 1e-6}, limits={"d": 3e12})
    assert measured.limit_share("d") == pytest.approx(row.flop / 3e6)
    assert limits.Limits(device).measure(row) == 0
    assert contest.Measured(row, 0.0, limits={"d": 0.0}, seconds={"d": 1}).limit_share("d") is None


# --- torch's backends ------------------------------------------------------------------------

SMALL = {
    "plain": Row("plain", (2, 4, 4, 40, 50, 16), "bfloat16", on_device=True),
    "causal": Row("causal", (2, 4, 4, 50, 50, 16), is_causal=True, on_device=True),
    "groups": Row("groups", (2, 4, 2, 3, 50, 16), "float16", on_device=True),
    "window": Row("window", (1, 2, 2, 50, 50, 16), is_causal=True, window=7, on_device=True),
    "bool mask": Row("bool mask", (1, 2, 2, 40, 50, 16), "float16", mask="bool", on_device=True),
}  # fmt: skip


class Here(torch_peers.Torch):
    """In place of CUDA's backends, one that torch has on every processor."""

    name, label, backend, place = "torch, math", "math", "MATH", "cpu"


@pytest.mark.parametrize("row", SMALL.values(), ids=SMALL)
def test_backends_compute_the_same(row):
    pytest.importorskip("torch")
    problem = draw(row)
    right = exact.exact_rows(problem)
    with ExitStack() as stack:
        call = Here(stack).prepare(problem)
        call.run()
        result = call.result()
    assert result.dtype == problem.query.dtype
    assert right.error(result) <= exact.PEER_FACTOR * right.allowed


def test_no_other_backend_takes_its_place(monkeypatch):
    """Neither where it is timed nor where its result is checked."""
    torch = pytest.importorskip("torch")
    attend, others = torch.nn.functional.scaled_dot_product_attention, []

    def watch(*args, **options):
        others.append(torch.backends.cuda.flash_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    with ExitStack() as stack:
        call = Here(stack).prepare(draw(SMALL["plain"]))
        call.run()
        call.result()
    assert len(others) > call.count and not any(others)


def test_a_backend_that_does_not_take_a_row_is_left_out_with_a_note(device, no_peers):
    pytest.importorskip("torch")

    class Elsewhere(Here):
        label, backend = "efficient", "EFFICIENT_ATTENTION"

    with ExitStack() as stack:
        rivals, missing = contest.find_peers(stack, [Here, Elsewhere])
        contestants = contest.Contestants(
            {"d": device}, rivals, {"d": limits.Limits(device)}, missing
        )
        measured = contest.measure(SMALL["causal"], contestants, 1)
    assert set(measured.seconds) == {"d", "math"}
    assert measured.best == "math"
    assert [note.partition(":")[0] for note in measured.notes] == ["efficient"]


@pytest.mark.parametrize("causal", [False, True])
def test_a_backend_computes_the_backward_pass(causal):
    pytest.importorskip("torch")
    problem = draw(Row("backward", (1, 3, 3, 40, 40, 16), "bfloat16", is_causal=causal,
                       on_device=True, trains="backward"))  # fmt: skip
    right = exact_gradients(problem)
    with ExitStack() as stack:
        call = Here(stack).prepare(problem)
        call.run()
        assert right.is_right(call.result(), exact.PEER_FACTOR)
    assert len(right.right[0][0]) == 1  # head of a large problem


class FlashHere(torch_peers.Flash):
    """On the host, where varlen_attn has no kernel: `attend_each` takes its place."""

    place = "cpu"


def attend_each(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size,
                enable_gqa=False, seqused_k=None, block_table=None):  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn, by a call for each sequence."""
    import torch

    assert window_size == (-1, 0)
    assert max_q == cu_seq_q.diff().max()
    results = []
    for n in range(len(cu_seq_q) - 1):
        rows = slice(*cu_seq_q[n : n + 2])
        if block_table is None:
            k, v = (a[slice(*cu_seq_k[n : n + 2])] for a in (key, value))
        else:
            assert cu_seq_k is None and block_table.dtype == torch.int32
            k, v = (a[block_table[n]].flatten(0, 1)[: seqused_k[n]] for a in (key, value))
        assert len(k) <= max_k
        i = torch.arange(len(query[rows]))[:, None] + len(k) - len(query[rows])
        q, k, v = (a.swapaxes(0, 1)[None] for a in (query[rows], k, v))
        seen = torch.arange(k.shape[2]) <= i
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, seen, enable_gqa=enable_gqa
            )
        results.append(output[0].swapaxes(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("name", ["ragged-f16-E64", "ragged-bf16-gqa", "ragged-pages-16"])
def test_flash_attention_takes_sequences(name, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", attend_each)
    problem = draw(next(row for row in SEQUENCE_ROWS if row.name == name).scaled(256))
    right = exact.exact_rows(problem)
    with ExitStack() as stack:
        call = FlashHere(stack).prepare(problem)
        call.run()
        assert right.error(call.result()) <= exact.PEER_FACTOR * right.allowed


def test_sequences_that_a_backend_does_not_take():
    pytest.importorskip("torch")
    codes = next(row for row in SEQUENCE_ROWS if row.name == "decode-int8").scaled(512)
    with ExitStack() as stack:
        assert Here(stack).prepare(draw(codes)) is None
        with pytest.raises(NotImplementedError, match="takes no codes"):
            FlashHere(stack).prepare(draw(codes))


def test_rows_that_a_backend_is_not_asked_for():
    pytest.importorskip("torch")
    with ExitStack() as stack:
        assert Here(stack).prepare(draw(Row("host", (1, 1, 1, 4, 4, 8)))) is None
        half = type("Half", (Here,), {"half_only": True})(stack)
        assert half.prepare(draw(SMALL["causal"])) is None
        assert half.prepare(draw(SMALL["plain"])) is not None


def test_without_cuda_the_backends_are_missing():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA")
    with ExitStack() as stack:
        found, missing = contest.find_peers(stack, contest.peer_classes(on_gpu=True))
    assert found == []
    assert set(missing) == {"flash", "efficient", "cuDNN"}
    assert {*missing.values()} == {"torch sees no CUDA device"}
    assert torch_peers.find_product() is None
