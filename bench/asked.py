"""What clients ask engines through a gateway, and what those answer: prompts in families, bodies, fixed answers.

Both ends make these for themselves, from seeds. What must always hold: an answer's bytes follow from the engine and the
request alone, so that whoever asked can tell whether it is whole, and whether its engine held the prompt's family.
Standard library only.
"""

from __future__ import annotations

import json
import random
from typing import Final

from bench.work import BLOCK, tokens

MODEL: Final = "bench"
FAMILIES: Final = 32
PREFIX_BLOCKS: Final = 24
"""Blocks that all prompts of a family begin with: the chain whose seed is the family's number."""
PROMPT: Final = 512
"""Tokens of a prompt."""
CHUNKS: Final = 64
CHUNK_EVERY: Final = 0.02
"""Seconds between two chunks of a stream: fifty tokens a second."""
EVENT: Final = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1764000000,"model":"bench","choices":[{"index":0,'
    b'"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)
LAST_EVENT: Final = b"data: [DONE]\n\n"
STREAM: Final = CHUNKS * EVENT + LAST_EVENT


def family_start(family: int) -> bytes:
    """What the JSON of a family's token-id prompts begins with, up to its first comma: the first token id."""
    return b"[%d" % tokens(family, 1)[0]


def ids_bodies(count: int, seed: int) -> list[bytes]:
    """Completions of distinct token-id prompts, in all families."""
    chosen = random.Random(seed)
    starts = [",".join(map(str, tokens(family, PREFIX_BLOCKS))) for family in range(FAMILIES)]
    bodies = []
    for number in range(count):
        rest = tokens(1_000_000 * seed + number, PROMPT // BLOCK - PREFIX_BLOCKS)
        prompt = f"{chosen.choice(starts)},{','.join(map(str, rest))}"
        bodies.append(b'{"model":"%b","prompt":[%b],"max_tokens":16}' % (MODEL.encode(), prompt.encode()))
    return bodies


def chat_body(size: int, *, stream: bool = False) -> bytes:
    """A chat of about ``size`` bytes."""
    text = b"word " * ((size - 90) // 5)
    streams = b',"stream":true' if stream else b""
    return b'{"model":"%b","messages":[{"role":"user","content":"%b"}]%b}' % (MODEL.encode(), text, streams)


WORDS: Final = (
    "a about after all also an and any as at be because before but by can cache block change choose could day do each "
    "engine even every first for found from get give go good had has have he her here him how if in index into is it "
    "its just keep know last long look made make many may more most much must my new no not now number of off on once "
    "one only or other our out over page part people place prefix prompt request right route said same say see send "
    "she should small so some still such take tell than that the their them then there these they thing think this "
    "time to token two under up use very want was way we well were what when where which while who why will with word "
    "work worker would write year you your"
)


def _words(chosen: random.Random, count: int) -> str:
    return " ".join(chosen.choices(WORDS.split(), k=count))


def system_text(family: int) -> str:
    """What the chats of a family begin with: more than the tokens that its engines hold."""
    return f"case{family:02}, " + _words(random.Random(~family), PREFIX_BLOCKS * BLOCK + 16)


def chat_start(family: int) -> bytes:
    """As :func:`family_start`, of chats."""
    return b'"case%02d' % family


def text_bodies(count: int, seed: int) -> list[bytes]:
    """Distinct chats of about as many tokens, in all families."""
    chosen = random.Random(seed)
    systems = [system_text(family) for family in range(FAMILIES)]
    bodies = []
    for _ in range(count):
        system = {"role": "system", "content": chosen.choice(systems)}
        user = {"role": "user", "content": _words(chosen, PROMPT - PREFIX_BLOCKS * BLOCK - 32)}
        bodies.append(json.dumps({"model": MODEL, "messages": [system, user]}, separators=(",", ":")).encode())
    return bodies


def request(path: str, body: bytes) -> bytes:
    """As an HTTP client sends it."""
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAccept: */*\r\nUser-Agent: bench\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _answer(cached: int) -> bytes:
    """About 450 bytes of JSON, as many whatever was cached."""
    message = {"role": "assistant", "content": "word " * 16}
    choice = {"index": 0, "message": message, "text": "", "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": 16, "total_tokens": PROMPT + 16}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1764000000, "model": MODEL, "choices": [choice]}
    text = json.dumps(body | {"usage": usage}, separators=(",", ":"))
    return f'{text[:-2]},"prompt_tokens_details":{{"cached_tokens":{cached:>5}}}}}}}'.encode()


HIT: Final = _answer(PREFIX_BLOCKS * BLOCK)
"""Of an engine that holds the prompt's family."""
MISS: Final = _answer(0)
