"""One process that serves: a socket, uvicorn, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from onekv.errors import ConfigError


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address, so that a port in use is found before a model is loaded. Nobody can connect before it is served.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def read_key(path: Path) -> str:
    """The API key a file holds.

    Raises:
        ConfigError: no such file, or no key in it.
    """
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API key in {path}: {getattr(error, 'strerror', None) or error}") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{path} must hold one API key: printable ASCII without spaces")
    return key


def serve(
    app: FastAPI,
    bound: socket.socket,
    *,
    ready: Callable[[], None],
    stopping: Callable[[int, float], None] = lambda answers, seconds: None,
    limit: float = 30.0,
) -> None:
    """Serve until SIGTERM or SIGINT. Then nothing new is taken, what runs may finish within `limit` seconds, and the rest is told. A second
    signal tells them at once.

    Args:
        ready:    called when requests are answered
        stopping: called at the first signal, with how many answers run and the seconds they have
    """
    with _handled_signals():
        Server(app, ready, limit, stopping).run(sockets=[bound])


class Server(uvicorn.Server):
    """uvicorn, with an end that tells the clients."""

    def __init__(
        self,
        app: FastAPI,
        ready: Callable[[], None],
        limit: float,
        stopping: Callable[[int, float], None] = lambda answers, seconds: None,
    ) -> None:
        # What was told of the end has some time to be sent before connections are cut.
        grace = math.ceil(limit) + 5
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=grace))
        self._app = app
        self._ready = ready
        self._limit = limit
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own at the first signal. It would cut connections at the second, without a word to anybody."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        else:
            self._app.state.api.hurry()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, and then `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own waits for open connections; meanwhile these are brought to an end."""
        self._stopping(len(self._app.state.api.listeners), self._limit)
        stopping = asyncio.create_task(self._app.state.api.stop(self._limit))
        await super().shutdown(sockets)
        await stopping


@contextlib.contextmanager
def _handled_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, for those who want to die of it; an orderly end is a success."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
