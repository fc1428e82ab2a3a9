# SPDX-License-Identifier: MIT
"""create_block_mask and BlockMask, and what flex_attention does with them."""

import copy
import pickle

import clattn
import numpy as np
import pytest
from clattn.flex.tables import checksum
from references.attention import bfloat16
from references.flex import blocks
from support.data import draw, qkv
from support.mods import call, check_flex, lookup
from support.processes import run_on
from support.sizes import SMALL, WIDE
from support.tensors import same_bits
from support.variants import force, takes_cpu_kernels

pytestmark = pytest.mark.by_turns  # their kernel has no vectors, and lists are the host's

ALL = np.ones((500, 800), bool)
BUT_KEY_7 = np.broadcast_to(np.arange(800) != 7, (500, 800))


def band(width=20, step=16, shift=0, flags=ALL):
    """Keys near a row, further along with each head and batch, of which flags take some out.

    Without a step all heads and batches have the same mask. Else the arguments are data: these
    masks are one program.
    """

    def mask(b, h, q_idx, kv_idx):
        further = (h + 2 * b) * step if step else 0
        near = abs(q_idx - kv_idx + further + shift) <= width
        return near & lookup(flags, q_idx, kv_idx)

    return mask


def make(mask_mod, B, H, rows, keys, size=128, *, device):
    mask = clattn.create_block_mask(mask_mod, B, H, rows, keys, device, size)
    assert (mask.shape, mask.BLOCK_SIZE) == ((B or 1, H or 1, rows, keys), size)
    return mask


# ---- entries ----


@pytest.mark.parametrize("size", [1, 16, 128, 1000])
@pytest.mark.parametrize("heads", [(None, None), (2, None), (None, 3), (2, 3), (1, 1)], ids=str)
def test_entries(device, size, heads):
    """As NumPy finds them; the last blocks have fewer rows or keys."""
    for rows, keys in ((1, 1), (37, 130), (128, 256), (130, 37), (300, 3)):
        for numbers in ((20,), (70, -9, 30), (-1,), (10**6,)):
            mask_mod = band(*numbers)
            mask = make(mask_mod, *heads, rows, keys, size, device=device)
            right = blocks(mask_mod, *heads, rows, keys, size)
            same_bits(mask.entries, right)
            np.testing.assert_array_equal(mask.to_dense(), right > 0)
            assert mask.to_dense().dtype == np.int32
            assert mask.sparsity() == pytest.approx(100 * np.mean(right == 0))
            assert mask.device == mask.entries.device == device


def test_a_full_block_needs_every_key_of_every_row(device):
    for row, key in ((0, 0), (31, 31), (13, 17), (36, 69)):
        holes = np.ones((37, 70), bool)
        holes[row, key] = False
        for flags in (holes, ~holes):
            mask_mod = band(10**6, flags=flags)
            mask = make(mask_mod, None, None, 37, 70, 16, device=device)
            same_bits(mask.entries, blocks(mask_mod, None, None, 37, 70, 16))


def test_indexes_outside_a_table_are_false(device):
    """Also for rows that fill up a vector."""
    few, right = np.ones((30, 60), bool), np.zeros((37, 70), bool)
    right[:30, :60] = True
    mask = make(band(10**6, flags=few), None, None, 37, 70, 16, device=device)
    same_bits(mask.entries, blocks(band(10**6, flags=right), None, None, 37, 70, 16))
    whole = make(band(10**6, flags=few), None, None, 30, 60, 16, device=device)
    assert (whole.entries.numpy() == 2).all()


def test_blocks_of_two_sizes(device):
    mask = make(band(), 2, 3, 130, 300, (16, 64), device=device)
    same_bits(mask.entries, blocks(band(), 2, 3, 130, 300, (16, 64)))
    check_flex(*qkv((2, 3), 130, 300, SMALL), device=device, block_mask=mask)
    assert make(band(), 2, 3, 130, 300, 64, device=device).BLOCK_SIZE == 64
    same = clattn.create_block_mask(band(), 2, 3, 130, 300, device, BLOCK_SIZE=(64, 64))
    assert same.BLOCK_SIZE == 64
    with pytest.raises(ValueError, match=r"BLOCK_SIZE is \(1, 2, 3\); expected a number, or one"):
        clattn.create_block_mask(band(), None, None, 9, 37, device, (1, 2, 3))


