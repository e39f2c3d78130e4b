"""Writes the seeds of the fuzzing from the event streams captured from real vLLM (tests/data/vllm).

    python core/fuzz/seeds.py

``decode`` has single payloads, ``life`` scripts: a byte of settings, then steps as ``src/lib.rs`` reads them; ``image``
what an index tells of a worker that heard a capture's batches, without the digest.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from kvsync.index.reference import ReferenceIndex

HERE = Path(__file__).parent
CAPTURES = HERE.parent.parent / "tests" / "data" / "vllm"
LARGEST = 3000
"""Bytes of a payload."""

APPLY, ASK, FORGET, RELEARN, MARK, EXPIRE = 0, 1, 2, 4, 7, 8
SETTINGS = [0, 0b1, 0b10_0000, 0b1_0110]
"""Nothing special; few usable blocks; a cap; EAGLE, chunked attention and a rank."""


def captured() -> Iterator[tuple[str, list[bytes]]]:
    """The small payloads of each capture, in order."""
    for path in sorted(CAPTURES.glob("*.jsonl*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        payloads = []
        for line in data.decode().splitlines():
            record = json.loads(line)
            if record["kind"] in ("sub", "replay") and record.get("frames"):
                payloads.append(base64.b64decode(record["frames"][-1]))
        yield path.name.split(".jsonl")[0], [payload for payload in payloads if 0 < len(payload) < LARGEST]


def script(payloads: list[bytes], settings: int) -> bytes:
    """Batches, lookups in between, and in the middle a loss, so that answers teach something."""
    steps = bytearray([settings])
    for number, payload in enumerate(payloads):
        if number == len(payloads) // 2:
            steps += bytes([MARK, 0, number % 2, FORGET, 0])
        steps += bytes([APPLY, 0]) + len(payload).to_bytes(2, "little") + payload
        steps += bytes([ASK, 0, number, 4 * (number % 12), 2, ASK, 0, number // 2, 0, 2])
    return bytes(steps + bytes([EXPIRE, 0, 1, ASK, 0, 1, 8, 3, RELEARN, 0, ASK, 0, 0, 0, 0]))


def image(payloads: list[bytes]) -> bytes | None:
    """After the last batch behind which an image can be told."""
    index = ReferenceIndex()
    index.add_worker("w", "m")
    told = None
    for payload in payloads:
        index.apply("w", payload)
        told = index.dump("w") or told
    return None if told is None else told[:-8]


def seeds() -> Iterator[tuple[str, bytes]]:
    """Names and contents."""
    for at, (name, payloads) in enumerate(captured()):
        if payloads:
            middle = len(payloads) // 2
            for number in sorted({0, middle, len(payloads) - 1}):
                yield f"decode/{name}-{number}", payloads[number]
            told = image(payloads[:40])
            if told is not None:
                yield f"image/{name}", told
            yield f"life/{name}", script([*payloads[:6], *payloads[middle : middle + 6]], SETTINGS[at % len(SETTINGS)])


def main() -> None:
    for old in HERE.glob("seeds/*/*"):
        old.unlink()
    for name, content in seeds():
        path = HERE / "seeds" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
