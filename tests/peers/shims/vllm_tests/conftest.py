"""Takes the place of vLLM's `tests/conftest.py`, which imports vLLM.

Every name of a model is the directory of the tiny one: nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer


class LocalAssetServer:
    """The server of images. No test that runs asks it for one."""


@pytest.fixture
def local_asset_server() -> LocalAssetServer:
    return LocalAssetServer()


@pytest.fixture(scope="session", autouse=True)
def models_of_one_directory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for loaded in (AutoConfig, AutoTokenizer):
            patch.setattr(loaded, "from_pretrained", _of_one_directory(loaded.from_pretrained))
        yield


def _of_one_directory(load: Any) -> Any:
    def loaded(*_: object, **__: object) -> Any:
        return load(os.environ["PEER_MODEL"])

    return loaded
