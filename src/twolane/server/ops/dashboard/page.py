"""The live dashboard (docs/guides/dashboard.md): a page, its files, and the data it asks for."""

from importlib import resources
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi.responses import RedirectResponse

from twolane.server.http.route import json_response
from twolane.server.ops.dashboard.data import Dashboard
from twolane.server.ops.dashboard.history import Window
from twolane.server.service.service import Service

FILES = {
    "dashboard.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def about(service: Service) -> dict[str, Any]:
    """Return the facts of the served model, and why it is unavailable if it is."""
    ready = service.engine.ready
    return {
        "model": service.model_name,
        "system": ready.system,
        "device": ready.device,
        "units": ready.units,
        "unit": "core" if ready.device == "cpu" else "SM",
        "levels": ready.levels,
        "kv_tokens": ready.kv_tokens,
        "unavailable": service.availability.problem,
    }


def add_dashboard_routes(app: FastAPI, service: Service, dashboard: Dashboard) -> None:
    """Add the endpoints of the dashboard."""
    folder = resources.files("twolane.server.ops.dashboard") / "static"
    files = {name: (folder / name).read_bytes() for name in FILES}

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Lead a browser to the page."""
        return RedirectResponse("/dashboard")

    @app.get("/dashboard", include_in_schema=False)
    async def page() -> Response:
        """Return the page."""
        return await static("dashboard.html")

    @app.get("/dashboard/data", include_in_schema=False)
    async def data(window: Window = "minute", after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Return what the page shows."""
        shown = dashboard.data(window, after)
        return json_response({"about": about(service), **shown})

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        """Return a file of the page."""
        if name not in files:
            raise HTTPException(404, "there is no such file")
        return Response(files[name], headers={**HEADERS, "Content-Type": FILES[name]})
