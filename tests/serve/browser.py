"""Chromium without a window, driven through its DevTools protocol: enough to load a page, look
at it and hear its complaints."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)
QUIET = (
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Browser:
    """One tab. `errors` holds what its console complained of: exceptions, console.error, failed
    loads, broken policies."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.loaded: set[str] = set()
        self.ids = itertools.count(1)
        self.answers: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> Browser:
        import aiohttp

        assert PROGRAM is not None
        self.folder = tempfile.mkdtemp(prefix="rorqual-browser-")
        command = [PROGRAM, *FLAGS, *QUIET, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.http = aiohttp.ClientSession()
        self.socket = await self.http.ws_connect(await self._page(), max_msg_size=0)
        self.reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)
        return self

    async def _page(self) -> str:
        """The tab's address, once the program has written down its port."""
        note = Path(self.folder) / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not note.exists() or "\n" not in note.read_text():
                assert self.process.poll() is None, "the browser ended"
                await asyncio.sleep(0.05)
            while True:
                async with self.http.get(
                    f"http://127.0.0.1:{note.read_text().split()[0]}/json"
                ) as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                if pages:
                    return pages[0]["webSocketDebuggerUrl"]
                await asyncio.sleep(0.05)

    async def __aexit__(self, *ended: object) -> None:
        self.reader.cancel()
        with suppress(asyncio.CancelledError):
            await self.reader
        await self.socket.close()
        await self.http.close()
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _read(self) -> None:
        async for message in self.socket:
            said = message.json()
            if "id" in said:
                self.answers.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.lifecycleEvent" and params["name"] == "load":
            self.loaded.add(params["loaderId"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(
                str(params["exceptionDetails"].get("exception", params["exceptionDetails"]))
            )
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.ids)
        future = self.answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, 60)
        assert "error" not in answer, answer
        return answer["result"]

    async def shape(self, width: int, height: int, scheme: str = "light") -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    async def open(self, url: str) -> None:
        begun = await self.call("Page.navigate", url=url)
        assert "errorText" not in begun, begun
        async with asyncio.timeout(60):
            while begun["loaderId"] not in self.loaded:
                await asyncio.sleep(0.02)

    async def value(self, expression: str) -> Any:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 60.0) -> Any:
        """The expression's value once it is true."""
        try:
            async with asyncio.timeout(seconds):
                while not (found := await self.value(expression)):
                    await asyncio.sleep(0.1)
                return found
        except TimeoutError:
            raise AssertionError(
                "never true: "
                f"{expression}\n{await self.value('document.body.innerText')}\n{self.errors}"
            ) from None

    async def picture(self, path: Path, whole: bool = True) -> None:
        answer = await self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **await self._clip(whole),
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        }
