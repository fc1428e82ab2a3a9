# SPDX-License-Identifier: MIT
"""torch's tensors and JAX's arrays: what only they have, out=, memory, and what is refused."""

import gc
import warnings

import clattn
import numpy as np
import pytest
from references.attention import DTYPES, bfloat16
from references.diagonal import numbers
from support.data import draw, qkv, sdpa
from support.foreign import JAX, TORCH, OnlyArray, same, to_jax
from support.processes import run_on
from support.sizes import REST, SMALL, WIDE

torch = pytest.importorskip("torch")

of, back = TORCH.of, TORCH.back


def tensors(*args, **options):
    return tuple(of(a) for a in qkv(*args, **options))


# ---- layouts ----


VIEWS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: t.repeat_interleave(2, -2)[..., ::2, :],
    "part": lambda t: torch.cat([t, t * torch.nan], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:, :1].expand(t.shape),
    "one key": lambda t: t[..., :1, :].expand(t.shape),
    "one number": lambda t: t[:1, :1, :1, :1].expand(t.shape),
    "overlapping": lambda t: t.as_strided(t.shape, (1, 1, 1, 1)),
}


@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(device, view, dtype):
    given = [view(t) for t in tensors((2, 3), 5, 17, WIDE, dtype=dtype)]
    arrays = [back(t) for t in given]
    TORCH.check(sdpa(*given, device=device), sdpa(*arrays, device=device))
    same(clattn.tensor(given[1], device=device), np.array(arrays[1]))


def test_parameters_and_inference_tensors(device):
    """A parameter that needs no gradient is a tensor; so is one of inference mode."""
    arrays = qkv((2, 3), 5, 17, WIDE)
    right = sdpa(*arrays, device=device)
    parameters = [torch.nn.Parameter(of(a), requires_grad=False) for a in arrays]
    TORCH.check(sdpa(*parameters, device=device), right)
    with torch.inference_mode():
        given = [of(a) * 1 for a in arrays]
        TORCH.check(sdpa(*given, device=device), right)
    TORCH.check(sdpa(*given, device=device), right)
    buffers = [t.detach() for t in map(of, arrays)]
    with torch.no_grad():
        TORCH.check(sdpa(*buffers, device=device), right)


