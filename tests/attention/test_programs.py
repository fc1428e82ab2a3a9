# SPDX-License-Identifier: MIT
"""How many programs calls need: with empty caches a program costs its first call a second.

The calls are those of tools/count_programs.py. A call that needs more programs than its kind may
fails here, with the macros in which the programs differ. What is data, and so makes no program,
has a test of its own below.
"""

import json

import clattn
import numpy as np
import pytest
from count_programs import DTYPES, HEAD_SIZES, attend, kinds
from references.attention import float16
from support.data import draw, qkv, sdpa
from support.faults import open_with
from support.gradients import backward, grads
from support.launches import launched_once
from support.mods import call, check_flex, lookup
from support.processes import ROOT
from support.sizes import SMALL
from support.tensors import same_bits
from support.variants import with_kernels

KINDS = kinds()


def programs(action, *args, **options):
    """The programs that an action runs, without probes."""
    launched = launched_once(action, *args, **options)
    assert len(launched) < 256, "some were forgotten"
    return {one.program for one in launched if not one.kernel.startswith("probe_")}


def differences(found):
    """Kernels, and the values of the macros in which their programs differ."""
    said = []
    for kernel in sorted({name for name, _ in found}):
        of_kernel = [dict(macros) for name, macros in found if name == kernel]
        values = {n: {macros.get(n) for macros in of_kernel} for m in of_kernel for n in m}
        varied = {name: v for name, v in values.items() if len(v) > 1}
        said.append(f"{len(of_kernel)} of {kernel}, by {varied}")
    return "; ".join(said)


# ---- kinds of calls ----

# On a CPU, where head sizes and options are data: a program for each dtype of query and value.
FOR_CPUS = dict.fromkeys(KINDS, len(DTYPES)) | {
    "head sizes": 5,  # rows narrower than two vectors take another program of pairs
    "past": 7,  # its copies have a program for each width of a dtype
    "few rows, wide values": 2,
}
# Short programs and long ones of attention_cpu, attention_decode_cpu, copies of a past.
FOR_ALL = 19


@pytest.mark.cpus
def test_kinds_of_calls_on_a_cpu(device):
    """The dtype alone decides, and whether a call is one of the usual ones."""
    found = {}
    for kind, calls in KINDS.items():
        found[kind] = set().union(
            *(programs(attend, device, *arguments, **options) for arguments, options in calls)
        )
    for kind, most in FOR_CPUS.items():
        assert 0 < len(found[kind]) <= most, f"{kind}: {differences(found[kind])}"
    together = set().union(*found.values())
    assert len(together) <= FOR_ALL, differences(together)


@pytest.mark.cpus
def test_a_backward_pass_takes_one_program(device):
    """For all that it gives, whatever its options are."""
    q, k, v = qkv((1, 2), 5, 6, 8)
    found = set()
    for options in ({}, {"is_causal": True, "softcap": 2.0, "sinks": draw((2,))}):
        found |= programs(backward, grads(q, k, v), q, k, v, device=device, attn_mask=draw((6,)),
                          **options)  # fmt: skip
    assert len({one for one in found if one[0] == "attention_backward"}) == 1


# On a GPU, head sizes and options are macros too: of attention_tiled and attention_decode_gpu, and
# of the kernels for matrix units, which take two of the dtypes.
SIZES = 3  # of most kinds
FOR_GPUS = {
    kind: [1, 1] if kind == "few rows, wide values" else [SIZES * len(DTYPES), SIZES * 2]
    for kind in KINDS
} | {
    "head sizes": [len(HEAD_SIZES) * len(DTYPES), 5 * 2],  # rounded up: 64, 80, 96, 128, 256
    "few rows, bool mask": [len(DTYPES), 2],
    "few rows, softcap": [len(DTYPES), 2],
    "few rows, wide values": [2, 0],
}
FOR_GPUS["dropout"][1] = 0  # which matrix units refuse

TELL = """
import json
from count_programs import attend, kinds
device = next(d for d in listed if d.platform == {platform!r})  # GPUs have another order
assert device.type == "gpu" and device.usable, device.reason
faults.faults_options.restype = ctypes.c_char_p
found = {{}}
for variants in ("tiled", "decode_gpu"), ("mma_emulated", "decode_mma_emulated"):
    for kind, calls in kinds().items():
        clattn._core.force(variants["few" in kind])
        options = set()
        for arguments, given in calls:
            try:
                attend(device, *arguments, **given)
            except clattn.DeviceError:
                options.add(faults.faults_options().decode())
            except ValueError:  # the variant takes no such call
                pass
        found.setdefault(kind, []).append(sorted(options))
print(json.dumps(found))
"""


