from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from helpers.script_backend import ScriptBackend
from tierax import (
    set_default_backend,
)


@pytest.fixture
def backend() -> Iterator[ScriptBackend]:
    with ScriptBackend() as made:
        set_default_backend(made)
        yield made
        set_default_backend(None)
    assert not [thread for thread in threading.enumerate() if thread.name in ("lang", "program")]
