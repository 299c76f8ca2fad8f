"""What every request passes first: the key, the size of its body, what makes its body JSON; and the headers of every answer."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Callable, Coroutine
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onekv.server.errors import ApiError

MAX_DEPTH: Final = 48  # of nested JSON
_OPEN: Final = ("/", "/health")  # what needs no key, as do the page's own files
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Doors:
    """ASGI middleware.

    Args:
        key:      what a client must send as its Bearer token; None: nothing, but then pages of other origins are refused
        max_body: most bytes of a body
        is_local: answer only to names of this machine
    """

    def __init__(self, app: ASGIApp, key: str | None, max_body: int, is_local: bool) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._max_body = max_body
        self._is_local = is_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered.update(_HEADERS)
                answered.setdefault("Cache-Control", "no-cache")  # the page of another version is not this one's
            await send(message)

        error = self._refusal(scope, headers)
        if error is not None:
            await error.response()(scope, receive, send_with_headers)
            return
        taken = 0

        async def receive_counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_body:
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        path, host = scope["path"], headers.get("host", "")
        if self._is_local and not _is_loopback(host):
            return ApiError(403, f"this server answers on this machine only, not as {host!r}", code="foreign_host")
        origin = headers.get("origin")
        if self._key is None and origin is not None and urlsplit(origin).netloc != host:
            return ApiError(403, f"pages of {origin!r} may not use this server", code="foreign_origin")
        if self._key is not None and path not in _OPEN and not path.startswith("/static/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            # Compared in constant time, whatever came.
            if not hmac.compare_digest(token.strip().encode("latin-1"), self._key) or scheme.lower() != "bearer":
                message = "this server needs its API key: Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        return self._too_large() if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body else None

    def _too_large(self) -> ApiError:
        # The rest of the body is not read, so the connection cannot be used again.
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large", headers={"Connection": "close"})


def _is_loopback(host: str) -> bool:
    name = host if host.endswith("]") else host.rsplit(":", 1)[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


class JsonRequest(Request):
    """A request whose JSON has bounded depth, no NaN, and text that has UTF-8."""

    async def json(self) -> Any:
        """The body.

        Raises:
            ApiError: no such JSON.
        """
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """Reads bodies as `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, given another request."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return read


def parse(body: bytes) -> Any:
    """JSON of a body.

    Raises:
        ApiError: not JSON, or more than anybody's request needs.
    """
    try:
        parsed = json.loads(body, parse_constant=_no_number)
        _check(parsed)
    except RecursionError:
        raise ApiError(400, f"the body's JSON is nested deeper than {MAX_DEPTH}", code="invalid_json") from None
    except ValueError as error:  # also UnicodeDecodeError, and numbers of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    return parsed


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check(parsed: Any) -> None:
    """Depth, and halves of surrogate pairs: JSON may escape them, UTF-8 has none."""
    level = [parsed]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return
    raise RecursionError


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    else:
        inside = value if isinstance(value, list) else [value]
    for one in inside:
        if isinstance(one, str) and not one.isascii():
            one.encode()
    return [one for one in inside if isinstance(one, dict | list)]
