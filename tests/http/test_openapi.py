"""The OpenAPI document against the server: valid and invalid requests never cause a 5xx.

The requests are made by schemathesis out of the document, by the same rules for everybody.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.serving.guarded_server import Guarded, guarded

QUICK, FULL = 8, 400
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Guarded]:
    with guarded(max_model_len=128, request_timeout=60) as running:
        yield running


@pytest.fixture(scope="module")
def document(served: Guarded) -> dict[str, Any]:
    found: dict[str, Any] = served.get("/openapi.json").json()
    return found


def test_every_route_is_in_the_document(document: dict[str, Any]) -> None:
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert found == set(OPERATIONS)


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "default"}
            assert ("security" in operation) == (path != "/health")
    schemas = document["components"]["schemas"]
    assert set(schemas["ErrorDetail"]["properties"]) == {"message", "type", "param", "code"}
    assert set(schemas["MessageErrorBody"]["properties"]) == {"error", "request_id", "type"}


def drive(served: Guarded, document: dict[str, Any], method: str, path: str, num_examples: int) -> None:
    """Send valid requests and invalid bodies; afterwards the engine is alive and holds no blocks."""
    operation = schemathesis.openapi.from_dict(document)[path][method]
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if method == "POST" else [])]
    quietly = settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    for mode in modes:

        @quietly
        @given(case=operation.as_strategy(mode))
        def ask(case: schemathesis.Case) -> None:
            if path.endswith("/completions") and isinstance(case.body, dict):
                case.body.setdefault("max_tokens", 2)  # chat would go on to the end of its context
            elif path == "/v1/responses" and isinstance(case.body, dict):
                case.body.setdefault("max_output_tokens", 2)
            case.call_and_validate(base_url=served.url, checks=CHECKS, timeout=120)

        ask()
    served.idle()
    assert served.engine.state == "live"


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[path for _, path in OPERATIONS])
def test_no_request_breaks_the_server(served: Guarded, document: dict[str, Any], method: str, path: str) -> None:
    drive(served, document, method, path, QUICK)


@pytest.mark.full
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[path for _, path in OPERATIONS])
def test_no_request_of_many_breaks_the_server(
    served: Guarded, document: dict[str, Any], method: str, path: str
) -> None:
    drive(served, document, method, path, FULL)
