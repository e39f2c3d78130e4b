"""The gateway's own answers when something is wrong: AIBrix's messages, codes and headers in OpenAI's envelope.

An engine's errors are not made here: they pass unchanged. Nothing that a client sent reaches a *header* of these
answers; in the JSON body it is escaped and cut to :data:`ECHO` characters.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

import msgspec

from kvsync.routing.errors import BadFilter, BadPolicy, NoReadyEngine, NoSuchModel, RoutingError

ECHO = 200
"""Characters of a client's own words that an error repeats."""

_encode = msgspec.json.Encoder().encode


class Problem(Exception):
    """An answer that says what is wrong. ``reason`` is the short name under which it is counted."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str,
        code: str | None = None,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.code = code
        self.param = param
        self.headers = headers
        self.type = type or ("invalid_request_error" if status < 500 else "api_error")

    @property
    def phrase(self) -> bytes:
        return HTTPStatus(self.status).phrase.encode()

    def body(self) -> bytes:
        return _encode({"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}})


def _echo(text: str) -> str:
    return text if len(text) <= ECHO else text[:ECHO] + "…"


def bad_request(message: str) -> Problem:
    """The bytes are not HTTP, or not HTTP that can be forwarded safely."""
    return Problem(400, message, reason="bad_request")


def request_timeout() -> Problem:
    return Problem(408, "the request did not arrive in time", reason="request_timeout")


def header_too_large(limit: int) -> Problem:
    return Problem(431, f"request line and headers exceed {limit} bytes", reason="header_too_large")


def url_too_long(limit: int) -> Problem:
    return Problem(414, f"the URL exceeds {limit} bytes", reason="url_too_long")


def body_too_large(limit: int) -> Problem:
    return Problem(413, f"the request body exceeds {limit} bytes", reason="body_too_large")


def compressed_body() -> Problem:
    return Problem(415, "compressed request bodies are not accepted", reason="compressed_body")


def transfer_encoding() -> Problem:
    return Problem(501, "the only transfer-encoding understood is chunked", reason="transfer_encoding")


def expectation() -> Problem:
    return Problem(417, "the only expectation understood is 100-continue", reason="expectation")


def no_api_key() -> Problem:
    return Problem(
        401,
        "no API key was given: send it as `Authorization: Bearer KEY`",
        reason="no_api_key",
        headers=((b"www-authenticate", b'Bearer realm="kvsync"'),),
    )


def wrong_api_key() -> Problem:
    return Problem(
        401,
        "the API key is not valid",
        reason="wrong_api_key",
        code="invalid_api_key",
        headers=((b"www-authenticate", b'Bearer realm="kvsync", error="invalid_token"'),),
    )


def salt_not_enforceable(path: str) -> Problem:
    """``path`` is one of the allow-list."""
    return Problem(
        403,
        f"the cache salt of your requests is enforced, and engines may ignore it at {path} (gateway.salted_paths)",
        reason="salt_not_enforceable",
        param="cache_salt",
    )


def salt_lost_in_beam_search() -> Problem:
    return Problem(
        403,
        "the cache salt of your requests is enforced, and engines may drop it in a beam search",
        reason="salt_not_enforceable",
        param="use_beam_search",
    )


def transfer_params(field: str) -> Problem:
    """``field`` is one of a fixed list."""
    return Problem(
        403,
        f"{field} is not for tenants: it has an engine load caches from elsewhere",
        reason="transfer_params",
        param=field,
    )


def full_reports() -> Problem:
    return Problem(
        403,
        "kv_cache_report_mode is not for tenants: the engine's events would say less of all requests",
        reason="full_reports",
        param="vllm_xargs",
    )


def salt_not_string() -> Problem:
    return Problem(400, "cache_salt must be a string", reason="salt_not_string", param="cache_salt")


def unknown_path() -> Problem:
    return Problem(501, "unknown request path", reason="unknown_path")


def method_not_allowed(allow: bytes) -> Problem:
    return Problem(405, "method not allowed", reason="method_not_allowed", headers=((b"allow", allow),))


def bad_json(detail: str) -> Problem:
    return Problem(400, f"the request body is not valid JSON: {detail}", reason="bad_json")


def too_many_values(what: str, limit: int) -> Problem:
    return Problem(413, f"the request body holds more than {limit} {what}", reason="too_many_values")


def body_not_object() -> Problem:
    return Problem(400, "the request body must be a JSON object", reason="body_not_object")


def no_model() -> Problem:
    return Problem(400, "no model in request body", reason="no_model", param="model")


def model_not_string() -> Problem:
    return Problem(400, "model must be a string", reason="model_not_string", param="model")


def no_such_model(model: str, status: int = 400) -> Problem:
    """AIBrix answers 400; ``GET /v1/models/{id}`` answers 404 as OpenAI does."""
    return Problem(
        status,
        f"model {_echo(model)} does not exist",
        reason="model_not_found",
        code="model_not_found",
        param="model",
        headers=((b"x-error-no-model-backends", b"true"),) if status == 400 else (),
    )


def no_ready_engine(model: str) -> Problem:
    return Problem(
        503,
        f"error on getting pods for model {_echo(model)}",
        reason="no_ready_engine",
        headers=((b"x-error-no-model-backends", b"true"),),
    )


def bad_policy(policy: str) -> Problem:
    return Problem(
        400,
        f"incorrect routing strategy {_echo(policy)}",
        reason="bad_policy",
        headers=((b"x-error-routing", b"true"),),
    )


def bad_filter(detail: str) -> Problem:
    return Problem(
        400,
        f"incorrect external filter: {_echo(detail)}",
        reason="bad_filter",
        headers=((b"x-error-routing", b"true"),),
    )


def routing_failed(reason: str) -> Problem:
    return Problem(
        503,
        "error on selecting target pod",
        reason=reason,
        headers=((b"x-error-routing", b"true"),),
    )


def not_routed(error: RoutingError) -> Problem:
    """The router's refusal."""
    if isinstance(error, NoSuchModel):
        return no_such_model(error.subject)
    if isinstance(error, NoReadyEngine):
        return no_ready_engine(error.subject)
    if isinstance(error, BadPolicy):
        return bad_policy(error.subject)
    if isinstance(error, BadFilter):
        return bad_filter(error.subject)
    return routing_failed(error.reason)


