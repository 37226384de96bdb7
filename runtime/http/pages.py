"""The playground: a page at `/` and its assets."""

from importlib.resources import files

from fastapi import FastAPI, Response

from runtime.http.errors import ApiError

INDEX = "index.html"
CONTENT_TYPES = {
    INDEX: "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "core.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    # Load only from this server, run no inline code, and refuse to be framed.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PATHS = frozenset({"/", *(f"/playground/{name}" for name in CONTENT_TYPES)})
"""Paths that also accept a key as a Basic password, for which browsers can prompt."""


def add_routes(app: FastAPI) -> None:
    """Add the playground's routes to *app*. Its files are read now."""
    folder = files("runtime.http").joinpath("playground")
    contents = {name: folder.joinpath(name).read_bytes() for name in CONTENT_TYPES}

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page."""
        return _file(INDEX, contents[INDEX])

    @app.get("/playground/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        """An asset of the page."""
        if name not in contents or name == INDEX:
            raise ApiError(404, "there is no such file in the playground")
        return _file(name, contents[name])


def _file(name: str, content: bytes) -> Response:
    return Response(content, headers={**HEADERS, "content-type": CONTENT_TYPES[name]})
