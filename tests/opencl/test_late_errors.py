# SPDX-License-Identifier: MIT
"""Errors that OpenCL reports after a call has returned, and commands that it refuses at once."""

import pytest
from support.variants import decode_for, forced

pytestmark = pytest.mark.by_turns  # how a process lives and ends depends on no kernel


def test_the_next_thing_that_waits_says_it(run_with_faults):
    """The error is raised once. It names the function, the kernel, the device and OpenCL's code."""
    run_with_faults("""
        waits = {
            "numpy": lambda t: t.numpy(), "a view": lambda t: t[0, 1:].numpy(),
            "asarray": lambda t: np.asarray(t), "repr": repr,
            "synchronize": lambda t: clattn.synchronize(device),
            "all devices": lambda t: clattn.synchronize(),
            "dlpack": lambda t: t.__dlpack__(dl_device=(1, 0)),
            "an array comes out": lambda t: attend(q, t, tv),
            "an array is written": lambda t: attend(tq, t, tv, out=np.empty_like(q)),
            "arrays alone": lambda t: attend(q, k, v, device=device),
        }
        if other is not None:
            waits["to"] = lambda t: t.to(other).numpy()
        for name, wait in waits.items():
            print(name, flush=True)
            faults.faults_fail(1, LOST)
            lost = attend(tq, tk, tv)
            refusal(lambda: wait(lost), *WORDS)
            del lost
            afterwards()
    """)


def test_any_call_of_a_chain_may_fail(run_with_faults):
    """No call of the chain waits. Reading the last result raises the error of any of them."""
    run_with_faults("""
        for n in range(1, 6):
            faults.faults_fail(n, LOST)
            t = tq
            for _ in range(5):
                t = attend(t, tk, tv)
            refusal(t.numpy, *WORDS)
            del t
            afterwards()
    """)


def test_a_result_that_nobody_wants(run_with_faults):
    """Waiting for the device raises the error, though nobody reads the result."""
    run_with_faults("""
        faults.faults_fail(1, LOST)
        attend(tq, tk, tv)
        refusal(lambda: clattn.synchronize(device), *WORDS)
        afterwards()
        if other is not None:
            elsewhere = clattn.tensor(q, other)
            faults.faults_fail(1, LOST)
            attend(tq, tk, tv)
            elsewhere.numpy()
            clattn.synchronize(other)
            refusal(lambda: clattn.synchronize(device), *WORDS)
            afterwards()
    """)


def test_the_function_is_named(run_with_faults):
    """The error names the operator that failed, not a call before or after it."""
    run_with_faults("""
        for title, call in CALLS.items():
            tensors = {name: clattn.tensor(a, device) for name, a in call.arrays.items()}
            clattn.synchronize(device)
            faults.faults_fail(1, LOST)
            def run_and_wait():  # the call itself may meet its failure, at its second launch
                call.run(lambda name, _: tensors[name])
                clattn.synchronize(device)
            words = call.name.split(".")[-1], device.name, "CL_OUT_OF_RESOURCES"
            try:
                text = refusal(run_and_wait, *words)
            except SystemExit:
                # a call of microseconds, which has been waited for
                assert not faults.faults_had_event()
                continue
            print(title, flush=True)
            assert title != "tril" or "attention" not in text
            del tensors
            afterwards()
    """)


def test_a_call_that_waits_says_it_itself(run_with_faults):
    """Calls with arrays wait, and calls with memory that the host shares."""
    run_with_faults("""
        faults.faults_fail(1, LOST)
        refusal(lambda: attend(q, k, v, device=device), *WORDS[2:], "CL_")
        afterwards()
        if in_host_memory(device):
            out = clattn.tensor(q, device)
            seen = out.numpy()
            faults.faults_fail(1, LOST)
            refusal(lambda: attend(tq, tk, tv, out=out), *WORDS[2:], "CL_")
            del out, seen
            afterwards()
    """)


def test_a_command_that_is_refused(run_with_faults):
    """The call raises the error itself, also if it is small or the device is gone."""
    run_with_faults("""
        little = [clattn.tensor(a[:1, :1, :4], device) for a in (q, k, v)]
        start = settled(device)
        for code, name in ((-36, "CL_INVALID_COMMAND_QUEUE"), (-2, "CL_DEVICE_NOT_AVAILABLE")):
            for tensors in ((tq, tk, tv), little, (q, tk, tv), (tq, k, v)):
                faults.faults_refuse(1, code)
                refusal(lambda: attend(*tensors), name, "attention_", device.name)
                afterwards()
            faults.faults_refuse(1, code)
            refusal(lambda: clattn.tril(tq), name, "diagonal", device.name)
            afterwards()
        faults.faults_refuse(1, OUT_OF_MEMORY)
        try:
            attend(tq, tk, tv)
        except MemoryError as error:
            print(error)
        afterwards()
    """)


