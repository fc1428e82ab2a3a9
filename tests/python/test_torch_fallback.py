# SPDX-License-Identifier: MIT
"""What goes to torch as before: gradients, dropout, transforms, subclasses, errors."""

import re

import clattn
import numpy as np
import pytest
from clattn import attention
from support.data import draw
from support.processes import run_python

torch = pytest.importorskip("torch")

import clattn.torch  # noqa: E402
from support.torch_calls import TORCH, close, tensors, to_torch  # noqa: E402
from support.variants import force  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_calls")


WIDE = torch.ones((1, 1, 3, 257))  # clattn's fast backward pass takes head sizes up to 256


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "mask"])
def test_gradients_of_wide_heads_are_torchs(device, torch_calls, which):
    gradients = []
    for function in (lambda *x: F.scaled_dot_product_attention(*x), TORCH):
        arguments = [WIDE * 0.1, WIDE * 0.2, WIDE.cumsum(-1), to_torch(draw((3, 3)))]
        arguments[which].requires_grad_()
        with clattn.torch.sdpa(device):
            function(*arguments).square().sum().backward()
        gradients.append(arguments[which].grad)
    assert torch.equal(*gradients)
    assert not torch_calls


def test_a_tensor_computed_from_a_parameter_needs_gradients(device, torch_calls):
    q, k, v = tensors()
    weight = torch.nn.Parameter(torch.eye(8))
    with clattn.torch.sdpa(device):
        assert F.scaled_dot_product_attention(q @ weight, k, v).requires_grad
        with torch.no_grad():
            assert not F.scaled_dot_product_attention(q @ weight, k, v).requires_grad
    assert torch_calls == [device] * 2


def batched(function, q, k, v):
    return torch.vmap(lambda a, b: function(a, b, v[0]), in_dims=(0, 0))(q, k)


def gradient(function, q, k, v):
    return torch.func.grad(lambda a: function(a, k, v).square().sum())(q)


