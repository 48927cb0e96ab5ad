"""Errors that a client sees, in the JSON of the OpenAI API."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
Headers = Mapping[str, str] | None
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP status and a message. param: the field that is wrong; code: a word for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, headers: Headers = None
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> JsonObject:
        error_type = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


def internal_error() -> ApiError:
    """A fault of the server; the log has its description."""
    return ApiError(500, "internal error", code="internal_error")