@pytest.mark.cpus
@pytest.mark.parametrize(
    "arrays", ["tq, tk, tv", "q, k, v", "*(a[:1, :1, :40] for a in (q, k, v))"]
)
def test_a_kernel_that_cannot_be_launched(run_with_faults, arrays):
    """Another one takes its place, with one warning, whatever way the call runs."""
    run_with_faults(f"""
        import warnings
        def run():
            return np.asarray(attend({arrays}, device=device))
        wanted = run()
        faults.faults_refuse(1, LOST)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = [run(), run()]
        begin, reason = str(told[0].message).split(": ")
        assert begin == f"device '{{device.name}}' cannot use the kernel 'attention_cpu' for " \\
            "calls like this one, and others take its place there from now on"
        assert "CL_OUT_OF_RESOURCES" in reason
        assert len(told) == 1
        same_bits(*results)
        np.testing.assert_allclose(results[0], wanted, atol=1e-6)
        assert faults.faults_to_come() == 0
    """)


def test_a_device_that_launches_nothing_any_more(run_with_faults):
    """Each call ends with the error, once every kernel has been tried. The next one is right."""
    run_with_faults("""
        import warnings
        warnings.simplefilter("ignore")
        packed = rng.standard_normal((9, 2, 16)).astype("f4")
        out, lse = attend(q, k, v, return_lse=True, device=device)
        backward = clattn.scaled_dot_product_attention_backward
        calls = (
            lambda: clattn.varlen_attn(*[packed] * 3, [0, 4, 9], [0, 4, 9], device=device),
            lambda: attend(q, k, v, device=device),
            lambda: backward(out, q, k, v, out, lse, device=device)[:3],
        )
        for call in calls:
            before = call()
            faults.faults_refuse_each(1000, LOST)
            refusal(call, "CL_OUT_OF_RESOURCES", device.name)
            assert faults.faults_to_come() == 1, "kernels were launched again and again"
            faults.faults_refuse_each(0, 0)
            for one, other in zip(call(), before, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
    """)


@pytest.mark.cpus
def test_a_kernel_that_does_not_build(run_with_faults, tmp_path):
    """Another one takes its place, with one warning. One that is forced raises.

    The programs of other dtypes stay in use.
    """
    run_with_faults(
        """
        import warnings
        wide = [a.astype("f8") for a in (q, k, v)]
        before = attend(q, k, v, device=device)
        faults.faults_define(b"find_rows=1")
        clattn._core.force("cpu")
        refusal(lambda: attend(*wide, device=device), "'attention_cpu' does not build")
        clattn._core.force()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = [attend(*wide, device=device) for _ in range(2)]
        assert len(told) == 1
        assert "'attention_cpu' for calls like this one, and others" in str(told[0].message)
        assert "does not build" in str(told[0].message)
        same_bits(*results)
        np.testing.assert_allclose(results[0], right, atol=1e-5)
        same_bits(attend(q, k, v, device=device), before)
        """,
        XDG_CACHE_HOME=tmp_path,
    )


def test_a_buffer_that_does_not_fit(run_with_faults, device):
    """clattn empties the pool and tries again before it raises MemoryError."""
    run_with_faults(
        """
        if in_host_memory(device):
            sys.exit(0)
        pooled = clattn.tensor(q, device)
        del pooled
        clattn.synchronize(device)
        assert clattn.memory_stats(device)["pooled_blocks"] > 0
        faults.faults_fail_buffers(1, OUT_OF_MEMORY)
        big = clattn.tensor(np.zeros(10**7), device)
        assert clattn.memory_stats(device)["pooled_blocks"] == 0
        same_bits(big, np.zeros(10**7))
        del big
        clattn.synchronize(device)
        clattn.empty_cache(device)
        calls = (lambda: clattn.tensor(q, device), lambda: attend(tq, tk, tv),
                 lambda: attend(tq, k, v), lambda: tq.T.reshape(-1))
        for action in calls:
            faults.faults_fail_buffers(1000, OUT_OF_MEMORY)
            try:
                action()
            except MemoryError as error:
                assert device.name in str(error), error
            else:
                raise SystemExit("there was memory")
            faults.faults_fail_buffers(0, 0)
            afterwards()
            clattn.empty_cache(device)
        """,
        CLATTN_MEMORY="copy",
    )


