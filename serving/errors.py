"""Errors as OpenAI's clients expect them: a status, and a body with message, type, param and code."""

from __future__ import annotations

from typing import Any

INVALID, AUTH, LIMIT, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """A request that is not answered. ``retry_s``: seconds after which another try makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_s = retry_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After, where it makes sense."""
        return {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
