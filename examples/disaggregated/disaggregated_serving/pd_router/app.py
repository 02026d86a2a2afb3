# SPDX-License-Identifier: Apache-2.0
"""The router's HTTP surface."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from . import admin
from .config import Role
from .conversation_api import add_routes
from .errors import Reply, RouterError
from .rewrite import CHAT_PATH, COMPLETIONS_PATH
from .router import Router


def build_app(router: Router) -> FastAPI:
    """The application that serves one router."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await router.start()
        try:
            yield
        finally:
            await router.stop()

    app = FastAPI(
        title="pd_router",
        lifespan=lifespan,
        openapi_url=None,
        exception_handlers={RouterError: _on_router_error, ClientDisconnect: _on_gone},
    )
    for path in (CHAT_PATH, COMPLETIONS_PATH):
        app.add_api_route(path, _generate(router, path), methods=["POST"])

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return _response(await router.models(request.headers))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "breakers": admin.broken(router)})

    @app.get("/ready")
    async def ready() -> Response:
        state = admin.status(router)
        healthy = {str(role): len(router.workers.healthy(role)) for role in Role}
        return JSONResponse(
            {
                "ready": state["ready"],
                "draining": state["draining"],
                "healthy": healthy,
            },
            status_code=200 if state["ready"] else 503,
        )

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(admin.status(router))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/admin/workers")
    async def add_worker(request: Request) -> Response:
        admin.authorize(router, request.headers)
        added = await admin.add_worker(router, await request.body())
        return JSONResponse(added, status_code=201)

    @app.delete("/admin/workers")
    async def remove_worker(request: Request) -> Response:
        admin.authorize(router, request.headers)
        return JSONResponse(admin.remove_worker(router, request.query_params))

    if router.multiturn is not None:
        add_routes(app, router.multiturn)
    return app


def _generate(
    router: Router, path: str
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def generate(request: Request) -> Response:
        return router.respond(path, await request.body(), request.headers)

    return generate


def _response(reply: Reply) -> Response:
    return Response(
        reply.body,
        status_code=reply.status,
        headers=dict(reply.headers),
        media_type=reply.content_type,
    )


async def _on_router_error(_: Request, error: Exception) -> Response:
    if isinstance(error, RouterError):
        return _response(error.reply())
    raise error


async def _on_gone(_: Request, error: Exception) -> Response:
    # Nobody is there to read it.
    return Response(status_code=400)
