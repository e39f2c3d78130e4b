"""The admin API as an OpenAPI document: what ``GET /openapi.json`` answers, and what a test holds the server to.

Every route of :mod:`.admin` stands here with every answer that it can give. Objects may hold more fields than are
listed: what the gateway says of itself grows.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

Schema = dict[str, Any]

_MODES: Final = ["exact", "partial", "observed", "load-only"]
_TRUST: Final = ["exact", "partial", "none"]
_STATES: Final = ["off", "connecting", "catching_up", "live", "repairing", "silent", "down"]


def _object(required: Schema, optional: Schema | None = None, text: str | None = None) -> Schema:
    found: Schema = {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }
    return found | ({"description": text} if text else {})


def _or_null(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "boolean"}

_SCHEMAS: Final[dict[str, Schema]] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": {"enum": ["invalid_request_error", "api_error"]},
                    "code": _or_null("string"),
                    "param": _or_null("string"),
                }
            )
        },
        text="What is wrong, in the envelope of OpenAI's API.",
    ),
    "Readiness": _object(
        {
            "ready": _FLAG,
            "draining": _FLAG,
            "kv_sync": _object(
                {"state": {"enum": ["off", "waiting", "running"]}, "unmet": {"type": "array", "items": _TEXT}}
            ),
            "redis": _object(
                {
                    "state": {"enum": ["off", "unavailable", "connecting", "up", "down"]},
                    "problem": _or_null("string"),
                    "replicas": _COUNT,
                }
            ),
            "models": _map(_object({"mode": {"enum": _MODES}, "workers": _map(_COUNT)})),
        }
    ),
    "Worker": _object(
        {
            "worker": _TEXT,
            "engine": _TEXT,
            "model": _TEXT,
            "adapters": {"type": "array", "items": _TEXT},
            "rank": _COUNT,
            "url": _TEXT,
            "ready": _FLAG,
            "state": {"enum": _STATES},
            "trust": {"enum": [*_TRUST, None]},
            "mode": {"enum": _MODES},
            "breaker": {"enum": ["closed", "half-open", "open"]},
            "last_sequence": _or_null("integer"),
            "blocks": _COUNT,
            "block_size": _COUNT,
            "running": _COUNT,
            "queued_prefill_tokens": _COUNT,
            "running_elsewhere": _COUNT,
            "queued_prefill_tokens_elsewhere": _COUNT,
            "problem": _or_null("string"),
            "index": {"type": "object"},
            "stream": _or_null("object"),
            "audit": _or_null("object"),
        },
        text="One data-parallel rank of one engine.",
    ),
    "Question": _object(
        {"model": {"type": "string", "minLength": 1, "description": "A model, or an adapter by its own name."}},
        {
            "tokens": {
                "type": ["array", "null"],
                "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
                "description": "Token ids.",
            },
            "prompt": {"type": ["string", "null"], "description": "A text, as for completions."},
            "messages": {
                "type": ["array", "null"],
                "items": {"type": "object"},
                "description": "Messages, as for chat completions.",
            },
            "adapter": {"type": ["string", "null"], "description": "An adapter of `model`."},
            "cache_salt": {"type": ["string", "null"]},
        },
        "Exactly one of `tokens`, `prompt` and `messages`. A whole request may be pasted as it is.",
    ),
    "Matches": _object(
        {
            "model": _TEXT,
            "adapter": _or_null("string"),
            "tokens": _COUNT,
            "source": {"enum": ["ids", "remote", "local", "cache"]},
            "workers": _map(
                _object(
                    {
                        "credit": _COUNT,
                        "by_tier": _map(_COUNT),
                        "expected": _COUNT,
                        "trust": {"enum": _TRUST},
                    }
                )
            ),
        }
    ),
    "Decision": _object(
        {
            "request_id": _TEXT,
            "time": {"type": "number", "description": "Seconds since the epoch."},
            "model": _TEXT,
            "adapter": _or_null("string"),
            "policy": _TEXT,
            "mode": _TEXT,
            "worker": _TEXT,
            "why": _TEXT,
            "prompt_tokens": _COUNT,
            "tokens": {"type": "object"},
            "candidates": {"type": "array", "items": _object({"worker": _TEXT, "credit": _COUNT, "score": {}})},
        },
        text="Why a request went where it went.",
    ),
    "Forgotten": _object({"worker": _TEXT, "forgotten": {"const": True}}),
}


_CROSS_ORIGIN = "A page of another site had a browser send this."


def _json(text: str, schema: str) -> Schema:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _plain(text: str) -> Schema:
    return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _errors(**texts: str) -> Schema:
    """By status: ``_404="…"``."""
    return {status.lstrip("_"): _json(text, "Error") for status, text in texts.items()}


def _named(name: str, text: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "description": text,
    }


def document() -> Schema:
    """The OpenAPI 3.1 document."""
    question = {"$ref": "#/components/schemas/Question"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvsync admin API",
            "version": version("kvsync"),
            "description": "Health, metrics, and what the gateway knows and decided. No answer holds a prompt.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {
            "/healthz": {
                "get": {
                    "operationId": "health",
                    "summary": "Whether the process serves its event loop",
                    "responses": {"200": _plain("It does.")},
                }
            },
            "/readyz": {
                "get": {
                    "operationId": "readiness",
                    "summary": "Whether requests can be served, and with what knowledge",
                    "responses": {
                        "200": _json("Ready.", "Readiness"),
                        "503": _json("Shutting down, or no engine is there.", "Readiness"),
                    },
                }
            },
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "summary": "Metrics in Prometheus' text format",
                    "responses": {"200": _plain("All series.")},
                }
            },
            "/v1/workers": {
                "get": {
                    "operationId": "workers",
                    "summary": "State, trust, last sequence number, blocks and load of every worker",
                    "responses": {
                        "200": {
                            "description": "All workers of the fleet.",
                            "content": {
                                "application/json": {
                                    "schema": _object(
                                        {
                                            "workers": {
                                                "type": "array",
                                                "items": {"$ref": "#/components/schemas/Worker"},
                                            }
                                        }
                                    )
                                }
                            },
                        }
                    },
                }
            },
            "/v1/workers/{worker}/forget": {
                "post": {
                    "operationId": "forget",
                    "summary": "Drop all that is known of a worker's cache",
                    "description": "For an adapter whose weights were replaced under its name: what the engine cached "
                    "with the old ones must not be credited. The worker is `partial` until it clears its cache or "
                    "restarts.",
                    "parameters": [_named("worker", "As in /v1/workers, percent-encoded: `#` is `%23`, `/` is `%2F`.")],
                    "responses": {
                        "200": _json("It is forgotten.", "Forgotten"),
                        **_errors(_403=_CROSS_ORIGIN, _404="There is no such worker."),
                    },
                }
            },
            "/v1/match": {
                "post": {
                    "operationId": "match",
                    "summary": "What each worker holds of a prompt",
                    "requestBody": {"required": True, "content": {"application/json": {"schema": question}}},
                    "responses": {
                        "200": _json("Credit and expectation by worker.", "Matches"),
                        **_errors(
                            _400="The question is none.",
                            _403=_CROSS_ORIGIN,
                            _404="The model is not served.",
                            _413="The body is too large or holds too many values.",
                            _415="The body is compressed.",
                            _503="The prompt's tokens are unknown.",
                        ),
                    },
                }
            },
            "/v1/decisions/{request_id}": {
                "get": {
                    "operationId": "decision",
                    "summary": "Why a request went where it went",
                    "parameters": [_named("request_id", "The `request-id` header of its answer.")],
                    "responses": {
                        "200": _json("The record of its last try.", "Decision"),
                        **_errors(_404="No record is kept."),
                    },
                }
            },
            "/openapi.json": {
                "get": {
                    "operationId": "openapi",
                    "summary": "This document",
                    "responses": {
                        "200": {
                            "description": "OpenAPI 3.1.",
                            "content": {"application/json": {"schema": {"type": "object"}}},
                        }
                    },
                }
            },
        },
        "components": {"schemas": _SCHEMAS},
    }


__all__ = ["document"]
