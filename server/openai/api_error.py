"""What a client is told when a request is refused or fails, in the shape of the OpenAI API."""


class ApiError(Exception):
    """HTTP status, message, and what it is about: the field (`param`) and a word for programs (`code`)."""

    def __init__(self, status, message, param=None, code=None, headers=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self):
        kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kind.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(param, message, code=None):
    """-> the ApiError of a field that has no such value."""
    return ApiError(400, f"{param}: {message}" if param else message, param, code)