@pytest.mark.cpus
def test_kinds_of_calls_on_a_gpu(first_device, faults_library, tmp_path):
    """Each head size and each set of options is a program, and nothing else is.

    The loader lets a CPU report that it is a GPU. It builds no program, and tells the options.
    """
    done = open_with(
        faults_library,
        first_device,
        TELL.format(platform=first_device.platform),
        FAULTS_GPU="1",
        FAULTS_EXTENSIONS="cl_khr_fp64",
        FAULTS_LOCAL=str(64 << 10),
        XDG_CACHE_HOME=tmp_path,
        PYTHONPATH=ROOT / "tools",
    )
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, programs_of_kind in FOR_GPUS.items():
        for options, allowed in zip(found[kind], programs_of_kind, strict=True):
            sets = [set(text.split()) for text in options]
            varied = set().union(*sets) - set.intersection(*sets) if sets else set()
            assert len(options) == allowed, f"{kind}: {sorted(varied)}"


# ---- what is data ----


def test_sinks_are_data(device):
    arrays = qkv((1, 2), 5, 30, 16)
    first, other = (
        programs(sdpa, *arrays, device=device, sinks=draw((2,), seed=seed)) for seed in (0, 1)
    )
    assert first == other


@pytest.mark.full
@with_kernels("mma")
def test_masks_begin_anywhere(device, variant):
    """A mask does not keep keys from being copied by 16 bytes: there is no program for it."""
    q, k, v = qkv((1, 1), 18, 70, 64, dtype=float16)
    memory = np.ones(18 * 70 + 32, bool)
    start = -memory.ctypes.data % 16
    found = set()
    for place in 0, 3:
        mask = memory[start + place :][: 18 * 70].reshape(18, 70)
        mask[:, 5] = False
        found |= programs(variant.check, q, k, v, device=device, attn_mask=mask)
    assert len(found) == 1, differences(found)


MODS = qkv((2, 3), 9, 37, SMALL)


def mod_of(table, factor, shift, most):
    def mod(score, b, h, q_idx, kv_idx):
        return score * factor + lookup(table, h, (q_idx + kv_idx + shift) % most)

    return mod


@pytest.mark.usefixtures("reference_kernel")
def test_numbers_and_tables_of_mods_are_data(device):
    """Tables of a dtype and a number of dimensions; of any shape and strides."""
    found = programs(check_flex, *MODS, device=device, score_mod=mod_of(draw((3, 7)), 1.5, 2, 7))
    for table in (draw((3, 7), seed=1), draw((5, 90))[::-1, ::3], draw((8, 3)).T, draw((3, 1))):
        for factor, shift in (
            (-0.3, -5),
            (1e-3, 2**31 - 100),
            (0.0, 0),
            (np.float32(2), np.int8(3)),
        ):
            mod = mod_of(table, factor, shift, table.shape[1])
            found |= programs(check_flex, *MODS, device=device, score_mod=mod)
    for B, H, L, S in ((1, 1, 1, 1), (3, 2, 40, 5)):
        arrays = qkv((B, H), L, S, SMALL)
        mod = mod_of(draw((3, 7)), 1.5, 2, 7)
        found |= programs(check_flex, *arrays, device=device, score_mod=mod)
    assert len(found) == 1, differences(found)


@pytest.mark.usefixtures("reference_kernel")
def test_functions_with_the_same_expression_share_a_program(device):
    table = draw((3, 7))
    first = programs(call, *MODS, device=device, score_mod=mod_of(table, 0.5, 1, 7))

    def other(s, batch, head, i, j):
        np.exp(s) + lookup(table, head, batch)  # of no use, and so no part of the program
        scaled = s * 0.5
        place = (i + j + 1) % table.shape[1]
        return scaled + lookup(table, head, place)

    assert programs(call, *MODS, device=device, score_mod=other) == first
    same_bits(call(*MODS, device=device, score_mod=other),
              call(*MODS, device=device, score_mod=mod_of(table, 0.5, 1, 7)))  # fmt: skip
    more = programs(call, *MODS, device=device, score_mod=lambda *place: other(*place) + 1)
    assert len(more) == 1 and more != first


def test_the_length_of_a_cache_is_data(device):
    """A cache that grows runs the programs of calls without a cache, and one that copies."""
    B, HQ, HK, E, N = 2, 8, 2, 64, 400

    def tensor(*shape):
        return clattn.tensor(draw(shape), device=device)

    cache = clattn.KVCache(B, HK, N, E, device=device)
    query, key, value = tensor(B, HQ, 1, E), tensor(B, HK, 1, E), tensor(B, HK, 1, E)
    keys, values = tensor(B, HK, N, E), tensor(B, HK, N, E)
    bare, grown = set(), set()
    for n in (1, 2, 3, 10, 50, 100, 200, 300, N):
        bare |= programs(sdpa, query, keys[:, :, :n], values[:, :, :n], is_causal="lower_right",
                         enable_gqa=True, device=device)  # fmt: skip
    for _ in range(N):
        grown |= programs(cache.append, key, value)
        grown |= programs(cache.attend, query)
    assert bare and len(grown - bare) <= 1, differences(grown - bare)


# ---- clattn.warm_up ----


