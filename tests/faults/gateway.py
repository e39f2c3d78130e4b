"""A gateway seen through its two ports, whether it is a process of its own (``process.py``) or in this one
(``serving.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .client import Answer, Body, Client, until
from .metrics import Scrape


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision record, as far as tests look at it."""

    worker: str
    credit: Mapping[str, int]
    """By worker, of all candidates."""
    record: Mapping[str, Any]

    @property
    def credited(self) -> int:
        """What the chosen worker was credited with."""
        return self.credit[self.worker]


class Gateway:
    """The gateway's two ports."""

    def __init__(self, data: Client, admin: Client, url: str) -> None:
        self.admin = admin
        self.url = url
        self._data = data

    async def post(self, path: str, body: Body | bytes, headers: Mapping[str, str] | None = None) -> Answer:
        """One request, whatever becomes of it."""
        return await self._data.post(path, body, headers)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._data.get(path)

    async def ask(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> tuple[Answer, Decision]:
        """One request that has to succeed, and why it went where it went."""
        answer = await self.post(path, body, headers)
        assert answer.status == 200, answer.pieces
        return answer, await self.decision(answer.request_id)

    async def chat(self, model: str, messages: Sequence[Body], **fields: Any) -> tuple[Answer, Decision]:
        return await self.ask("/v1/chat/completions", {"model": model, "messages": messages, **fields})

    async def complete(self, model: str, prompt: Sequence[int] | str, **fields: Any) -> tuple[Answer, Decision]:
        return await self.ask("/v1/completions", {"model": model, "prompt": prompt, **fields})

    async def decision(self, request_id: str) -> Decision:
        record = await self.admin.json(f"/v1/decisions/{request_id}")
        return Decision(record["worker"], {each["worker"]: each["credit"] for each in record["candidates"]}, record)

    async def ready(self) -> dict[str, Any]:
        """The details of ``/readyz``, once it says yes: a moment after the start its streams have caught up."""

        async def look() -> dict[str, Any] | None:
            status, body = await self.admin.get("/readyz")
            details: dict[str, Any] = json.loads(body)
            return details if status == 200 else None

        return await until(look, "/readyz says yes")

    async def workers(self) -> dict[str, dict[str, Any]]:
        """The rows of ``/v1/workers``."""
        return {row["worker"]: row for row in (await self.admin.json("/v1/workers"))["workers"]}

    async def match(self, **question: Any) -> dict[str, Any]:
        """``POST /v1/match``, which has to succeed."""
        answer = await self.admin.post("/v1/match", question)
        assert answer.status == 200, answer.pieces
        return answer.pieces[0]

    async def credit(self, worker: str, **question: Any) -> int:
        """What a worker is credited with for one prompt; 0 where the index does not know the worker."""
        found = (await self.match(**question))["workers"].get(worker)
        return int(found["credit"]) if found else 0

    async def metrics(self) -> Scrape:
        _, page = await self.admin.get("/metrics")
        return Scrape(page)

    async def live(self, *workers: str) -> None:
        """Return once the streams of these workers (of all, if none is named) are followed and caught up."""

        async def look() -> bool:
            rows = await self.workers()
            # Silent is live, too, and the engine has served for a while without an event.
            return all(rows[name]["state"] in ("live", "silent") for name in workers or rows)

        await until(look, "every stream live")

    async def applied(self, batches: Mapping[str, int]) -> None:
        """Return once the index has taken so many batches of each worker, counted from the gateway's start."""

        async def look() -> bool:
            rows = await self.workers()
            return all(_applied(rows[worker]) >= count for worker, count in batches.items())

        await until(look, f"batches applied: {dict(batches)}")


def _applied(row: Mapping[str, Any]) -> int:
    return int(row["index"].get("counts", {}).get("batches", 0))
