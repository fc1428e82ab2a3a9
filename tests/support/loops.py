# SPDX-License-Identifier: MIT
"""Cases in one test: pytest takes a few milliseconds for each test, and many cases less."""

import functools
import inspect

import numpy as np
import pytest


def looped(name, values, ids=None):
    """As pytest.mark.parametrize with one argument, in one test. A failure names its case.

    It is for cases without fixtures of their own; a case that does not apply returns, for a skip
    would leave out those behind it. `ids` are names, or a function of a value.
    """
    names = list(map(ids or str, values)) if callable(ids or str) else ids

    def decorate(test):
        @functools.wraps(test)
        def run(**arguments):
            for value, said in zip(values, names, strict=True):
                try:
                    test(**arguments, **{name: value})
                except pytest.skip.Exception:
                    raise AssertionError(f"{name} {said} skips the cases behind it") from None
                except BaseException as error:  # pytest.fail raises no Exception
                    error.add_note(f"{name}: {said}")
                    raise

        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name != name]
        assert len(others) < len(signature.parameters), f"{test.__name__} takes no {name}"
        run.__signature__ = signature.replace(parameters=others)
        return run

    return decorate


def looped_dtypes(name, dtypes):
    """As `looped`, of dtypes that kernels compute in, or tuples that begin with one.

    Cases of float64 are left out on a device that lacks it.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(**arguments):
            first = arguments[name][0] if isinstance(arguments[name], tuple) else arguments[name]
            if arguments["device"].float64 or np.dtype(first) != np.float64:
                test(**arguments)

        return looped(name, dtypes)(run)

    return decorate