def prefill(device, dtype="f4", **options):
    for heads, rows, keys in [(2, 17, 33), (1, 100, 100), (3, 300, 70), (64, 512, 512)]:
        sdpa(*qkv((1, heads), rows, keys, 64, dtype=np.dtype(dtype)), device=device, **options)


def decode(device):
    for query_heads, heads in [(4, 4), (4, 2), (6, 2), (8, 2), (8, 1)]:
        for keys in 40, 9000:
            q = qkv((1, query_heads), 1, 1, 64)[0]
            k, v = qkv((1, heads), 1, keys, 64)[1:]
            sdpa(q, k, v, enable_gqa=True, device=device)


def cached(device, dtype="f4"):
    cache = clattn.KVCache(2, 4, 6000, 64, dtype=dtype, device=device)
    for n in 5000, 1, 1:
        q, k, v = qkv((2, 4), n, n, 64)
        cache.append(k, v)
        cache.attend(np.repeat(q[:, :, -1:], 2, axis=1))
    cache.reorder([1, 0])


def paged(device, dtype, tensors=np.asarray):
    """Steps of a server: prompts, tokens, both in one call, a fork, a long sequence."""
    cache = clattn.PagedKVCache(600, 16, 2, 64, dtype=dtype, device=device)
    first, second = cache.open(2)

    def step(sequences, *rows, heads=8):
        ends, total = np.cumsum((0, *rows)), sum(rows)
        k, v = (tensors(np.zeros((total, 2, 64), "f4")) for _ in range(2))
        cache.append(sequences, k, v, cu_seq=ends)
        cache.attend(tensors(np.zeros((total, heads, 64), "f4")), sequences, cu_seq_q=ends)

    for rows in (200, 100), (1, 1), (40, 1), (3, 1), (17, 2), (9000, 1), (1, 1):
        step([first, second], *rows)
        step([first, second], 1, 1, heads=2)
    step([cache.fork(second)], 1)


def packed(device):
    """`varlen_attn` without a cache."""
    q, k = np.zeros((350, 8, 64), "f4"), np.zeros((350, 2, 64), "f4")
    for q_ends in (0, 200, 350), (0, 1, 2):
        clattn.varlen_attn(q[: q_ends[-1]], k, k, q_ends, (0, 200, 350), enable_gqa=True,
                           window_size=(-1, 0), device=device)  # fmt: skip


def pending(device):
    """A call that is left pending, because it has Tensors and much work."""
    q, k, v = (clattn.tensor(x, device) for x in qkv((1, 8), 300, 300, 64))
    sdpa(q, k, v, device=device)


def masked(device):
    for mask in np.ones((1, 33), bool), np.ones((1, 33), "f4"):
        sdpa(*qkv((1, 2), 17, 33, 64), mask, device=device)


def far(device):
    """Keys that are far from each other."""
    q, k, v = (np.zeros((1, 16, n, 64), "f4") for n in (256, 9000, 9000))
    sdpa(q, k, v, device=device)


WARMED = {  # what is warmed up, and calls that then need nothing else
    "the default": ({}, [
        prefill,
        lambda device: prefill(device, is_causal=True),
        lambda device: prefill(device, window=(9, 0), is_causal=True, scale=0.3),
        decode,
        pending,
    ]),
    "float16": ({"dtypes": ["float16"], "kinds": ["prefill"]}, [
        lambda device: prefill(device, "float16"),
        lambda device: prefill(device, "float16", is_causal=True),
    ]),
    "bfloat16": ({"dtypes": ["bfloat16"], "kinds": ["prefill"]}, [
        lambda device: prefill(device, "bfloat16"),
        lambda device: prefill(device, "bfloat16", is_causal=True),
    ]),
    "codes": ({"kinds": ["cache"], "codes": ["int8"]}, [
        cached,
        lambda device: cached(device, "int8"),
    ]),
    "pages": ({"kinds": ["paged"], "codes": ["int8"]}, [
        packed,
        lambda device: paged(device, "f4"),
        lambda device: paged(device, "int8", lambda x: clattn.tensor(x, device)),
    ]),
    "other kinds": ({"kinds": ["cache", "masked", "prefill"]}, [cached, masked, far]),
}  # fmt: skip


@pytest.mark.by_turns
@pytest.mark.parametrize("case", WARMED)
def test_what_is_warmed_up(device, case):
    """Few rows of bfloat16 use vectors, many rows AMX."""
    options, calls = WARMED[case]
    warmed = programs(clattn.warm_up, **options, head_sizes=[64], device=device)
    assert warmed
    for action in calls:
        missing = programs(action, device) - warmed
        assert not missing, differences(missing)


def test_what_is_not_warmed_up(device):
    """The count itself sees programs."""
    warmed = programs(clattn.warm_up, device=device, head_sizes=[64])
    other = {"dtype": float16} if device.type == "cpu" else {}  # head sizes are data there
    assert len(programs(sdpa, *qkv((1, 2), 17, 33, 24, **other), device=device) - warmed) == 1
