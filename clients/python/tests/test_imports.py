"""The error of a module whose library is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from traces import PACKAGE


@pytest.mark.parametrize("extra", ["redis", "flask"])
def test_missing_library_is_named_with_the_command_that_installs_it(extra: str) -> None:
    manifest = (PACKAGE / "pyproject.toml").read_text("utf-8")
    requirement = re.search(rf'^{extra} = \["(.*)"\]$', manifest, re.MULTILINE)
    assert requirement is not None
    program = f"import sys; sys.modules['{extra}'] = None; import tidegate.{extra}"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f": pip install '{requirement[1]}'"), done.stderr
