"""The server itself: health, models, keys, faults of the path, start and end."""

from __future__ import annotations

import urllib.error

import pytest

from rollout import ConfigError, EngineStateError, ServeConfig
from tests.serve.served import Served, served_directory

pytestmark = pytest.mark.distributed


def test_health_answers_and_the_model_is_listed(served: Served) -> None:
    for path in ("/health", "/health/"):
        answer = served.get(path)
        assert (answer.status, answer.body) == (200, b"")
    listed = served.get("/v1/models")
    (model,) = listed.json()["data"]
    assert listed.headers["Content-Length"] == str(len(listed.body))
    assert model["object"] == "model"
    assert model["max_model_len"] == 512
    assert served.get(f"/v1/models/{model['id']}").json() == model


def test_unknown_paths_methods_and_models_get_json_errors(served: Served) -> None:
    for answer, status, kind in (
        (served.get("/v2/models"), 404, "NotFoundError"),
        (served.post("/v1/models"), 405, "MethodNotAllowedError"),
        (served.get("/v1/models/another"), 404, "NotFoundError"),
    ):
        assert answer.status == status
        assert answer.headers["Content-Type"].startswith("application/json")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (status, kind)
        assert answer.headers["Allow"] == ("GET" if status == 405 else None)


def test_a_second_server_is_refused(served: Served) -> None:
    with pytest.raises(EngineStateError, match="serves already"):
        served.do(served.llm.serve(ServeConfig(port=0), blocking=False))


def test_api_key_and_admin_key_guard_their_routes() -> None:
    server = served_directory(ServeConfig(port=0, api_key="sesame", admin_key="master"))
    try:
        assert server.get("/health").status == 200
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", Authorization="Bearer wrong").status == 401
        assert server.get("/v1/models", Authorization="Bearer sesame").status == 200
        assert server.get("/v1/models", Authorization="Bearer master").status == 200
        server.do(server.llm.stop_serving())
        with pytest.raises(urllib.error.URLError):
            server.get("/health")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "0.0.0.0"}, "api_key"),
        ({"host": "0.0.0.0", "api_key": "a"}, "admin_key"),
        ({"protocols": ("openai", "front")}, "front"),
        ({"port": 70000}, "port"),
        ({"max_n": 0}, "max_n"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**fields)


def test_doors_is_the_deprecated_name_of_protocols() -> None:
    with pytest.warns(DeprecationWarning, match="write protocols="):
        config = ServeConfig(doors=("openai",))  # type: ignore[call-arg]
    assert config.protocols == ("openai",)
    with pytest.raises(TypeError, match="give protocols alone"):
        ServeConfig(doors=("openai",), protocols=("vllm",))  # type: ignore[call-arg]
