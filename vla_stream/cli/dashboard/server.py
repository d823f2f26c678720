"""The dashboard's web server: the page and its parts, the data of the poller, and the buttons."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from vla_stream.cli.control import desire
from vla_stream.cli.dashboard.access import TOKEN_HEADER, Access
from vla_stream.cli.dashboard.poller import Poller
from vla_stream.cli.options import Target, connected
from vla_stream.errors import VlaStreamError
from vla_stream.flow import Desired

PAGE = "page.html"
SCRIPTS = ("page.js", "cameras.js", "charts.js", "dom.js", "loop.js", "server_link.js", "workers.js")
PARTS = {"page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
BUTTONS: Mapping[str, Desired] = {"pause": "paused", "resume": "running", "drain": "draining"}
HEADERS = {
    # Everything comes from here. Plotly writes style elements; images arrive as data: URLs.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NO_TOKEN = "{} the token: open the address that `vla-stream dashboard` printed"


def make_app(access: Access, poller: Poller, find: Callable[[], Target]) -> Starlette:
    """The application. poller: started by the caller; find: where the run is, for the buttons."""
    folder = Path(str(files("vla_stream.cli.dashboard"))) / "page"
    plotly = Path(str(files("plotly"))) / "package_data" / "plotly.min.js"

    def page(request: Request) -> Response:
        response = FileResponse(folder / PAGE, media_type="text/html")
        if access.fits(request.query_params.get("token")):
            # The parts of the page, and the page loaded anew: browsers send no header of ours with those.
            response.set_cookie(access.cookie, access.look_key, httponly=True, samesite="strict")
        return response

    def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in PARTS:
            return PlainTextResponse("no such page\n", 404)
        return FileResponse(folder / name, media_type=PARTS[name])

    def plotly_js(_: Request) -> Response:
        return FileResponse(plotly, media_type="text/javascript", headers={"Cache-Control": "private, max-age=86400"})

    def snapshot(_: Request) -> Response:
        return _json(poller.snapshot())

    def curves(_: Request) -> Response:
        return _json(poller.curves())

    def cameras(request: Request) -> Response:
        return _json(poller.cameras(request.query_params.getlist("slot")[:4]))

    def press(request: Request) -> Response:
        button = request.path_params["button"]
        if not access.fits(request.headers.get(TOKEN_HEADER)):
            return PlainTextResponse(
                "buttons need the token: open the address that `vla-stream dashboard` printed\n", 403
            )
        if button not in BUTTONS:
            return PlainTextResponse(f"no such button, expected one of {', '.join(BUTTONS)}\n", 404)
        try:
            target = find()
            with connected(target.url, name="vla-stream-dashboard") as client:
                desire(client, target.run, BUTTONS[button], by="vla-stream dashboard")
        except VlaStreamError as exc:
            return PlainTextResponse(f"{exc}\n", 409)
        return _json(json.dumps({"desired": BUTTONS[button]}).encode())

    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get(TOKEN_HEADER) or request.query_params.get("token")
        response: Response
        if not access.is_ours(request.headers.get("host", "")):
            response = PlainTextResponse("this dashboard listens on loopback only: open it as http://127.0.0.1\n", 403)
        elif not access.may_look(given, request.cookies):
            response = PlainTextResponse(NO_TOKEN.format("this dashboard needs") + "\n", 401)
        else:
            response = await go_on(request)
        for name, value in {"Cache-Control": "no-store", **HEADERS}.items():
            response.headers.setdefault(name, value)
        return response

    routes = [
        Route("/", page),
        Route("/snapshot", snapshot),
        Route("/curves", curves),
        Route("/cameras", cameras),
        Route("/plotly.min.js", plotly_js),
        Route("/press/{button}", press, methods=["POST"]),
        Route("/{name}", part),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