def test_the_end_of_a_process_that_nobody_told(run_with_faults):
    """A failure that is never asked about neither crashes nor hangs the interpreter's exit."""
    done = run_with_faults("""
        faults.faults_fail(1, LOST)
        lost = attend(attend(tq, tk, tv), tk, tv)
        clattn.kept = lost
    """)
    assert not done.stderr


def test_a_kernel_of_two(device, run_with_faults):
    """Splits of the keys and their merge are one launch, whichever kernel fails."""
    run_with_faults(
        """
        row, keys = (rng.standard_normal((1, 1, n, 64)).astype("f4") for n in (1, 8192))
        trow, tkeys = (clattn.tensor(a, device) for a in (row, keys))
        expected = attend(row, keys, keys, device=device)
        start = settled(device)
        for n in (1, 2):
            before = faults.faults_kernels()
            faults.faults_fail(n, LOST)
            refusal(lambda: attend(row, keys, keys, device=device), *WORDS[2:], "CL_")
            assert faults.faults_kernels() == before + 2
            afterwards()
            faults.faults_fail(n, LOST)
            lost = attend(trow, tkeys, tkeys)
            refusal(lost.numpy, *WORDS)
            del lost
            afterwards()
            faults.faults_refuse(n, LOST)
            refusal(lambda: attend(trow, tkeys, tkeys), *WORDS[1:])
            afterwards()
            same_bits(attend(trow, tkeys, tkeys), expected)
        """,
        **forced(decode_for(device)),
    )


def test_a_reorder_that_fails_half_way(run_with_faults):
    """The cache is as before, or the sequences that were to move are empty."""
    run_with_faults("""
        k, v = (a[[0, 1, 0]][:, :, :40] for a in (k, v))
        for dtype in ("float32", "int4"):
            cache, kernels = clattn.KVCache(3, 8, 64, 64, dtype=dtype, device=device), 0
            cache.append(k, v, [40, 30, 20])
            whole = [np.array(cache.key), np.array(cache.value)]
            before = faults.faults_kernels()
            cache.reorder([0, 2, 1])
            kernels = faults.faults_kernels() - before
            for n in range(1, kernels + 1):
                cache.reset()
                cache.append(k, v, [40, 30, 20])
                faults.faults_refuse(n, -36)
                refusal(lambda: cache.reorder([0, 2, 1]), "CL_INVALID_COMMAND_QUEUE", "pages_copy")
                copied = n > kernels / 2
                assert cache.lengths.tolist() == ([40, 0, 0] if copied else [40, 30, 20]), n
                for rows, right in zip((cache.key, cache.value), whole, strict=True):
                    for b, length in enumerate(cache.lengths):
                        same_bits(rows[b, :, :length].numpy(), right[b, :, :length])
            cache.reset()
            cache.append(k, v, [40, 30, 20])
            cache.reorder([0, 2, 1])
            assert cache.lengths.tolist() == [40, 20, 30]
    """)


def test_gradients_that_several_launches_add_up(run_with_faults):
    """Where keys broadcast along one of many dimensions, nothing is added twice after a failure.

    A launch that lacks memory runs once more, and another kernel takes the place of one that the
    driver refuses.
    """
    run_with_faults("""
        import warnings
        warnings.simplefilter("ignore")
        shape = (3, 2, 3, 2, 3)
        query, grad = (rng.standard_normal((*shape, 8, 16)).astype("f4") for _ in range(2))
        key, value = (rng.standard_normal((3, 1, 3, 1, 3, 8, 16)).astype("f4") for _ in range(2))
        mask = rng.standard_normal((3, 1, 3, 1, 3, 8, 8)).astype("f4")
        sinks = rng.standard_normal(3).astype("f4")
        output, lse = attend(query, key, value, mask, sinks=sinks, return_lse=True, device=device)
        names = clattn.AttentionGradients._fields
        def gradients():
            return clattn.scaled_dot_product_attention_backward(
                grad, query, key, value, output, lse, mask, sinks=sinks, needs=names, device=device)
        wanted, outcomes = gradients(), set()
        for code in (OUT_OF_MEMORY, LOST):
            before = faults.faults_kernels()
            gradients()
            for n in range(1, 1 + faults.faults_kernels() - before):
                faults.faults_refuse(n, code)
                try:
                    got = gradients()
                except (clattn.DeviceError, MemoryError) as error:
                    outcomes.add(type(error))
                    continue
                outcomes.add("right")
                for name, one, right in zip(names, got, wanted, strict=True):
                    np.testing.assert_allclose(one, right, atol=1e-4, err_msg=f"{name}, {n}")
        assert outcomes == {"right", clattn.DeviceError, MemoryError}
    """)
