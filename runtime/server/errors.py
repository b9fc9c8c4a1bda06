"""HTTP errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from pagegen.errors import PagegenError

logger = logging.getLogger("pagegen.server")

CLIENT_GONE = 499  # nginx's number; nobody is left to read it

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than 200. The message is for the client: nothing of the server's inside goes into it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, object]:
        """The JSON document."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status, self.headers)


def internal_error(request_id: str) -> ApiError:
    """A defect of ours: the client gets the id under which the log holds the traceback, and nothing else."""
    return ApiError(
        500, f"internal error; the server's log has it under request id {request_id}", code="internal_error"
    )


def bad_request(error: PagegenError) -> ApiError:
    """A PagegenError as the client sees it; RequestError names the field."""
    return ApiError(400, str(error), param=getattr(error, "param", None))


def install_handlers(app: FastAPI) -> None:
    """Gives every way out of a route the same shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(PagegenError)
    async def pagegen_error(request: Request, error: PagegenError) -> JSONResponse:
        return bad_request(error).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return ApiError(CLIENT_GONE, "the client went away while sending").response()

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:
        request_id = request.state.request_id
        logger.error("request %s failed", request_id, exc_info=error)
        response = internal_error(request_id).response()
        response.headers["X-Request-Id"] = request_id  # this handler stands outside of every middleware
        return response