def lists_of(mask):
    """The arguments of from_kv_blocks."""
    return {name: getattr(mask, name) for name in (
        "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")}  # fmt: skip


def test_lists_of_blocks(device):
    mask = make(band(70), 2, 3, 130, 300, (16, 64), device=device)
    entries = mask.entries.numpy()
    for name, of_rows, entry in (("kv", False, 1), ("full_kv", False, 2), ("q", True, 1),
                                 ("full_q", True, 2)):  # fmt: skip
        flags = (entries.swapaxes(2, 3) if of_rows else entries) == entry
        counts, columns = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        assert counts.dtype == columns.dtype == np.int32 and flags.any() and not flags.all()
        np.testing.assert_array_equal(counts, flags.sum(-1))
        for place in np.ndindex(flags.shape[:3]):
            expected = np.flatnonzero(flags[place])
            np.testing.assert_array_equal(columns[place][: counts[place]], expected)
            np.testing.assert_array_equal(np.sort(columns[place]), np.arange(flags.shape[3]))
    made = clattn.BlockMask.from_kv_blocks(
        **lists_of(mask), BLOCK_SIZE=(16, 64), mask_mod=band(70), seq_lengths=(130, 300),
        device=device)  # fmt: skip
    same_bits(made.entries, entries)
    assert (made.shape, made.BLOCK_SIZE) == (mask.shape, (16, 64))
    assert made.seq_lengths == (130, 300)
    arrays = qkv((2, 3), 130, 300, SMALL)
    same_bits(call(*arrays, device=device, block_mask=made),
              call(*arrays, device=device, block_mask=mask))  # fmt: skip


def test_lists_without_a_mask_mod(device):
    """The blocks are all there is to know; lengths are those of whole blocks."""
    counts, columns = np.array([1, 2]), np.array([[2, 0, 1], [0, 2, -9]])
    mask = clattn.BlockMask.from_kv_blocks(counts, columns, BLOCK_SIZE=8, device=device)
    assert mask.shape == (1, 1, 16, 24)
    np.testing.assert_array_equal(mask.entries.numpy()[0, 0], [[0, 0, 1], [1, 0, 1]])
    arrays = qkv((2, 3), 16, 24, SMALL)
    right = clattn.scaled_dot_product_attention(
        *arrays, np.kron([[0, 0, 1], [1, 0, 1]], np.ones((8, 8))) > 0, device=device)  # fmt: skip
    np.testing.assert_allclose(call(*arrays, device=device, block_mask=mask), right, atol=1e-5)


def test_wrong_lists(device):
    counts, columns = np.array([[[1]]]), np.array([[[[0, 1]]]])
    make_of = clattn.BlockMask.from_kv_blocks
    for arguments, exception, words in (
        ((counts, columns + 2), ValueError, "kv_indices has a block outside of 0 to 1"),
        ((counts + 2, columns), ValueError, "kv_indices has a block outside of 0 to 1"),
        ((counts[0], columns), ValueError, "kv_indices has shape .1, 1, 1, 2., with counts of"),
        ((counts, columns * 0.5), TypeError, "kv_indices has dtype float64; expected integers"),
        ((counts, columns, counts), TypeError, "one is None; expected both, or none"),
        ((counts, columns, counts, columns[..., :1]), ValueError, "full_kv_indices has shape"),
    ):
        with pytest.raises(exception, match=words):
            make_of(*arguments, device=device)


def test_some_batches_and_heads(device):
    """The mask_mod gets the numbers that they have in the whole mask."""
    whole = make(band(), 2, 3, 130, 300, 16, device=device)
    entries = blocks(band(), 2, 3, 130, 300, 16)
    for index, picked in (
        (1, entries[1:]),
        ((-1, 2), entries[1:, 2:]),
        ((slice(None), slice(1, 3)), entries[:, 1:]),
        (([0, 1], np.array([2, 0])), entries[:, [2, 0]]),
    ):
        some = whole[index]
        same_bits(some.entries, picked)
        B, H = picked.shape[:2]
        assert some.shape == (B, H, 130, 300)
        arrays = qkv((B, H), 130, 300, SMALL)
        check_flex(*arrays, device=device, block_mask=some)
    for index, exception in ((2, IndexError), ((0, 0, 0), TypeError), (slice(2, 2), IndexError)):
        with pytest.raises(exception):
            whole[index]
    same_bits(whole.to(device).entries, entries)


