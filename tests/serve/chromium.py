"""A headless Chromium, driven by its DevTools protocol over a websocket."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--disable-dev-shm-usage", "about:blank"),
)
START_S, DEADLINE_S = 120.0, 120.0


class Tab:
    """One tab. `errors`: what the page wrote to its console as errors or did not catch."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next_id = 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        await self._socket.send_json({"id": self._next_id, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), DEADLINE_S)
            if message.get("id") == self._next_id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])

    async def open(self, url: str, *, width: int = 1200, height: int = 900) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not await self.evaluate(expression):
            text = await self.evaluate("document.body ? document.body.innerText : ''")
            assert time.monotonic() < deadline, f"never: {expression}\n{text}\n{self.errors}"
            await asyncio.sleep(0.1)

    async def screenshot(self, path: Path, *, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        taken = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser with a fresh profile, and end it."""
    assert PROGRAM is not None
    browser = subprocess.Popen(
        [PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port = await _debugging_port(profile / "DevToolsActivePort")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/json/list") as answer,
        ):
            (url,) = [t["webSocketDebuggerUrl"] for t in await answer.json() if t["type"] == "page"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        browser.terminate()
        browser.wait()


async def _debugging_port(path: Path) -> int:
    deadline = time.monotonic() + START_S
    while not (path.is_file() and path.read_text().count("\n")):
        assert time.monotonic() < deadline, "Chromium did not start"
        await asyncio.sleep(0.1)
    return int(path.read_text().split()[0])
