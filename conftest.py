"""Examples of pages and docstrings run in a folder of their own: they may write what they like."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder(request: pytest.FixtureRequest, tmp_path_factory, monkeypatch) -> None:
    if isinstance(request.node, pytest.DoctestItem) and Path(request.node.path).suffix == ".md":
        monkeypatch.chdir(tmp_path_factory.mktemp("page"))