def test_drawing(device):
    mask = make(band(40, flags=BUT_KEY_7), None, None, 300, 450, 64, device=device)
    assert repr(mask) == (
        "clattn.BlockMask(shape=(1, 1, 300, 450), BLOCK_SIZE=64, sparsity=65.00%)\n"
        "░░░░\n"
        "░░░░░░\n"
        "  ░░░░░░\n"
        "    ░░░░░░\n"
        "      ░░░░░░"
    )
    assert str(make(band(10**6, flags=BUT_KEY_7), 2, 3, 3, 70, 64, device=device)) == (
        "clattn.BlockMask(shape=(2, 3, 3, 70), BLOCK_SIZE=64, sparsity=0.00%)\n░░██"
    )
    many = repr(make(band(100), None, None, 500, 500, 8, device=device)).splitlines()[1:]
    assert len(many) == 32 and max(map(len, many)) == 64  # each mark stands for 2 x 2 blocks
    assert many[0] == "████████████░░░░"


def test_memory(device):
    """The blocks alone: 256 x 256 bytes, not the 2**30 of a mask."""
    code = """
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx
    clattn.create_block_mask(causal, None, None, 1024, 1024, device)
    mask, risen = measure_memory(
        lambda: clattn.create_block_mask(causal, None, None, 32768, 32768, device))
    assert clattn.memory_stats(device)["peak_bytes"] <= MIB
    assert risen < 16 * MIB, risen
    entries = mask.entries.numpy()[0, 0]
    assert (entries == 2 * np.tri(256, k=-1) + np.eye(256)).all()
    """
    run_on(device, code)


# ---- calls ----


@pytest.mark.parametrize("size", [1, 16, 128, 1000])
def test_results_with_blocks_and_without(device, size):
    """On the kernels that are chosen, for few rows and for many."""
    for L, S in ((3, 135), (41, 300)):
        arrays = qkv((2, 3), L, S, WIDE)
        for heads in ((None, None), (2, 3)):
            mask_mod = band(30) if heads[0] else band(30, step=0)
            mask = make(mask_mod, *heads, L, S, size, device=device)
            check_flex(*arrays, device=device, block_mask=mask)