def limit_exceeded(limit: Literal["rpm", "tpm", "model_rps"], subject: str, allowed: int, retry_after: int) -> Problem:
    """AIBrix's refusals, with when to come again."""
    kind, unit, header = {
        "rpm": ("user", "RPM", b"x-error-rpm-exceeded"),
        "tpm": ("user", "TPM", b"x-error-tpm-exceeded"),
        "model_rps": ("model", "RPS", b"x-error-model-rps-exceeded"),
    }[limit]
    return Problem(
        429,
        f"{kind}: {_echo(subject)} has exceeded {unit}: {allowed}",
        reason=f"{limit}_exceeded",
        code="rate_limit_exceeded",
        headers=((header, b"true"), (b"retry-after", b"%d" % retry_after)),
        type="rate_limit_error",
    )


def usage_not_asked_for() -> Problem:
    """AIBrix's: what a user's limited tokens are counted by."""
    return Problem(
        400,
        "include usage for stream options not set",
        reason="usage_not_asked_for",
        param="stream_options",
        headers=((b"x-error-no-stream-options-include-usage", b"include usage for stream options not set"),),
    )


def too_many_connections() -> Problem:
    return Problem(
        503,
        "too many open connections",
        reason="too_many_connections",
        code="overloaded",
        headers=((b"retry-after", b"1"),),
    )


def engine_unreachable(outcome: str) -> Problem:
    """No engine answered; ``outcome`` is how the last try ended."""
    return Problem(502, f"no engine could answer ({outcome})", reason=outcome, code="engine_unreachable")


def first_byte_timeout(seconds: float | None) -> Problem:
    """``seconds`` that were waited for, where they are known."""
    limit = "in time" if seconds is None else f"within {seconds:g} s"
    return Problem(504, f"the engine did not answer {limit}", reason="first_byte_timeout", code="engine_timeout")


def body_not_buffered() -> Problem:
    """Envoy's own configuration is wrong."""
    return Problem(
        500,
        "Envoy does not send whole bodies to its external processor (request_body_mode)",
        reason="body_not_buffered",
    )


__all__ = ["ECHO", "Problem"]
