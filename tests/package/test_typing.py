# SPDX-License-Identifier: MIT
"""Names that clattn does not have are errors for type checkers. typing_cases.py has the types."""

import subprocess
import sys

import pytest

MISSPELT = "scaled_dot_product_atention", "KVCashe", "jaxx"
RIGHT = "scaled_dot_product_attention", "KVCache", "jax", "show_config"
# clattn/__init__.py alone: what it imports takes mypy half a minute.
MYPY = "[mypy]\nfollow_imports = skip\n[mypy-clattn]\nfollow_imports = silent\n"
CHECKERS = {"mypy": ["--config-file", "mypy.ini"], "basedpyright": ["--pythonpath", sys.executable]}


@pytest.mark.parametrize("checker", CHECKERS)
def test_misspelt_names(checker, tmp_path):
    pytest.importorskip(checker)
    (tmp_path / "mypy.ini").write_text(MYPY)
    (tmp_path / "names.py").write_text(
        "import clattn\n" + "".join(f"print(clattn.{name})\n" for name in (*RIGHT, *MISSPELT))
    )
    command = [sys.executable, "-m", checker, *CHECKERS[checker], "names.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    errors = [line for line in done.stdout.splitlines() if " error:" in line]
    assert len(errors) == len(MISSPELT), done.stdout + done.stderr
    for name, line in zip(MISSPELT, errors, strict=True):
        assert name in line
