# SPDX-License-Identifier: MIT
"""use_device belongs to a context: tasks of asyncio, threads, and the jobs of pools of threads."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import clattn
import numpy as np
import pytest
from support.data import qkv

ARRAYS = qkv((1, 2), 9, 13, 8)


@pytest.fixture
def two():
    """A device that is not the default one, and the default."""
    default = clattn.get_default_device()
    others = [device for device in clattn.devices() if device != default]
    if not others:
        pytest.skip("there is one device only")
    return others[0], default


def where():
    """The device on which a call without `device=` runs."""
    return clattn.tensor(ARRAYS[0]).device


def test_tasks_that_take_turns(two):
    """Each sees its own device, however they alternate; the task around them sees none."""

    async def task(device, turns):
        for _ in range(turns):
            with clattn.use_device(device):
                await asyncio.sleep(0)
                assert where() == clattn.get_default_device() == device
                await asyncio.sleep(0)
                assert where() == device
            await asyncio.sleep(0)
            assert where() == two[1]

    async def main():
        await asyncio.gather(*(task(device, 5 + n) for n, device in enumerate(two * 2)))
        assert where() == two[1]

    asyncio.run(main())


def test_a_task_begins_with_the_device_of_its_maker(two):
    """And keeps it when the block of the maker has ended."""

    async def later(event):
        await event.wait()
        return where()

    async def main():
        event = asyncio.Event()
        with clattn.use_device(two[0]):
            task = asyncio.create_task(later(event))
        event.set()
        assert await task == two[0]
        assert where() == two[1]

    asyncio.run(main())


def test_a_task_that_is_cancelled_in_a_block(two):
    async def main():
        started = asyncio.Event()

        async def task():
            with clattn.use_device(two[0]):
                started.set()
                await asyncio.sleep(60)

        running = asyncio.create_task(task())
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert where() == two[1]

    asyncio.run(main())


def test_threads_of_asyncio(two):
    """asyncio.to_thread takes the context along, run_in_executor does not."""

    async def main():
        with clattn.use_device(two[0]):
            assert await asyncio.to_thread(where) == two[0]
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, where) == two[1]
            context = contextvars.copy_context()
            assert await loop.run_in_executor(None, context.run, where) == two[0]

    asyncio.run(main())


def test_jobs_of_a_pool(two):
    """A job sees neither the block around `submit` nor that of the job before it."""

    def job(device):
        before = where()
        with clattn.use_device(device):
            return before, where()

    with ThreadPoolExecutor(1) as pool, clattn.use_device(two[0]):
        for device in two * 2:
            assert pool.submit(job, device).result() == (two[1], device)
        assert where() == two[0]


def test_calls_of_many_tasks_at_once(two):
    """In threads and on both devices: right results."""
    right = clattn.scaled_dot_product_attention(*ARRAYS)

    async def task(n):
        with clattn.use_device(two[n % 2]):
            return await asyncio.to_thread(clattn.scaled_dot_product_attention, *ARRAYS)

    async def main():
        return await asyncio.gather(*map(task, range(20)))

    for result in asyncio.run(main()):
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-6)
