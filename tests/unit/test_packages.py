"""Packages with backends of their own (packages/) belong to this release."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = sorted((ROOT / "packages").glob("*/pyproject.toml"))


def project(path: Any) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(path.read_text())["project"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_package_asks_for_this_oallama(path: Any) -> None:
    ours, theirs = project(ROOT / "pyproject.toml"), project(path)
    assert theirs["version"] == ours["version"] and theirs["requires-python"] == ours["requires-python"]
    assert f"oallama=={ours['version']}" in theirs["dependencies"]
    (entry,) = theirs["entry-points"]["oallama.modules"].values()
    module, function = entry.split(":")
    code = (path.parent / module / "__init__.py").read_text()
    assert f"def {function}()" in code
