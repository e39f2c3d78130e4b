"""Several probes at once: one good answer is enough, and nobody waits for the mute."""

from __future__ import annotations

import asyncio

from kvsync.tokenize.remote import first_sound


async def never() -> str | None:
    await asyncio.Event().wait()
    return None


async def fault(text: str) -> str | None:
    return text


async def sound() -> str | None:
    return None


async def test_one_good_answer_is_enough() -> None:
    async with asyncio.timeout(5):
        assert await first_sound([never(), fault("refused"), sound()]) is None


async def test_without_one_the_first_fault_is_told() -> None:
    assert await first_sound([fault("refused")]) == "refused"
    assert await first_sound([fault("a"), fault("b")]) in ("a", "b")


async def test_cancelling_ends_them_all() -> None:
    begun = len(asyncio.all_tasks())
    waiting = asyncio.create_task(first_sound([never(), never()]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(asyncio.all_tasks()) == begun
