"""Bodies and parameters made from the server's own document: no answer is a 5xx, and every answer fits the document."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi import checks

from helpers.fake_engine import FakeEngine, say
from tierax.serving.http.auth import OPEN_ROUTES
from tierax.serving.openapi.document import documented_routes

pytestmark = pytest.mark.asyncio

TOO_STRICT = [checks.positive_data_acceptance]
"""Fields may each be right by the schema and make no sense together, as min_tokens above max_tokens: 400 is right then."""
TOO_LAX = [checks.negative_data_rejection]
"""Unknown parameters are ignored, as are unknown fields of bodies."""
ITEM_BY_ITEM = {"POST /cache/warm"}
"""Here a wrong item is told of in its place while the others go on."""
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


def attack(url: str, key: str | None, examples: int) -> dict[str, set[int]]:
    """Sends that many requests of each kind to each operation; the statuses that came back, by operation."""
    import requests

    found: dict[str, set[int]] = {}
    with requests.Session() as session:
        # A kept cookie of the dashboard would stand for a key where there should be none.
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        if key is not None:
            session.headers["Authorization"] = f"Bearer {key}"
        schema = schemathesis.openapi.from_dict(session.get(f"{url}/openapi.json", timeout=10).json())
        results: Any = schema.get_all_operations()
        for operation in (result.ok() for result in results):
            statuses = found.setdefault(operation.label, set())
            for mode in MODES:
                # There is nothing wrong that could be sent to a route without parameters and body.
                with suppress(Unsatisfiable):
                    _attack_one(operation, mode, url, session, examples, statuses)
    return found


def _attack_one(operation: Any, mode: Any, url: str, session: Any, examples: int, statuses: set[int]) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=10)
        statuses.add(response.status_code)
        lax = not operation.body or operation.label in ITEM_BY_ITEM
        excluded = TOO_STRICT + (TOO_LAX if lax else [])
        case.validate_response(response, excluded_checks=excluded)

    send()


async def test_answers_fit_the_document(serve):
    live = await serve(engine=FakeEngine(say("héllo"), context_length=256), api_key="right")
    found = await asyncio.to_thread(attack, live.url, "right", 3)
    assert len(found) == len(list(documented_routes(live.app.router)))
    for operation, statuses in found.items():
        assert statuses & {200, 204, 400, 404, 409}, operation
        # One of the checks is to leave the key away.
        assert 401 in statuses or operation.split()[1] in OPEN_ROUTES, operation


@pytest.mark.slow
async def test_many_answers_fit_the_document(serve):
    live = await serve(engine=FakeEngine(say("héllo"), context_length=256))
    found = await asyncio.to_thread(attack, live.url, None, 60)
    for operation in ("chat/completions", "completions", "responses", "embeddings"):
        assert {200, 400} <= found[f"POST /v1/{operation}"]
