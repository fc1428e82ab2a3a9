# SPDX-License-Identifier: MIT
"""csrc/opencl/spec.h: a kernel's list of macros has a bound, and says when it is exceeded."""

import shutil
import subprocess

import pytest
from support.processes import ROOT

PROGRAM = """
#include "opencl/spec.h"

int
main(void)
{
    struct { ca_kernel_spec spec; char behind[1024]; } guarded = {0};
    for (int n = 0; n < CA_MAX_DEFINES + 8; n++) {
        ca_kernel_define(&guarded.spec, "MACRO", n);
    }
    for (unsigned n = 0; n < sizeof guarded.behind; n++)
        if (guarded.behind[n] != 0) return 1;
    return guarded.spec.ndefines == CA_MAX_DEFINES + 8 ? 0 : 2;
}
"""


def test_one_macro_too_many_is_counted_and_not_written(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, made = tmp_path / "macros.c", tmp_path / "macros"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-std=c11", "-I", ROOT / "csrc", "-o", made, source], check=True)
    assert subprocess.run([made]).returncode == 0