def test_results_live_by_themselves(device):
    """Results stay valid when all else is gone, and may be written to without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = qkv((2, 3), 5, 17, WIDE)
        right = sdpa(*arrays, device=device)
        part = sdpa(*map(of, arrays), device=device)[1]
        gc.collect()
        others = [sdpa(*map(of, arrays), device=device).add_(n) for n in range(5)]
        same(part.numpy(), right[1])
        part.mul_(2)
        same(part.numpy(), right[1] * 2)
        same(others[3].numpy(), right + 3)
        assert not part.requires_grad and part.device.type == "cpu"


# ---- out ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out(device, dtype):
    given = tensors((2, 3), 2, 17, WIDE, REST, dtype=dtype)
    right = sdpa(*map(back, given), device=device)
    out = of(np.zeros((2, 3, 2, REST), dtype))
    address = out.data_ptr()
    assert sdpa(*given, device=device, out=out) is out
    assert out.data_ptr() == address
    TORCH.check(out, right)
    result, lse = sdpa(*given, device=device, out=out, return_lse=True)
    assert result is out and type(lse) is torch.Tensor


def test_strided_out(device):
    """Memory between the entries of out is not written."""
    given = tensors((2, 3), 5, 17, WIDE)
    right = sdpa(*map(back, given), device=device)
    big = torch.full((2, 5, 3, 2 * WIDE + 8), 7.0)
    out = big.transpose(1, 2)[..., 4:-4:2]
    assert sdpa(*given, device=device, out=out) is out
    same(np.ascontiguousarray(out.numpy()), right)
    assert (big == 7).sum() == big.numel() - out.numel()


def test_out_of_another_library(device):
    """out is returned, whatever the query is."""
    arrays = qkv((2, 3), 5, 17, WIDE)
    right = sdpa(*arrays, device=device)
    out = torch.zeros(2, 3, 5, WIDE)
    assert sdpa(*arrays, device=device, out=out) is out
    TORCH.check(out, right)
    out = np.zeros((2, 3, 5, WIDE), np.float32)
    assert sdpa(*map(of, arrays), device=device, out=out) is out
    same(out, right)
    out = clattn.tensor(np.zeros_like(out), device=device)
    assert clattn.scaled_dot_product_attention(*map(of, arrays), out=out) is out
    same(out, right)
    out = torch.zeros(2, 3, 5, WIDE)
    on_device = [clattn.tensor(a, device=device) for a in arrays]
    assert clattn.scaled_dot_product_attention(*on_device, out=out) is out
    TORCH.check(out, right)


def test_out_that_is_an_input(device):
    """The result is that of the numbers that were there before."""
    q, k, v = tensors((2, 3), 17, 17, WIDE)
    right = sdpa(*map(back, (q, k, v)), device=device)
    for n in range(3):
        given = [t.clone() for t in (q, k, v)]
        assert sdpa(*given, device=device, out=given[n]) is given[n]
        TORCH.check(given[n], right)


def test_out_of_diagonals(device):
    a = numbers((3, 7, 9), np.int16)
    right = clattn.diagonal_matrix(a, 5, -2, 2, device=device)
    tensor, out = of(a.copy()), of(np.zeros_like(a))
    assert clattn.diagonal_matrix(tensor, 5, -2, 2, out=out, device=device) is out
    TORCH.check(out, right)
    assert clattn.diagonal_matrix(tensor, 5, -2, 2, out=tensor, device=device) is tensor
    TORCH.check(tensor, right)


def wrong_outs():
    needs = torch.zeros(2, 3, 5, WIDE, requires_grad=True)
    return [
        ("dtype", TypeError, torch.zeros(2, 3, 5, WIDE, dtype=torch.float64)),
        ("shape", ValueError, torch.zeros(2, 3, 5, 17)),
        ("rank", ValueError, torch.zeros(3, 5, WIDE)),
        ("requires_grad", ValueError, needs),
        ("sparse", ValueError, torch.zeros(2, 3, 5, WIDE).to_sparse()),
        ("meta", ValueError, torch.zeros(2, 3, 5, WIDE, device="meta")),
        ("__array__", TypeError, OnlyArray(np.zeros((2, 3, 5, WIDE), np.float32))),
    ]


@pytest.mark.parametrize("row", wrong_outs(), ids=lambda row: row[0])
def test_wrong_out(device, row):
    _, exception, out = row
    for arrays in (qkv((2, 3), 5, 17, WIDE), tensors((2, 3), 5, 17, WIDE)):
        with pytest.raises(exception, match=r"\bout\b"):
            sdpa(*arrays, device=device, out=out)


# ---- what is refused ----


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


ODD = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed sparse": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.ones(4, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 1.0, 0, torch.qint8),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_tensors_that_torch_does_not_export(device, make):
    """A ValueError from torch's own, which names the argument and quotes the message alone.

    Of a nested tensor it says what takes one.
    """
    odd, plain = make(), torch.ones(4, 4)
    for name, arguments in (("query", (odd, plain, plain)), ("value", (plain, plain, odd)),
                            ("attn_mask", (plain, plain, plain, odd))):  # fmt: skip
        with pytest.raises(ValueError, match=rf"\b{name}\b") as caught:
            sdpa(*arguments, device=device)
        reason = caught.value.__cause__
        if odd.is_nested:
            assert f"{name} is a nested tensor; expected an array: clattn" in str(caught.value)
            continue
        assert reason is not None
        assert str(reason).splitlines()[0] in str(caught.value)
        assert "frame #" not in str(caught.value), "torch's stack"
    with pytest.raises(ValueError, match=r"\barray\b"):
        clattn.tensor(odd, device=device)
    plain = torch.ones(4, SMALL)
    TORCH.check(sdpa(plain, plain, plain, device=device), np.ones((4, SMALL), "f4"))


def test_conjugate_tensors(device):
    """Conjugate tensors are complex, and clattn takes no complex dtype."""
    odd, plain = torch.ones(4, 4, dtype=torch.complex64).conj(), torch.ones(4, 4)
    with pytest.raises((TypeError, ValueError), match=r"\bkey\b"):
        sdpa(plain, odd, plain, device=device)


def test_the_negative_bit(device):
    """A lazily negated tensor, which torch exports without its sign, is refused by name."""
    negated = torch.complex(of(draw((5, WIDE))), of(draw((5, WIDE), seed=1))).conj().imag
    assert negated.is_neg()
    plain = negated.resolve_neg()
    for name, arguments in {
        "query": (negated, plain, plain),
        "value": (plain, plain, negated),
    }.items():
        with pytest.raises(ValueError, match=rf"turned signs; pass {name}\.resolve_neg\(\)"):
            sdpa(*arguments, device=device)
    with pytest.raises(ValueError, match="turned signs; pass array"):
        clattn.tensor(negated, device=device)
    same(clattn.tensor(plain, device=device), plain.numpy())


def test_dtypes_that_clattn_lacks(device):
    for dtype in (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2):
        with pytest.raises(TypeError, match=r"\barray\b"):
            clattn.tensor(torch.zeros(3, 4).to(dtype), device=device)
    for dtype in (torch.int32, torch.uint8, torch.bool):
        wrong = torch.zeros(3, 4).to(dtype)
        with pytest.raises(TypeError, match=r"\bquery\b.*" + str(dtype).removeprefix("torch.")):
            sdpa(wrong, wrong, wrong, device=device)


# ---- memory ----


@pytest.mark.by_turns
@pytest.mark.cpus
def test_nothing_is_copied(device):
    """Inputs of 64 MiB, contiguous or strided, and results of 64 MiB: no more than the results."""
    run_on(
        device,
        """
        from support.foreign import LIBRARIES
        k = np.full((1, 2, 1 << 17, 64), 0.5, np.float32)
        for library in LIBRARIES:
            if library.name in ("jax", "ctypes"):  # made of copies
                continue
            clattn.diagonal_matrix(library.of(draw((8, 8))), 1, 0, 1, device=device)
            q = library.of(draw((1, 2, 4, 64)))
            for key in (k, k.reshape(1, 1 << 17, 2, 64).swapaxes(1, 2)):
                few = library.of(key[:, :, : 1 << 14])
                sdpa(q, few, few, device=device)  # builds the programs, which takes memory too
                given = library.of(key)
                out, rise = measure_memory(lambda: sdpa(q, given, given, device=device))
                assert rise < 12 * MIB, f"{library}, keys: {rise / MIB:.0f} MiB"
            square = library.of(k.reshape(4096, 4096))
            out, rise = measure_memory(lambda: clattn.diagonal_matrix(square, 1, 0, 1,
                device=device))
            assert rise < 64 * MIB + 12 * MIB, f"{library}, result: {rise / MIB:.0f} MiB"
            del out
        """,
        env={"CLATTN_MEMORY": "host" if device.memory_mode != "svm" else None},
    )


@pytest.mark.by_turns
def test_nothing_is_kept(device):
    """A hundred results of 4 MiB, of torch, as out, and of errors."""
    run_on(
        device,
        """
        import pytest, torch
        q = torch.ones(1, 16, 1024, 64)
        k = torch.ones(1, 16, 4, 64)
        needs = torch.ones(1, 16, 1024, 64, requires_grad=True)

        def several():
            for _ in range(10):
                sdpa(q, k, k, device=device)
                sdpa(q, k, k, device=device, out=torch.empty_like(q))
                for wrong in ((needs, k, k), (q, k[..., :3], k), (q, k, k.double())):
                    with pytest.raises((TypeError, ValueError)):
                        sdpa(*wrong, device=device)

        for _ in range(3):
            several()
        gc.collect()
        grown = []  # a leak shows in every round, what an allocator keeps does not
        for _ in range(3):
            start = memory_field("VmRSS")
            several()
            gc.collect()
            grown.append(memory_field("VmRSS") - start)
        assert min(grown) < 6 * MIB, [f"{n / MIB:.0f} MiB" for n in grown]
        """,
    )


# ---- JAX ----


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.mark.usefixtures("jax")
def test_jax_arrays_are_not_written(device):
    """As out they are refused, by name, and stay as they were."""
    arrays = qkv((2, 3), 5, 17, WIDE)
    out = to_jax(np.full((2, 3, 5, WIDE), 7, np.float32))
    for given in (arrays, [to_jax(a) for a in arrays]):
        with pytest.raises(ValueError, match=r"\bout\b"):
            sdpa(*given, device=device, out=out)
    with pytest.raises(ValueError, match=r"\bout\b"):
        clattn.diagonal_matrix(out, 1, 0, 1, device=device, out=out)
    assert (np.asarray(out) == 7).all()


def test_jax_and_torch(device, jax):
    arrays = qkv((2, 3), 5, 17, WIDE)
    right = sdpa(*arrays, device=device)
    q, k, v = arrays
    JAX.check(sdpa(to_jax(q), of(k), v, device=device), right)
    TORCH.check(sdpa(of(q), to_jax(k), of(v), device=device), right)


def test_jax_arrays_that_are_traced_or_deleted(device, jax):
    """An array without numbers is refused by name."""
    plain = to_jax(draw((4, 4)))
    gone = to_jax(draw((4, 4)) + 1)
    gone.delete()
    with pytest.raises((TypeError, ValueError), match=r"\bquery\b"):
        sdpa(gone, plain, plain, device=device)

    def traced(x):
        return sdpa(x, x, x, device=device)

    with pytest.raises((TypeError, ValueError), match=r"\bquery\b"):
        jax.jit(traced)(plain)
