from __future__ import annotations

from pathlib import Path

import pytest

from tierax.cache.disk.store import PageStore


@pytest.fixture(params=["directory", "file://", "memory://", "json"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> PageStore:
    """One of each kind of place."""
    url = {
        "directory": str(tmp_path / "a cache"),
        "file://": f"file://{tmp_path}/a%20cache/",
        "memory://": "memory://some/prefix",
        "json": '{"driver": "memory", "path": "prefix"}',
    }[request.param]
    return PageStore(url)
