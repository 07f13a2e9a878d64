"""How scripts/http_fields.py reads the fields of a class or a handler, and the page it makes."""

from __future__ import annotations

import ast
import json

import pytest

from scripts.http_fields import PAGE, PEER_KEYS, SOURCES, Source, keys_of, page

TREE = ast.parse('''
class Base:
    name: str
    _private: int = 0
    names: ClassVar[set[str]] = set()
    LIMIT = 3

class Inner(BaseReq):
    rid: str

class BaseReq:
    http_worker_ipc: str

class Request(Base):
    """About it: not a field."""
    size: Annotated[int, Field(alias="length")] = Field(1, validation_alias=AliasChoices("width"))

    @model_validator(mode="before")
    def check(cls, values):
        values.get("old_name")
        other.get("nothing")

    @model_validator(mode="after")
    def check_after(cls, values):
        values.get("nothing")

    def method(self):
        local: int = 3

async def handler(
    raw_request: Request,
    item: Annotated[str, Body(embed=True)],
    mode: Annotated[str, Query()] = "abort",
    flag: bool = Query(default=False),
    manager=Depends(get_manager),
):
    body = await raw_request.json()
    body.get("ids")
    raw_request.query_params.getlist("tags")
''')


def source(*classes: str, function: str | None = None, route: str = "POST /x") -> Source:
    return Source(route=route, package="p", file="f", classes=classes, function=function)


def test_fields_of_a_class_are_those_of_its_bases_aliases_and_early_validators() -> None:
    assert keys_of(TREE, source("Request")) == {"name", "size", "width", "old_name"}


def test_fields_that_processes_of_a_server_send_each_other_are_left_out() -> None:
    assert keys_of(TREE, source("Inner")) == {"rid"}


def test_a_handler_takes_fields_of_the_body_or_of_the_query() -> None:
    assert keys_of(TREE, source(function="handler")) == {"item", "ids"}
    of_query = source(function="handler", route="POST /x ?")
    assert keys_of(TREE, of_query) == {"mode", "flag", "tags"}


def test_a_class_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="Gone"):
        keys_of(TREE, source("Gone"))


def test_the_list_has_fields_of_every_source() -> None:
    keys = json.loads(PEER_KEYS.read_text(encoding="utf-8"))["keys"]
    for each in SOURCES:
        known = keys.get(each.route, {}).values()
        assert any(each.package in packages for packages in known) or each.route.endswith(
            "end_weight_update"
        )


def test_the_page_is_that_of_the_structs() -> None:
    """Write it by `python scripts/http_fields.py page`."""
    assert PAGE.read_text(encoding="utf-8") == page()
