"""Makes the OpenAPI document of a server from its routes and request structs.

`rollout.serve.app` serves it at GET /openapi.json. `rollout.serve.health` and
`rollout.serve.control.handlers` use `installed_version`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from rollout.serve.access import Access
from rollout.serve.state import Route

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "A field is wrong, or the request is not possible.",
    "401": "The key is missing or wrong.",
    "403": "The Host or Origin of the request is not allowed.",
    "404": "The model is not served.",
    "405": "The path has another method.",
    "408": "The body did not arrive in time.",
    "409": "Another call changed the pause or the weights meanwhile, or the weights are released.",
    "413": "The body is too large.",
    "415": "The body is not declared as JSON.",
    "429": "Too many requests wait; try again after Retry-After seconds.",
    "503": "Generation is paused or not possible now, or the server is shutting down.",
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document that describes `routes`."""
    bodies = list(dict.fromkeys(route.body for route in routes if route.body is not None))
    schemas, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    for name in components.keys() - _components_of_operations(routes):
        # Only operations refuse unknown fields.
        components[name].pop("additionalProperties", None)
    schema_of = dict(zip(bodies, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":.+}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout", "version": installed_version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _components_of_operations(routes: Sequence[Route]) -> set[str]:
    bodies = [r.body for r in routes if r.body is not None and r.access is Access.ADMIN]
    return set(msgspec.json.schema_components(dict.fromkeys(bodies), ref_template=_REF)[1])


def _operation(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    answered = {"200": {"description": "Done."}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": answered | {code: {"description": text} for code, text in _ERRORS.items()},
    }
    if parameters := [*_path_parameters(route), *_query_parameters(route)]:
        operation["parameters"] = parameters
    if route.access is not Access.OPEN:
        operation["security"] = [{"key": []}]
    if route.body is not None:
        operation["requestBody"] = {
            "content": {"application/json": {"schema": schema_of[route.body]}}
        }
    return operation


def _path_parameters(route: Route) -> Iterator[dict[str, Any]]:
    if "{" in route.path:
        name = route.path.partition("{")[2].partition(":")[0].rstrip("}")
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(route: Route) -> Iterator[dict[str, Any]]:
    if route.query is not None:
        (schema,) = msgspec.json.schema(route.query)["$defs"].values()
        for name, of_value in schema["properties"].items():
            yield {"name": name, "in": "query", "required": False, "schema": of_value}


def installed_version() -> str:
    """Return the version of this package, or "0" if it is not installed."""
    try:
        return version("rollout-engine")
    except PackageNotFoundError:
        return "0"