def tangent(function, q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(lambda a: function(a, k, v), (q,), (q,))[1]


def functional_form(function, q, k, v):
    return torch.func.functionalize(lambda a: function(a, k, v))(q)


def dual(function, q, k, v):
    forward = torch.autograd.forward_ad
    with forward.dual_level(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return forward.unpack_dual(function(forward.make_dual(q, q), k, v)).tangent


def compiled(function, q, k, v):
    torch.compiler.reset()
    # A new function each time, since the code that torch keeps is that of the code object
    body = eval("lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1", {"F": F})
    return torch.compile(body, backend="eager", fullgraph=True)(q, k, v)


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def exported(function, q, k, v):
    program = torch.export.export(Module(), (q, k, v))
    assert "scaled_dot_product_attention" in str(program.graph)
    return program.module()(q, k, v)


def traced(function, q, k, v):
    program = torch.jit.trace(Module(), (q, k, v), check_trace=False)
    assert "scaled_dot_product_attention" in str(program.graph)
    return program(q + 1, k, v)


def symbolic(function, q, k, v):
    return torch.fx.symbolic_trace(Module())(q + 1, k, v)


def fake_traced(function, q, k, v):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda a: function(a, k, v))(q)(q + 1)


def watched(function, q, k, v):
    """By a mode that sees every operator, as counters and profilers of models do."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with Watch():
        result = function(q, k, v)
    assert any("scaled_dot_product" in name for name in seen)
    return result


def nested(function, q, k, v):
    q, k, v = (torch.nested.as_nested_tensor(list(x)) for x in (q, k, v))
    return torch.stack(function(q, k, v).unbind())


class Marked(torch.Tensor):
    """A subclass as users write it: results are of it, too."""


def subclass(function, q, k, v):
    result = function(q.as_subclass(Marked), k, v)
    assert type(result) is Marked
    return result.as_subclass(torch.Tensor)


def mask_of_a_subclass(function, q, k, v):
    return function(q, k, v, torch.zeros(17, 33).as_subclass(Marked)).as_subclass(torch.Tensor)


def meta(function, q, k, v):
    result = function(*(x.to("meta") for x in (q, k, v)))
    assert result.is_meta
    return torch.empty_like(result, device="cpu").zero_()


def fake(function, q, k, v):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        result = function(*(mode.from_tensor(x) for x in (q, k, v)))
    assert isinstance(result, torch._subclasses.FakeTensor)
    return torch.zeros(result.shape)


def negated(function, q, k, v):
    """The imaginary part of a conjugate shares memory and carries a bit that says "negative"."""
    parts = [torch.complex(x, x).conj().imag for x in (q, k, v)]
    assert all(part.is_neg() for part in parts)
    return function(*parts)


def uneven_groups(function, q, k, v):
    """torch repeats the heads of keys and of values apart; clattn refuses that."""
    return function(torch.cat([q, q], 1), k[:, :2], v, enable_gqa=True)


def shorter_values(function, q, k, v):
    """torch leaves the last keys out where values are fewer."""
    return function(q, k, v[:, :, :20])


def infinite_scale(function, q, k, v):
    return function(q, k, v, scale=float("inf")).nan_to_num(nan=1)


def scale_beyond_float32(function, q, k, v):
    return function(q, k, v, scale=1e39).nan_to_num(nan=1)


def scale_of_a_tensor(function, q, k, v):
    return function(q, k, v, scale=torch.tensor(0.5))


TORCHS = [batched, gradient, tangent, functional_form, dual, compiled, exported, traced, symbolic,
          fake_traced, watched, nested, subclass, mask_of_a_subclass, meta, fake,
          negated, uneven_groups, shorter_values, infinite_scale, scale_beyond_float32,
          scale_of_a_tensor]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # about nested tensors and torch.jit being prototypes or old
@pytest.mark.parametrize("use", TORCHS, ids=lambda use: use.__name__)
def test_torchs_calls_are_torchs(device, torch_calls, use):
    q, k, v = tensors()
    theirs = use(TORCH, q, k, v)
    with clattn.torch.sdpa(device):
        ours = use(F.scaled_dot_product_attention, q, k, v)
    assert torch.equal(ours, theirs)
    assert use in (meta, fake) or ours.abs().max() > 0
    assert not torch_calls


q, k, v = tensors()
PLACE = re.compile(r" \(position \d\)")  # in messages on arguments without a name
REFUSED = {
    "dtypes that differ": ((q, k.double(), v), {}),
    "integers": ((q.int(), k.int(), v.int()), {}),
    "complex": ((q.cfloat(), k.cfloat(), v.cfloat()), {}),
    "8-bit floats": (tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v)), {}),
    "sparse": (tuple(x.to_sparse() for x in (q, k, v)), {}),
    "head sizes that differ": ((q, k[..., :5], v), {}),
    "one dimension": ((q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), {}),
    "heads that do not divide": ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
    "heads without groups": ((q, k[:, :2], v[:, :2]), {}),
    "batches that differ": ((q, torch.cat([k, k]), v), {}),
    "a mask wider than the scores": ((q, k, v), {"attn_mask": torch.ones(2, 1, 1, 17, 33)}),
    "mask of another shape": ((q, k, v), {"attn_mask": torch.ones(16, 33)}),
    "mask of integers": ((q, k, v), {"attn_mask": torch.ones(17, 33, dtype=torch.int32)}),
    "mask of NumPy": ((q, k, v), {"attn_mask": np.ones((17, 33), np.float32)}),
    "NumPy": ((q.numpy(), k.numpy(), v.numpy()), {}),
    "None": ((q, None, v), {}),
    "a word for is_causal": ((q, k, v), {"is_causal": "left"}),
    "a number for is_causal": ((q, k, v), {"is_causal": 1}),
    "a number for enable_gqa": ((q, k, v), {"enable_gqa": 1}),
    "a word for scale": ((q, k, v), {"scale": "1"}),
    "a scale beyond float64": ((q, k, v), {"scale": 10**400}),
    "dropout above 1": ((q, k, v), {"dropout_p": 1.5}),
    "dropout below 0": ((q, k, v), {"dropout_p": -0.5}),
    "dropout of an array": ((q, k, v), {"dropout_p": np.zeros(2)}),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_errors_are_torchs(device, torch_calls, case):
    arguments, options = case
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        TORCH(*arguments, **options)
    with clattn.torch.sdpa(device), pytest.raises(theirs.type) as ours:
        F.scaled_dot_product_attention(*arguments, **options)
    assert PLACE.sub("", str(ours.value)) == PLACE.sub("", str(theirs.value))
    assert not torch_calls


@pytest.mark.parametrize(
    "error", [clattn.DeviceError, TypeError, ValueError, clattn._core.SettingError]
)
def test_other_errors_are_raised(monkeypatch, error):
    """If torch answered instead, nobody would see that the device is gone, or a fault of clattn."""

    def fail(*args, **options):
        raise error("gone")

    monkeypatch.setattr(attention, "scaled_dot_product_attention", fail)
    with clattn.torch.sdpa(), pytest.raises(error, match="gone"):
        F.scaled_dot_product_attention(q, k, v)


def test_errors_about_the_environment_are_raised():
    """If torch answered instead, a measurement would measure torch. Each in a new process."""
    code = """
        import clattn.torch, os, pytest, torch
        from clattn._core import SettingError
        x = torch.ones(1, 1, 2, 4)
        with clattn.torch.sdpa():
            for name, words in [
                ("CLATTN_MEMORY", "ram"), ("CLATTN_TUNING", "maybe"), ("CLATTN_KERNEL", "fastest"),
                ("CLATTN_LOCAL_MEMORY", "0"), ("CLATTN_TRIALS", "no"),
                ("CLATTN_MAX_SECONDS", "-1"), ("CLATTN_DEVICE", "no such device"),
            ]:
                os.environ[name] = words
                with pytest.raises(SettingError, match=name):
                    torch.nn.functional.scaled_dot_product_attention(x, x, x)
                del os.environ[name]
    """
    run_python(code)


def test_a_forced_kernel_that_refuses_is_raised(device, monkeypatch, torch_calls):
    """attention_mma refuses float64."""
    force(monkeypatch, "mma")
    with clattn.torch.sdpa(device), pytest.raises(ValueError, match="CLATTN_KERNEL"):
        F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert not torch_calls


def test_default_device_of_torch(device, torch_calls):
    """torch.set_default_device is a mode that sees every call; results stay where they were."""
    torch.set_default_device("meta")
    try:
        with clattn.torch.sdpa(device):
            ours = F.scaled_dot_product_attention(q, k, v)
    finally:
        torch.set_default_device(None)
    close(ours, TORCH(q, k, v))
    assert torch_calls == [device]


def test_function_modes_see_the_call(device, torch_calls):
    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    with clattn.torch.sdpa(device), Watch():
        ours = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        assert seen.count(F.scaled_dot_product_attention) == 1
    close(ours, TORCH(q, k, v, is_causal=True, scale=0.5))
    assert torch_calls == [device]


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("corner", ["upper_left", "lower_right"])
def test_torchs_causal_biases(device, torch_calls, corner, patched):
    """torch.nn.attention.bias: masks that know the function by its place in torch."""
    bias = pytest.importorskip("torch.nn.attention.bias")  # takes seconds: it imports a compiler
    given = getattr(bias, f"causal_{corner}")(17, 33)
    theirs = F.scaled_dot_product_attention(q, k, v, given)
    if patched:
        with clattn.torch.sdpa(device):
            ours = F.scaled_dot_product_attention(q, k, v, given)
        assert torch_calls == [device]
    else:
        ours = clattn.torch.scaled_dot_product_attention(q, k, v, given)
        assert not torch_calls
    close(ours, theirs)
