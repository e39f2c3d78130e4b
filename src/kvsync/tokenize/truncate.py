"""``truncate_prompt_tokens``, as the engine cuts.

Packed native-endian uint32 in and out. A side given by the request cuts the finished ids; without one the engine keeps
the last tokens, and of a text those between the special tokens that stand around it.
"""

from __future__ import annotations

from kvsync.tokenize.request import Side


def cut(tokens: bytes, keep: int, side: Side | None) -> bytes:
    """The ``keep`` tokens that stay of finished ids."""
    if len(tokens) <= keep * 4:
        return tokens
    return tokens[: keep * 4] if side == "right" else tokens[-keep * 4 :]


def cut_text(whole: bytes, bare: bytes, keep: int) -> bytes | None:
    """The ``keep`` tokens that stay of a text whose tokens are ``whole``, without special tokens ``bare``.

    ``None`` when it can't be told: ``bare`` is no part of ``whole``, or nothing but special tokens would stay.
    """
    if len(whole) <= keep * 4:
        return whole
    special = len(whole) - len(bare)
    if special == 0:
        return cut(whole, keep, None) if whole == bare else None
    if special < 0 or special >= keep * 4:
        return None
    for before in range(0, special + 4, 4):
        if whole[before : before + len(bare)] == bare:
            return whole[:before] + bare[-(keep * 4 - special) :] + whole[before + len(bare) :]
    return None


__all__ = ["cut", "cut_text"]
