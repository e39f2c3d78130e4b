"""Request bodies as vLLM takes them, and its errors: what is not understood here is ignored, as there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MOST_ECHOED = 200
_MOST_ERRORS = 10
_STATUS_NAMES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

TokenId = Annotated[int, Field(ge=0, le=2**63 - 1)]
Body = TypeVar("Body", bound=BaseModel)


class ApiError(Exception):
    """An error for the client, in vLLM's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.payload = {
            "error": {
                "message": message,
                "type": kind or _STATUS_NAMES[status],
                "param": param,
                "code": status,
            }
        }


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ExtraArguments(BaseModel):
    """``vllm_xargs``."""

    kv_cache_report_mode: Literal["incremental", "full"] = "incremental"


class GenerationBody(_Body):
    """What completions and chat have in common."""

    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: ExtraArguments | None = None
    forced_output_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """A test hook of this simulator, not of vLLM: exactly these tokens come out."""


class CompletionBody(GenerationBody):
    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeCompletionBody(_Body):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(_Body):
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(_Body):
    tokens: list[TokenId]


def parse(raw: bytes, *kinds: type[Body]) -> Body:
    """The body as the first of ``kinds`` that it fits.

    Raises:
        ApiError: 400, listing what is wrong for each kind.
    """
    errors: list[Any] = []
    for kind in kinds:
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            errors += error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        del errors[1:]
    raise ApiError(400, _describe(errors), _location(errors[0]), "Bad Request")


def _location(error: Any) -> str:
    # A union spells out its branches; a client knows only its own field and the places in it.
    fields = [str(part) for part in error["loc"] if not (isinstance(part, str) and part.startswith(("list[", "str")))]
    return ".".join(["body", *fields])


def _describe(errors: Sequence[Any]) -> str:
    lines = [f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}:"]
    for error in errors[:_MOST_ERRORS]:
        shown = {
            "type": error["type"],
            "loc": _location(error),
            "msg": error["msg"],
            "input": _summary(error["input"]),
        }
        lines.append(f"  {shown}")
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  ...and {len(errors) - _MOST_ERRORS} more errors")
    return "\n".join(lines)


def _summary(value: object) -> object:
    """What was sent, never at length: an error must not be larger than the body that caused it."""
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, bytes):
        return f"<bytes of {len(value)} bytes>"
    if isinstance(value, str) and len(value) > _MOST_ECHOED:
        return value[:_MOST_ECHOED] + "...[truncated]"
    return value
