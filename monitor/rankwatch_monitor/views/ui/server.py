"""The page over HTTP: who may see it, the address of each view, and what the browser may do."""

from __future__ import annotations

import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rankwatch.errors import UsageError
from rankwatch.shared.printable import printable

from ...record.numbers.rows import ANY, BatchRange
from ...record.reader import RunRecord
from ...record.schema import StoreError
from .pages import Pages, RunPages

Answer: TypeAlias = Callable[[Request, Pages, RunPages, RunRecord], Any]
"""Reads what one view shows."""

COOKIE = "rankwatch-token-{}"
"""One for each port: one browser may see the pages of several head nodes through tunnels, all as localhost."""

MOST_RANKS = 32
"""Lines of one chart."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_VIEWS = ("", "verdict", "modules", "chart", "diff", "events")
"""The views of a run; the first one opens first."""


def application(folder: Path, token: str) -> Starlette:
    """The page over the runs in ``folder``, for everybody who knows the token."""
    pages = Pages(folder)

    async def page(request: Request) -> Response:
        return FileResponse(str(resources.files(__package__) / "static" / "index.html"))

    async def list_runs(request: Request) -> Response:
        return JSONResponse({"folder": printable(str(folder.absolute())), "runs": await run_in_threadpool(pages.list)})

    routes = [
        Route("/", page),
        Route("/compare", page),
        Mount("/static", StaticFiles(packages=[(__package__, "static")])),
        Route("/api/runs", list_runs),
        *(Route(f"/run/{{run}}{'/' * bool(view)}{view}", page) for view in _VIEWS),
        *(Route(f"/api/run/{{run}}/{name}", _answering(pages, read)) for name, read in _ANSWERS.items()),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(GZipMiddleware, minimum_size=1000)
    app.add_middleware(_Guard, token=token)  # outermost: it comes before everything else
    return app


class _Guard:
    """Requires the token, in the cookie or once in the URL, and adds the headers to every answer."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        given = request.query_params.get("token")
        cookie = COOKIE.format(request.url.port or 0)
        if given is not None and self._is_right(given):
            rest = request.url.remove_query_params("token")
            response: Any = RedirectResponse("/" + rest.path.lstrip("/") + (f"?{rest.query}" if rest.query else ""), 303)
            response.set_cookie(cookie, given, httponly=True, samesite="strict")
        elif self._is_right(request.cookies.get(cookie, "")):
            response = self._app
        else:
            text = "rankwatch: this page needs the token: open the URL that `rankwatch ui` has printed\n"
            response = PlainTextResponse(text, 403)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        await response(scope, receive, send_with_headers)

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())


def _answering(pages: Pages, read: Answer) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that answers with what ``read`` returns, and with 304 if the record has not changed."""

    def body_of(request: Request, run: RunPages) -> str:
        with run.open() as record:
            return json.dumps(read(request, pages, run, record), allow_nan=False)

    async def answer(request: Request) -> Response:
        try:
            run = await run_in_threadpool(pages.run, request.path_params["run"])
            version = f'"{run.version()}"'
            if request.headers.get("if-none-match") == version:
                return Response(status_code=304, headers={"ETag": version})
            body = await run_in_threadpool(body_of, request, run)
        except LookupError as error:
            return JSONResponse({"error": printable(str(error.args[0]))}, 404)
        except (StoreError, UsageError, ValueError) as error:
            return JSONResponse({"error": printable(str(error))}, 400)
        return Response(body, media_type="application/json", headers={"ETag": version, "Cache-Control": "no-cache"})

    return answer


def _modules(request: Request, pages: Pages, run: RunPages, record: RunRecord) -> Any:
    asked = request.query_params
    if around := asked.get("around"):
        return run.around(record, _whole_range(asked.get("rank")), _whole_range(around), _measure(request))
    found = run.modules(record, _rank(asked.get("rank")), _span(request), asked.get("match", ""), _measure(request))
    return {**found, "note": ""}


def _curves(request: Request, pages: Pages, run: RunPages, record: RunRecord) -> Any:
    ranks = [_whole(text) for text in request.query_params.get("ranks", "").split(",") if text]
    _check_lines(ranks)
    return run.curves(record, ranks)


def _series(request: Request, pages: Pages, run: RunPages, record: RunRecord) -> Any:
    asked = request.query_params
    ranks = [_rank(text) for text in asked.get("ranks", "").split(",")]
    _check_lines(ranks)
    module, label, phase = asked.get("module", ""), asked.get("label", "output"), asked.get("phase", "forward")
    return run.series(record, ranks, module, label, phase, _span(request))


def _diff(request: Request, pages: Pages, run: RunPages, record: RunRecord) -> Any:
    asked = request.query_params
    ranks, batches = ([_whole(text) for text in asked.getlist(name) if text] for name in ("rank", "batch"))
    other = asked.get("other")
    with pages.run(other).open() if other else nullcontext() as other_record:
        return run.diff(record, ranks, batches, other_record)


def _measure(request: Request) -> str:
    return request.query_params.get("measure", "")


_ANSWERS: dict[str, Answer] = {
    "overview": lambda request, pages, run, record: run.overview(record, _measure(request)),
    "curves": _curves,
    "ranks": lambda request, pages, run, record: run.ranks(record, _span(request), _measure(request))._asdict(),
    "modules": _modules,
    "readings": lambda request, pages, run, record: run.readings(record),
    "series": _series,
    "culprit": lambda request, pages, run, record: run.culprit(record),
    "diff": _diff,
    "stored": lambda request, pages, run, record: record.sent_batches(_rank(request.query_params.get("rank")) or 0),
    "events": lambda request, pages, run, record: run.events(record),
}


def _span(request: Request) -> BatchRange:
    first, last = request.query_params.get("from"), request.query_params.get("to")
    return (_whole(first) if first else ANY[0], _whole(last) if last else ANY[1])


def _rank(text: str | None) -> int | None:
    return None if text in (None, "", "all") else _whole(text)


def _whole_range(text: str | None) -> tuple[int, int]:
    """``4-7``, or ``4``."""
    first, dash, last = (text or "").partition("-")
    return _whole(first), _whole(last if dash else first)


def _check_lines(ranks: Sequence[int | None]) -> None:
    if len(ranks) > MOST_RANKS:
        raise ValueError(f"{len(ranks)} lines are more than the {MOST_RANKS} that one chart shows")


def _whole(text: str | None) -> int:
    if text is None or not text.isdecimal() or len(text) > 18:
        raise ValueError(f"{text!r} is no number of a rank or batch")
    return int(text)


def listen(host: str, port: int) -> socket.socket:
    """The socket to serve on. Raises UsageError if it cannot be opened."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port") from None


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, which are a normal end."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listening])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at the end, and then the exit code would mean a failure."""
        yield
