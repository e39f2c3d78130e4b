"""The tiny model's files, and what real vLLM made of requests with them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
TINY = DATA / "tiny-llama"


def unpack(tokens: bytes) -> list[int]:
    return list(array("I", tokens))


def pack(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def engine_answers() -> Iterator[tuple[str, str, dict[str, Any], list[int]]]:
    """(name, path, body, prompt token ids) of requests that vLLM 0.32 answered, text prompts only."""
    for number, sample in enumerate(json.loads((DATA / "vllm" / "http_samples_v0.32.json").read_text())):
        body, answer = sample["request"], sample["response"]
        if sample["status"] != 200 or not isinstance(body, dict) or not (body.get("prompt") or body.get("messages")):
            continue
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        first = answer[0] if isinstance(answer, list) else answer
        choice = first.get("choices", [{}])[0]
        ids = next(
            ids
            for ids in (
                first.get("tokens"),
                first.get("token_ids"),
                first.get("prompt_token_ids"),
                choice.get("prompt_token_ids"),
            )
            if ids
        )
        yield f"{number} {sample['path']}", path, body, ids
    asked: dict[int, dict[str, Any]] = {}
    for line in (DATA / "vllm" / "v0.32_basic.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "req":
            asked[record["id"]] = record
        elif record["kind"] == "resp" and record.get("prompt_token_ids"):
            request = asked[record["id"]]
            body = request["body"]
            if "messages" in body or isinstance(body["prompt"], str):
                yield f"basic {record['id']}", request["path"], body, record["prompt_token_ids"]