@pytest.mark.parametrize("kernel_name", ["cpu", "decode_cpu"])
def test_blocks_decide_for_what_is_known(device, monkeypatch, kernel_name):
    """The mask is asked in partial blocks alone. A Tensor that was exchanged since shows it."""
    if not takes_cpu_kernels(device):
        pytest.skip("kernels for GPUs may ask everywhere")
    force(monkeypatch, kernel_name)
    flags = np.tile(np.arange(768) // 256 == 1, (9, 1))
    tables = [clattn.tensor(flags, device)]

    def mask_mod(b, h, q_idx, kv_idx):
        return tables[0][q_idx, kv_idx]

    arrays = qkv((1, 2), 9, 768, WIDE)
    mask = make(mask_mod, None, None, 9, 768, 256, device=device)
    assert mask.entries.numpy().ravel().tolist() == [0, 2, 0]
    right = check_flex(*arrays, device=device, mask_mod=lambda *at: lookup(flags, *at[2:]))
    tables[0] = clattn.tensor(~flags, device)
    same_bits(call(*arrays, device=device, block_mask=mask), right)


def test_more_rows_than_the_query_has(device):
    """Row i of the query is row i of the mask."""
    mask = make(band(30), 2, 3, 500, 130, 16, device=device)
    for L in (3, 41, 130, 500):
        check_flex(*qkv((2, 3), L, 130, WIDE), device=device, block_mask=mask)


def test_fewer_keys_than_the_mask_has(device, monkeypatch):
    """As if the mask had been made for the first keys."""
    whole = make(band(70), 2, 3, 130, 300, (16, 64), device=device)
    names = ["reference", "cpu", "decode_cpu"] if takes_cpu_kernels(device) else ["reference"]
    for name in names:
        force(monkeypatch, name)
        for S in (299, 257, 256, 32):
            arrays = qkv((2, 3), 130, S, WIDE)
            check_flex(*arrays, device=device, block_mask=whole)


def test_keys_end_with_a_full_block(device):
    """No number excludes the keys behind it, which a chunk of keys may reach."""
    q, k, v = qkv((2, 3), 41, 130, WIDE)
    for end in range(10, 130, 20):
        flags = np.broadcast_to(np.arange(800) < end, (500, 800))
        mask = make(band(10**6, flags=flags), 2, 3, 41, 130, 10, device=device)
        check_flex(q, k, v, device=device, block_mask=mask)


def test_grouped_heads(device):
    """Blocks are those of query heads, which share a head of the keys."""
    mask = make(band(30, 9, -20), 2, 6, 41, 130, 16, device=device)
    for L in (3, 41):
        q, k, v = draw((2, 6, L, WIDE)), *qkv((2, 2), L, 130, WIDE)[1:]
        check_flex(q, k, v, device=device, block_mask=mask, enable_gqa=True)
        k, v = (np.broadcast_to(a[:1, :1], (2, 6, 130, WIDE)) for a in (k, v))
        check_flex(q, k, v, device=device, block_mask=mask)


@pytest.mark.parametrize("lead", [(), (3,), (4,), (2, 3), (2, 2, 3), (2, 1, 2, 3)], ids=str)
def test_dimensions(device, monkeypatch, lead):
    """b numbers all dimensions before the heads, and so do the blocks."""
    force(monkeypatch, "cpu" if takes_cpu_kernels(device) else "reference")
    B, H = int(np.prod(lead[:-1])), (lead or (1,))[-1]
    mask_mod = band(30, 9, -20)
    arrays = qkv(lead, 41, 130, WIDE)
    mask = make(mask_mod, B, H, 41, 130, 16, device=device)
    check_flex(*arrays, device=device, block_mask=mask)
    whole = make(band(30, step=0), None, None, 41, 130, 16, device=device)
    check_flex(*arrays, device=device, block_mask=whole)


def test_excluded_blocks_are_not_read(device):
    """NaN in keys and values of blocks that are empty for all rows."""
    q, k, v = qkv((1, 2), 41, 300, WIDE)
    k[..., 100:, :], v[..., 100:, :] = np.nan, np.inf
    mask = make(band(30, step=0), None, None, 41, 300, 16, device=device)
    for L in (3, 41):
        result = check_flex(q[..., :L, :], k, v, device=device, block_mask=mask)
        assert np.isfinite(result).all()


def test_and_masks(device):
    first, second = band(30), band(30, shift=20)

    def right(*place):
        return first(*place) & second(*place)

    mask = make(clattn.and_masks(first, second), 2, 3, 130, 300, 16, device=device)
    same_bits(mask.entries, blocks(right, 2, 3, 130, 300, 16))


# ---- refusals ----


def refused(exception, words, *arrays, **options):
    with pytest.raises(exception, match=words):
        call(*arrays, **options)


def test_other_lengths(device):
    mask = make(band(), None, 3, 41, 130, 16, device=device)
    for L, S in ((42, 130), (41, 131)):
        words = (
            "block_mask is for positions 0 to 40 of queries and 130 keys; "
            f"expected positions 0 to {L - 1} and {S} keys"
        )
        refused(ValueError, words, *qkv((2, 3), L, S, SMALL), block_mask=mask, device=device)


def test_other_batches_and_heads(device):
    leads = [((2, 3), h) for h in ((3, 3), (2, 2), (2, 6), (None, 2), (4, None))]
    leads += [((2, 2, 3), h) for h in ((2, 3), (3, None))] + [((), (2, 1)), ((3,), (3, 3))]
    for lead, (B, H) in leads:
        arrays = qkv(lead, 9, 37, SMALL)
        mask = make(band(), B, H, 9, 37, 16, device=device)
        words = rf"block_mask has B {B or 1} and H {H or 1}; expected .* or 1"
        refused(ValueError, words, *arrays, block_mask=mask, device=device)


@pytest.mark.parametrize(("name", "size"), [("b", 2), ("h", 3)])
def test_one_mask_for_several(device, name, size):
    """A mask_mod that uses b or h needs a mask for each batch or head, if there are several."""
    mask_mod = {"b": lambda b, h, q, k: k <= q + b, "h": lambda b, h, q, k: k <= q + h}[name]
    mask = make(mask_mod, None, None, 9, 37, 16, device=device)
    size_of = f"{name.upper()}={size}, a mask for each"
    words = f"block_mask has {name.upper()} 1 .None., but its mask_mod uses {name}; .*{size_of}"
    refused(ValueError, words, *qkv((2, 3), 9, 37, SMALL), block_mask=mask, device=device)
    one = qkv((1, 3) if name == "b" else (2, 1), 9, 37, SMALL)
    check_flex(*one, device=device, block_mask=mask)
    each = {"B": None, "H": None} | {name.upper(): size}
    check_flex(*qkv((2, 3), 9, 37, SMALL), device=device,
               block_mask=make(mask_mod, *each.values(), 9, 37, 16, device=device))  # fmt: skip


def test_data_that_have_changed(device):
    """The blocks are those of other data, so the call is refused."""
    data = {"width": 20, "flags": draw((41, 130)) > -1, "flip": None}

    def mask_mod(b, h, q_idx, kv_idx):
        near = abs(q_idx - kv_idx) <= data["width"]
        inside = near & (lookup(data["flags"], q_idx, kv_idx) != 0)
        return inside if data["flip"] is None else inside ^ (kv_idx > data["flip"])

    arrays = qkv((2, 3), 41, 130, SMALL)
    mask = make(mask_mod, None, None, 41, 130, 16, device=device)
    right = check_flex(*arrays, device=device, block_mask=mask)
    kept = dict(data)
    than = "than at create_block_mask"
    other = "computes something else " + than
    for name, value, words in (
        ("width", 21, f"captures other numbers {than}, 21, 0 instead of 20, 0"),
        ("width", np.nan, other),
        ("flip", 3, other),
        ("flags", kept["flags"][:, :129], f"captures an array of other numbers {than}, bool of"),
        ("flags", kept["flags"].astype(np.int8), other),
    ):
        data[name] = value
        words += ".*expected the same: make a new block mask"
        refused(ValueError, words, *arrays, block_mask=mask, device=device)
        data |= kept
    for flags in (data["flags"], data["flags"][::-1], data["flags"].T):  # in place
        flags[3, 5] ^= True
        refused(ValueError, "an array of other numbers", *arrays, block_mask=mask, device=device)
        flags[3, 5] ^= True
    data["flags"] = np.asfortranarray(data["flags"].copy())  # the same in another memory
    same_bits(call(*arrays, device=device, block_mask=mask), right)


NUMBERS = np.arange(600).reshape(20, 30)


@pytest.mark.parametrize(
    "table",
    [NUMBERS, NUMBERS[::-2, ::2], NUMBERS.T, NUMBERS[:0], NUMBERS.astype(">i4"),
     NUMBERS.astype(bfloat16)],
    ids=["plain", "strided", "transposed", "empty", "other bytes", "bfloat16"],
)  # fmt: skip
def test_equal_tables_of_any_layout_have_one_checksum(table):
    copy = np.array(table, table.dtype.newbyteorder("="), order="C")
    assert checksum(table) == checksum(copy)
    if copy.size:
        copy[-1, -1] = 0 if copy[-1, -1] else 1
        assert checksum(table) != checksum(copy)


def test_a_table_that_is_broadcast_is_read_once():
    ones, others = (np.broadcast_to(np.float32(n), (2**20, 2**20)) for n in (1, 2))
    assert checksum(ones) != checksum(others)


def test_tables_of_other_libraries_have_one_checksum(device):
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    right = checksum(NUMBERS.astype("i4"))
    assert checksum(torch.arange(600, dtype=torch.int32).reshape(20, 30)) == right
    assert checksum(jax.numpy.asarray(NUMBERS, "i4")) == right
    halves = torch.arange(600).reshape(20, 30).to(torch.bfloat16)  # NumPy reads none
    assert checksum(halves) == checksum(NUMBERS.astype(bfloat16))
    assert checksum(clattn.tensor(NUMBERS, device)) is None


def test_a_nan_is_a_number_like_others(device):
    """It is not equal to itself."""
    width = np.float32("nan")
    mask = make(lambda b, h, q, k: q - k < width, None, None, 9, 37, 16, device=device)
    assert not call(*qkv((2, 3), 9, 37, SMALL), device=device, block_mask=mask).any()


def test_a_mask_mod_is_called_once(device):
    calls = []

    def mask_mod(b, h, q_idx, kv_idx):
        calls.append("mask")
        return band(step=0)(b, h, q_idx, kv_idx)

    def score_mod(score, b, h, q_idx, kv_idx):
        calls.append("score")
        return score * lookup(np.ones((3, 7)), h, kv_idx % 7) + 0.5

    arrays = qkv((2, 3), 9, 37, SMALL)
    mask = make(mask_mod, None, None, 9, 37, 16, device=device)
    for options, called in (({}, ["mask"]), ({"score_mod": score_mod}, ["mask", "score"])):
        calls.clear()
        call(*arrays, device=device, block_mask=mask, **options)
        assert calls == called


CHANGED = {  # attributes that the caller has changed
    "no size": {"BLOCK_SIZE": 0},
    "another size": {"BLOCK_SIZE": 8},
    "too few entries": {"entries": np.zeros((1, 1, 1, 1), np.uint8)},
    "another dtype": {"entries": np.zeros((1, 1, 3, 9), np.float32)},
    "fewer dimensions": {"entries": np.zeros((3, 9), np.uint8)},
}


def test_attributes_that_have_changed(device):
    """What does not fit is refused: the kernel would divide by 0, or read beyond the entries."""
    arrays = qkv((2, 3), 41, 130, WIDE)
    for changed in CHANGED.values():
        mask = make(band(), None, None, 41, 130, 16, device=device)
        for name, value in changed.items():
            entries = name == "entries"
            setattr(mask, name, clattn.tensor(value, device=device) if entries else value)
        refused(ValueError, "block_mask has", *arrays, block_mask=mask, device=device)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_another_device(device):
    """A call takes a mask of any device. A copy, or what a pickle holds, is the same mask."""
    mask = make(causal, None, None, 40, 37, 16, device=device)
    arrays = qkv((2, 3), 40, 37, SMALL)
    right = call(*arrays, block_mask=mask, device=device)
    masks = [copy.copy(mask), copy.deepcopy(mask)]
    for there in clattn.devices():
        with clattn.use_device(there):
            masks += [mask.to(there), pickle.loads(pickle.dumps(mask))]
            assert masks[-1].device == masks[-2].device == there
    for other in masks:
        np.testing.assert_array_equal(other.to_dense(), mask.to_dense())
        for there in (device, other.device):
            for _ in range(2):  # the second one finds the copy
                got = call(*arrays, block_mask=other, device=there)
            np.testing.assert_allclose(got, right, atol=1e-6)
    mask.entries = clattn.tensor(np.zeros_like(mask.entries.numpy()), device=device)
    for there in clattn.devices():
        assert not call(*arrays, block_mask=mask, device=there).any()


SIZES = {"B": 2, "H": 3, "Q_LEN": 9, "KV_LEN": 37, "BLOCK_SIZE": 16}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(device, name):
    for value, exception in ((0, ValueError), (-1, ValueError), (2**31, ValueError),
                             (2**70, (ValueError, OverflowError)), (1.0, TypeError),
                             ("1", TypeError), (np.ones(2), TypeError)):  # fmt: skip
        with pytest.raises(exception, match=name):
            clattn.create_block_mask(band(), **SIZES | {name: value}, device=device)
    if name not in ("B", "H"):
        with pytest.raises(TypeError, match=name):
            clattn.create_block_mask(band(), **SIZES | {name: None}, device=device)
    number = np.int64(SIZES[name])
    mask = clattn.create_block_mask(band(), **SIZES | {name: number}, device=device)
    assert mask.shape == (2, 3, 9, 37) and mask.BLOCK_SIZE == 16


def test_no_block_mask(device):
    arrays = qkv((2, 3), 9, 37, SMALL)
    for wrong in (band(), np.ones((9, 37), bool), 3, "mask"):
        refused(TypeError, rf"block_mask is of type {type(wrong).__name__}; expected a BlockMask",
                *arrays, block_mask=wrong, device=device)  # fmt: skip
    mask = make(band(), None, None, 9, 37, 16, device=device)
    refused(TypeError, "mask_mod and block_mask are both given", *arrays, block_mask=mask,
            mask_mod=band(), device=device)  # fmt: skip
    for wrong, words in ((3, "of type int"), (None, "None")):
        with pytest.raises(TypeError, match=f"mask_mod is {words}; expected a function of"):
            clattn.create_block_mask(wrong, None, None, 9, 37, device)
