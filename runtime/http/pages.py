"""The playground: a page at `/` and what it loads, all of it in this package."""

from importlib.resources import files

from fastapi import FastAPI, Response

from runtime.http.errors import ApiError

INDEX = "index.html"
KINDS = {
    INDEX: "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "core.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from elsewhere is loaded, nothing inline is run, and the page is shown in no other.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PATHS = frozenset({"/", *(f"/playground/{name}" for name in KINDS)})
"""Where a key may also come as a password, which browsers can ask for. What the page then asks for needs it as ever."""


def add_routes(app: FastAPI) -> None:
    """Serve the playground; its files are read now."""
    folder = files("runtime.http").joinpath("playground")
    contents = {name: folder.joinpath(name).read_bytes() for name in KINDS}

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page."""
        return _file(INDEX, contents[INDEX])

    @app.get("/playground/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        """What the page loads."""
        if name not in contents or name == INDEX:
            raise ApiError(404, "there is no such file in the playground")
        return _file(name, contents[name])


def _file(name: str, content: bytes) -> Response:
    return Response(content, headers={**HEADERS, "content-type": KINDS[name]})
