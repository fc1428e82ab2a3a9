# SPDX-License-Identifier: MIT
"""Tables and text of the report, in Markdown."""

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
SIZES = ("memory", "largest buffer", "local memory", "cache")


def make_table(titles, rows):
    """Return a table; a bar in a cell is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text):
    return " ".join(str(text).replace("|", "\\|").split())


def as_code(text):
    """Return a block of text unchanged, with a fence longer than any fence in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text.strip() or '(nothing)'}\n{fence}"


def format_bytes(count):
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def describe_devices(devices):
    """Return a table for each device that OpenCL lists."""
    parts = []
    for device in devices:
        rows = [
            (name, format_bytes(value) if name in SIZES else value)
            for name, value in device.items()
            if name != "name" and value not in ("", 0)
        ]
        parts.append(f"### {device['name']}\n\n{make_table(('', ''), rows)}")
    return "\n\n".join(parts)


def describe_experiments(listed, lines):
    """Return a table of predictions and of what was measured; a share above 1 is better."""
    rows = []
    for name, row in listed.items():
        measured = lines.get(name, {}).get("measured")
        figures = ("not measured", "")
        if measured is not None:
            figures = (f"{measured:.4g}", f"{lines[name]['share']:.2f}")
        rows.append((name, row["claim"], f"{row['predicted']:.4g} {row['unit']}", *figures))
    titles = "experiment", "claim", "predicted", "measured", "share of prediction"
    return make_table(titles, rows)


def describe_bench(content):
    """Return a table for each device from the JSON content of bench."""
    peers = list(content["peers"])
    parts = []
    for words, device in content["devices"].items():
        titles = ["row", "B, Hq, Hk, L, S, E", "dtype", "ms", "TFLOP/s", "GB/s", "limit", "best",
                  *peers, "error", "allowed"]  # fmt: skip
        rows = [_bench_row(row, words, peers) for row in content["rows"]]
        limits = [f"fma {dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in device["fma"].items()]
        limits += [
            f"reading {format_bytes(int(size))} {rate / 1e9:.4g} GB/s"
            for size, rate in device["read"].items()
        ]
        limits += [
            f"torch's product {dtype} {rate / 1e12:.3g} TFLOP/s"
            for dtype, rate in device["product"].items()
        ]
        parts += [
            f"### {device['name']} ({device['platform']}, driver {device['driver_version']})",
            make_table(titles, rows),
            "Limits: " + (", ".join(limits) or "not measured"),
        ]
    versions = dict.fromkeys(peer["version"] for peer in content["peers"].values())
    parts.append(
        "best and the columns of others: their time divided by clattn's. "
        f"Beside: {', '.join(versions) or 'nothing'}."
    )
    notes = [f"{row['name']}: {note}" for row in content["rows"] for note in row["notes"]]
    parts += ["\n".join(f"- {_cell(note)}" for note in notes)] if notes else []
    return "\n\n".join(parts)


def _bench_row(row, words, peers):
    results = row["results"]
    head = [row["name"], ", ".join(map(str, row["shape"].values())), row["dtype"]]
    if words not in results:
        reason = row["failed"].get(words, "not supported")
        return [*head, f"FAILED: {reason}" if words in row["failed"] else reason,
                *[""] * (6 + len(peers))]  # fmt: skip
    own = results[words]
    read = row["limit"] == "read"
    share = own.get("limit_share")

    def ratio(peer):
        return f"{results[peer]['seconds'] / own['seconds']:.2f}" if peer in results else ""

    error = "NaN" if own["error"] is None else f"{own['error']:.1e}"
    return [
        *head,
        f"{own['seconds'] * 1e3:.4g}",
        "" if read else f"{own['rate'] / 1e12:.3g}",
        f"{own['rate'] / 1e9:.4g}" if read else "",
        "" if share is None else f"{share:.0%}",
        ratio(row["best_peer"]),
        *map(ratio, peers),
        f"**{error} wrong**" if words in row["wrong"] else error,
        f"{row['allowed_error']:.1e}",
    ]
