# SPDX-License-Identifier: MIT
"""Threads that run side by side until all of them have ended."""

import threading


def run_together(*targets):
    """Call each target in a thread of its own; an exception of any of them is raised here."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
