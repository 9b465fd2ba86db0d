"""The OpenAPI document names what there is, routes, requests, keys and switches, and refers to nothing else."""

import re

import jsonschema_rs
import pytest

from tandem_services.gateway.api.adapters import ADAPTER_PATHS, LoadAdapterRequest, UnloadAdapterRequest
from tandem_services.gateway.api.openapi.document import Traits, openapi_document
from tandem_services.gateway.api.openapi.operations import OPERATIONS
from tandem_services.gateway.api.sessions import CloseRequest, OpenRequest
from tandem_services.gateway.app import create_app
from tandem_services.gateway.http.body import BodyDecoder
from tandem_testing.gateway_builders import FakeChooser, SessionShelf, config_of, fleet_of, live_gateway
from tandem_testing.key_files import bearer, write_keys
from tandem_testing.mock_engine import MockBehavior, hash_tokens
from tandem_testing.openapi_contract import references

FREE = Traits(strict_fields=False, keys=False, metrics=True)
GUARDED = Traits(strict_fields=True, keys=True, metrics=False)


def build_app(rack, tokenizer):
    config = config_of()
    return create_app(config, [fleet_of(config, FakeChooser([]), SessionShelf(), rack.context, tokenizer)])


def documented(document) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def test_every_route_is_described_and_nothing_else(rack, tokenizer):
    routes = build_app(rack, tokenizer).routes
    served = {(method, re.sub(r":path\}", "}", route.path)) for route in routes for method in route.methods - {"HEAD"}}
    assert documented(openapi_document(FREE)) == served


def test_every_request_is_described_by_what_it_is_decoded_to(rack, tokenizer, monkeypatch):
    # Decoders of these were made when their modules were imported.
    shapes = {OpenRequest, CloseRequest, LoadAdapterRequest, UnloadAdapterRequest}
    build = BodyDecoder.__init__

    def watched(self, shape, **options):
        shapes.add(shape)
        build(self, shape, **options)

    monkeypatch.setattr(BodyDecoder, "__init__", watched)
    build_app(rack, tokenizer)
    assert {operation.request for operation in OPERATIONS} - {None} == shapes


@pytest.mark.parametrize("traits", [FREE, GUARDED], ids=["free", "guarded"])
def test_openapi_references_resolve_and_components_are_used(traits):
    document = openapi_document(traits)
    named = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    named |= {f"#/components/responses/{name}" for name in document["components"]["responses"]}
    used = set(references(document))
    assert used <= named
    assert {name for name in named - used if "/schemas/" in name} == set()


@pytest.mark.parametrize("traits", [FREE, GUARDED], ids=["free", "guarded"])
def test_every_component_of_the_openapi_document_is_a_valid_schema(traits):
    document = openapi_document(traits)
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema)
        assert schema, name
    names = [method["operationId"] for path in document["paths"].values() for method in path.values()]
    assert len(names) == len(set(names))


async def test_document_is_served(gateway):
    answer = await gateway.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == openapi_document(FREE)
    assert (await gateway.http.head("/openapi.json")).status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_no_page_loads_scripts_from_elsewhere(gateway, path):
    assert (await gateway.http.get(path)).status_code == 404


async def test_routes_that_need_a_key_match_the_document(rack, tokenizer, tmp_path):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    keys = write_keys(tmp_path, ann={})
    async with live_gateway(rack.context, tokenizer, rack.engines, api_keys=keys) as gateway:
        assert (await gateway.http.get("/openapi.json")).status_code == 401
        document = (await gateway.http.get("/openapi.json", headers=bearer("ann"))).json()
        for method, path in sorted(documented(document)):
            operation = document["paths"][path][method.lower()]
            answer = await gateway.http.request(method, re.sub(r"\{\w+\}", "x", path))
            needs_key = operation.get("security", document["security"]) != []
            assert (answer.status_code == 401) == needs_key, (method, path)
            assert ("401" in operation["responses"]) == needs_key
        assert (await gateway.http.get("/metrics", headers=bearer("ann"))).status_code == 403
    schemes = document["components"]["securitySchemes"]
    assert [schemes[name]["type"] for [name] in document["security"]] == ["http", "apiKey"]


def test_component_names_hold_no_module_path():
    """Two structs of one name are told apart by their modules, which clients would generate names from."""
    assert [name for name in openapi_document(GUARDED)["components"]["schemas"] if "." in name] == []


def test_document_without_keys_has_no_security_scheme():
    document = openapi_document(FREE)
    assert "security" not in document
    needs_token = {
        path
        for path, methods in document["paths"].items()
        if any("401" in each["responses"] for each in methods.values())
    }
    assert needs_token == set(ADAPTER_PATHS)


def test_document_without_metrics_has_no_metrics_route():
    paths = openapi_document(GUARDED)["paths"]
    assert not {"/metrics", *ADAPTER_PATHS} & set(paths)


@pytest.mark.parametrize("strict", [False, True])
async def test_unknown_fields_are_refused_where_the_schema_is_closed(rack, tokenizer, strict):
    rack.add("solo", MockBehavior(token=hash_tokens(3, 250)))
    refused = {}
    async with live_gateway(rack.context, tokenizer, rack.engines, strict_fields=strict) as gateway:
        document = (await gateway.http.get("/openapi.json")).json()
        for operation in OPERATIONS:
            if operation.request is not None:
                name = operation.request.__name__
                needed = {"tokens": [5]} if name == "DetokenizeRequest" else {}
                token = {"authorization": f"Bearer {gateway.order_token}"} if operation.administrative else {}
                answer = await gateway.http.post(operation.path, json={**needed, "no_such_field": 1}, headers=token)
                refused[name] = "no_such_field" in answer.text
    for name, is_refused in refused.items():
        assert (document["components"]["schemas"][name].get("additionalProperties") is False) == is_refused, name
    # Bodies that are one object alone are closed without the flag.
    closed = {"OpenRequest", "CloseRequest", "LoadAdapterRequest", "UnloadAdapterRequest"}
    assert ({name for name, is_refused in refused.items() if is_refused} == closed) != strict
    assert all(refused[name] for name in closed & refused.keys())
