"""The page that a person talks through: static files, which ask for nothing but this server."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Permissions-Policy": "microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, answered with 304 while it is the same
}

_files = StaticFiles(directory=FOLDER)


def page_paths(prefix: str = "") -> frozenset[str]:
    """The paths of the page and its files, which need no key."""
    return frozenset({f"{prefix}/", *(f"{prefix}/static/{file.name}" for file in FOLDER.iterdir())})


def page_routes(prefix: str = "") -> list[Route]:
    """The page at `prefix`/; the addresses inside it are relative, so that any prefix will do."""
    return [Route(f"{prefix}/", _page), Route(f"{prefix}/static/{{name}}", _page)]


async def _page(request: Request) -> Response:
    name = request.path_params.get("name", INDEX)
    response = await _files.get_response(name, request.scope)
    response.headers.update(HEADERS)
    if response.status_code == 200:
        response.headers["Content-Type"] = f"{TYPES.get(Path(name).suffix, 'application/octet-stream')}; charset=utf-8"
    return response
