"""What a client is told when something is wrong: OpenAI's error shape, whatever went wrong and wherever."""

from __future__ import annotations

import http
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from onekv.errors import (
    BatchError,
    CacheFull,
    ConfigError,
    EngineClosed,
    OneKVError,
    QueueFull,
    RequestTooLarge,
    SessionBusy,
    ShiftError,
    StateError,
)


class ApiError(HTTPException):
    """An answer that is an error.

    Attributes:
        param: the field it is about
        code:  what a program may act on
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        return {"error": {"message": _printable(self.detail), "type": _kind(self.status_code), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status_code, self.headers)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _printable(text: str) -> str:
    """A client's own text may hold halves of surrogate pairs, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def api_error(error: BaseException) -> ApiError:
    """What a client is told of an error of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, code=_code(error.status_code), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return refused(error.errors(), error.body)
    if isinstance(error, RequestTooLarge):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="stopping", headers={"Retry-After": "5"})
    if isinstance(error, CacheFull):
        return ApiError(503, str(error), code="cache_full", headers={"Retry-After": "1"})
    if isinstance(error, SessionBusy):
        return ApiError(409, str(error), code="session_busy")
    if isinstance(error, StateError):
        return ApiError(400, str(error), code="state_refused")
    if isinstance(error, BatchError | ConfigError | ShiftError):
        return ApiError(400, str(error))
    if isinstance(error, OneKVError):
        return ApiError(500, f"the request failed: {error}", code=type(error).__name__)
    return ApiError(500, f"the request failed: {type(error).__name__}: {error}", code="internal_error")


def _code(status: int) -> str:
    """ "not_found" of 404."""
    return http.HTTPStatus(status).phrase.lower().replace(" ", "_")


def refused(errors: Sequence[Any], body: object) -> ApiError:
    """One answer for what a body's check found: it names the field, and says what was expected.

    Of a value that may be of several types, every type it is not makes an error; the one it is nearest to is wrong deepest inside.
    """
    groups: dict[tuple[str, ...], list[Any]] = {}
    for error in errors:
        groups.setdefault(_field(error, body), []).append(error)
    path = max(groups, key=len)
    first, param = groups[path][0], ".".join(path)
    if not path:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_body")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is no field of this request", param=param, code="unknown_parameter")
    code = first["type"] if first["type"] == "unsupported_parameter" else "invalid_value"
    said = dict.fromkeys(_said(error) for error in groups[path])
    return ApiError(400, f"{param}: {' or '.join(said)}", param=param, code=code)


def _said(error: Mapping[str, Any]) -> str:
    """What pydantic says, shorter."""
    if error["type"].startswith("union_tag"):
        return f"must be one of {error['ctx']['expected_tags']}" if "expected_tags" in error["ctx"] else "is missing"
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be").replace(" after validation", "")
    return message[:1].lower() + message[1:]


def _field(error: Mapping[str, Any], body: object) -> tuple[str, ...]:
    """Path of a field, as in messages, 0, content. A location also names the alternative of a union that was tried; that is no part of
    the path."""
    if named := error.get("ctx", {}).get("field"):
        return (str(named),)
    where, *location = error["loc"]
    if where != "body":
        return (str(location[0]),)
    path: list[str] = []
    at: Any = body
    for i, part in enumerate(location):
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
        elif error["type"] != "missing" or i + 1 < len(location):
            continue
        path.append(str(part))
    if error["type"].startswith("union_tag"):
        path.append(str(error["ctx"]["discriminator"]).strip("'"))
    return tuple(path)


async def _answer(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException) and not isinstance(error, ApiError) and error.status_code == 404:
        error = ApiError(404, f"there is nothing at {_printable(request.url.path)}", code="not_found")
    return api_error(error).response()


def install(app: FastAPI) -> None:
    """Every error of this app has the same shape: ours, a malformed body, an unknown path, a wrong method, a failure."""
    for kind in (RequestValidationError, HTTPException, OneKVError, Exception):
        app.add_exception_handler(kind, _answer)
