"""Objects of one kind, kept as the API server has them: a list, then a watch, then a list again when that is due.

It knows nothing of what the objects mean: ``digest`` makes of each what the caller wants to keep, or ``None``.

What must always hold:

* What was delivered is what was listed or told last. Trouble of any kind delivers nothing: an API server that is down,
  slow, or refuses leaves everything as it was.
* After a gap that no watch can bridge (410, lines that can't be read, a watch that ran its time and said nothing) comes
  a list, and its difference from what is known, so what was deleted meanwhile is gone.
* A list comes every ``relist_interval`` in any case: a watch that was opened once goes on delivering when the right to
  it is withdrawn, and says nothing, without an error, when it was opened at a revision that does not exist.
* Nothing is read beyond a bound, and no loop turns without a pause.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from kvsync.config.discovery import ALL, KubernetesSettings
from kvsync.discovery.access import in_a_line
from kvsync.discovery.kubernetes.api import ApiServer, Expired, Trouble
from kvsync.telemetry.logs import Throttle

_log = logging.getLogger(__name__)

T = TypeVar("T")
Key: TypeAlias = tuple[str, str]
"""Namespace and name."""
What: TypeAlias = Literal["list", "watch"]
State: TypeAlias = Literal["starting", "synced", "failing", "degraded"]

PAGE_OBJECTS: Final = 250
"""Some 2 MB of pods: the event loop can't go on for the 2 ms in which such a page is taken apart (measured), and can
between its objects."""
MAX_PAGE_BYTES: Final = 32 << 20
"""A page that has more is asked for again with fewer objects."""
MAX_LINE_BYTES: Final = 8 << 20
"""Of a watch. etcd takes objects of 1.5 MiB."""
MAX_OBJECTS: Final = 100_000
"""Of one list, that the digest keeps something of."""
MAX_PAGES: Final = 10_000
LINES_AT_ONCE: Final = 16
"""Of a watch. Thousands may be there at once, and requests don't wait for all of them."""
LARGE: Final = 256 << 10
"""JSON from this size on is read in a thread."""
GRACE: Final = 0.25
"""Of its own timeout, what a watch may last beyond it."""
STEADY: Final = 2.0
"""Seconds that a watch is open after which it counts as one that works, even if nothing happened."""
PAUSE_FIRST: Final = 0.2
PAUSE_LAST: Final = 30.0
PAUSE_BETWEEN: Final = 2.0
"""The longest one between watches that told something and ended early."""
LIST_PATIENCE: Final = 10
"""Of its timeout for one page, what all of a list may take: no watch is open meanwhile."""
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_UID: Final = re.compile(r"[A-Za-z0-9-]{1,128}")


class Unreadable(ValueError):
    """Raised by ``digest`` for an object that is not what it should be."""


class _Meta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    name: str = ""
    namespace: str = ""
    uid: str = ""


class _Object(msgspec.Struct):
    metadata: _Meta
    kind: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Error(msgspec.Struct):
    code: int = 0
    message: str = ""


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Page(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None
    kind: str = ""


_event = msgspec.json.Decoder(_Event).decode
_object = msgspec.json.Decoder(_Object).decode
_page = msgspec.json.Decoder(_Page).decode
_error = msgspec.json.Decoder(_Error).decode
_BAD: Final = (msgspec.MsgspecError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Known(Generic[T]):
    uid: str
    value: T


@dataclass(frozen=True, slots=True)
class ReflectorStatus:
    """How one reflector is doing."""

    scope: str
    """The namespace, or ``*``."""
    state: State
    """``starting``: not listed yet · ``synced`` · ``failing``: something is wrong, for a moment so far · ``degraded``:
    for long."""
    problem: str | None
    """What is wrong, as a sentence."""
    age: float | None
    """Seconds since the last list or word of the watch; ``None`` before the first list."""
    objects: int
    """Those that the digest kept."""
    counts: Mapping[str, int]
    failures: Mapping[str, int]
    """By reason."""


class Reflector(Generic[T]):
    """See the module. One task runs :meth:`run`; everything else is called on its event loop.

    Args:
        scope: what it is about, for the log.
        path: of the collection, such as ``/api/v1/namespaces/default/pods``.
        kind: of its objects.
        digest: makes of an object's JSON what is kept of it. It may be called in a thread. Equal values mean that
            nothing happened. Raises Unreadable.
        deliver: gets what is gone, and what is new or changed, in one go.
        clock: monotonic seconds.
        chance: random numbers from 0 to 1, for jitter.
    """

    def __init__(
        self,
        api: ApiServer,
        scope: str,
        path: str,
        kind: str,
        settings: KubernetesSettings,
        digest: Callable[[bytes], T | None],
        deliver: Callable[[Sequence[T], Sequence[T]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self.scope = scope
        self._path = path
        self._kind = kind
        self._settings = settings
        self._digest = digest
        self._deliver = deliver
        self._clock = clock
        self._chance = chance
        self._query: dict[str, str] = {} if settings.selector is None else {"labelSelector": settings.selector}
        self._known: dict[Key, _Known[T]] = {}
        """Of objects that the digest keeps nothing of, nothing is kept: there may be many of them."""
        self._revision: str | None = None
        """Where the watch goes on; ``None``: only a list can tell."""
        self._list_due = float("-inf")
        self._page_objects = PAGE_OBJECTS
        self._in_a_row: Counter[str] = Counter()
        """Failures of ``list`` and ``watch`` since the last success of each."""
        self._troubles: dict[str, tuple[float, str]] = {}
        """Of ``list`` and ``watch``: since when, and what."""
        self._opened: float | None = None
        """Since when a watch is open."""
        self._listing: float | None = None
        """Since when a list is fetched."""
        self.listed = asyncio.Event()
        """Set with the first list."""
        self._started = clock()
        self._heard: float | None = None
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._throttle = Throttle(_log, interval=60.0, clock=clock)

    # -- how it is doing ---------------------------------------------------------------------------------------------

    def status(self) -> ReflectorStatus:
        now = self._clock()
        self._look_at_watch()
        listed = self._heard is not None
        troubles = dict(self._troubles)
        if self._listing is not None and now - self._listing >= self._settings.degraded_after:
            troubles.setdefault("list", (self._listing, f"a list is not at its end after {now - self._listing:.0f} s"))
        since = min([at for at, _ in troubles.values()], default=None if listed else self._started)
        state: State = "synced" if listed else "starting"
        if since is not None and now - since >= self._settings.degraded_after:
            state = "degraded"
        elif troubles and listed:
            state = "failing"
        return ReflectorStatus(
            scope=self.scope,
            state=state,
            problem="; ".join(dict.fromkeys(text for _, text in troubles.values())) or None,
            age=None if self._heard is None else max(0.0, now - self._heard),
            objects=len(self._known),
            counts=dict(self.counts),
            failures=dict(self.failures),
        )

    def _well(self, what: What) -> None:
        self._heard = self._clock()
        self._over(what)

    def _look_at_watch(self) -> None:
        """A watch that was opened after trouble, and stays open, ends the trouble."""
        if self._opened is not None and self._clock() - self._opened >= STEADY:
            self._in_a_row["watch"] = 0
            self._over("watch")

    def _over(self, what: What) -> None:
        if self._troubles.pop(what, None) is not None and not self._troubles:
            _log.info("pods of %s: the API server is heard again", self._shown)

    def _ill(self, what: What, trouble: Trouble) -> float:
        """Note it; returns the seconds to wait now."""
        self.failures[trouble.reason] += 1
        since, _ = self._troubles.get(what, (self._clock(), ""))
        self._troubles[what] = (since, str(trouble))
        self._throttle.warning(
            trouble.reason, "pods of %s: %s; what is known of them stays as it is", self._shown, trouble
        )
        return max(self._pause(what), trouble.after)

    def _pause(self, what: What) -> float:
        """Longer each time, until a list was had, or a watch was open for a while. (That a watch told something is not
        enough: it may tell the same each time.)"""
        doubled = min(PAUSE_FIRST * 2.0 ** min(self._in_a_row[what], 16), PAUSE_LAST)
        self._in_a_row[what] += 1
        return doubled * (0.5 + 0.5 * self._chance())

    @property
    def _shown(self) -> str:
        return "all namespaces" if self.scope == "*" else f"namespace {self.scope}"

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = await self.step()

    async def step(self) -> float:
        """List, if that is due, and watch until that ends. Returns the seconds to wait before the next step."""
        if self._revision is None or self._clock() >= self._list_due:
            self._listing = self._clock()
            try:
                await self._list_in_time()
            except Trouble as trouble:
                pause = self._ill("list", trouble)
                if self._revision is None:
                    return pause
                self._list_due = self._clock() + pause  # the watch may know better, and goes on until then
            else:
                interval = self._settings.relist_interval
                self._list_due = self._clock() + interval * (0.9 + 0.2 * self._chance())
            finally:
                self._listing = None
        try:
            return await self._watch()
        except Expired:
            self.counts["expired"] += 1
            self._revision = None
            return self._pause("watch")
        except Trouble as trouble:
            pause = self._ill("watch", trouble)
            if self._in_a_row["watch"] > 1:  # lists are all there is for now
                self._list_due = float("-inf")
            return pause

    # -- lists -------------------------------------------------------------------------------------------------------

    async def _list_in_time(self) -> None:
        longest = LIST_PATIENCE * self._settings.list_timeout
        try:
            async with asyncio.timeout(longest):
                await self._list()
        except TimeoutError:
            raise Trouble("timeout", f"a list is not at its end after {longest:g} s") from None

    async def _list(self) -> None:
        self.counts["lists"] += 1
        found: dict[Key, _Known[T]] = {}
        proceed, whole = "", False
        revision = ""
        for _ in range(MAX_PAGES):
            query = self._query | ({} if whole else {"limit": str(self._page_objects)})
            try:
                body = await self._api.get(
                    self._path, query | ({"continue": proceed} if proceed else {}), MAX_PAGE_BYTES
                )
            except Expired:
                if not proceed:
                    raise Trouble("garbage", "the API server answers 410 to a list from the beginning") from None
                # The rest of this list is not kept any more: all of it in one answer then.
                self.counts["expired"] += 1
                found, proceed, whole = {}, "", True
                continue
            except Trouble as trouble:
                if trouble.reason != "too_large" or whole or self._page_objects == 1:
                    raise
                self._page_objects = max(1, self._page_objects // 4)
                continue
            try:
                if len(body) > LARGE:
                    page, known = await asyncio.to_thread(self._read_page, body)
                else:
                    page, known = self._read_page(body)
            except _BAD as bad:
                raise Trouble("garbage", f"the API server's list can't be read: {bad}") from None
            found |= known
            if len(found) > MAX_OBJECTS:
                text = f"there are more than {MAX_OBJECTS} of them: narrow kubernetes.selector or namespaces"
                raise Trouble("too_many", text)
            revision = page.metadata.resource_version
            if not page.metadata.continue_:
                break
            if page.metadata.continue_ == proceed:
                raise Trouble("garbage", "the API server's list goes round in circles")
            proceed = page.metadata.continue_
        else:
            raise Trouble("too_many", f"a list has more than {MAX_PAGES} pages")
        if not revision or len(revision) > 128:
            raise Trouble("garbage", "the API server's list has no revision")
        self._take_over(found)
        self._revision = revision
        self._in_a_row["list"] = 0
        self._well("list")
        self.listed.set()

    def _read_page(self, body: bytes) -> tuple[_Page, dict[Key, _Known[T]]]:
        page = _page(body)
        if page.kind != f"{self._kind}List":
            raise ValueError(f"it is a {page.kind[:40]!r}, not a {self._kind}List")
        read = (self._read_object(item) for item in page.items or ())
        return page, {key: known for key, _, known in read if known is not None}

    def _take_over(self, found: dict[Key, _Known[T]]) -> None:
        first = self._heard is None
        before, self._known = self._known, found
        gone = [old.value for key, old in before.items() if key not in found or found[key].uid != old.uid]
        seen = [new.value for key, new in found.items() if before.get(key) != new]
        if gone or seen:
            if not first:
                self.counts["corrected"] += len(gone) + len(seen)
            self._deliver(gone, seen)

    def _read_object(self, raw: msgspec.Raw) -> tuple[Key, str, _Known[T] | None]:
        """Whose it is, its uid, and what is kept of it."""
        meta = _object(raw).metadata
        if not meta.name or not meta.uid:
            raise ValueError("an object has no name or no uid")
        try:
            if self.scope not in (ALL, meta.namespace):
                raise Unreadable(f"was told of among those of {self._shown}")
            if not (_NAME.fullmatch(meta.name) and _UID.fullmatch(meta.uid)):
                raise Unreadable("has a name or uid that no API server lets in")
            value = self._digest(bytes(raw))
        except Unreadable as bad:
            self.counts["unreadable"] += 1
            named = f"{meta.namespace[:253]}/{meta.name[:253]}"
            self._throttle.warning("unreadable", "%s %s: %s", self._kind, named, bad)
            value = None
        return (meta.namespace, meta.name), meta.uid, None if value is None else _Known(meta.uid, value)

    # -- watches -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> float:
        """Returns the seconds to wait. Ends when the server ends it, or a list is due."""
        self.counts["watches"] += 1
        assert self._revision is not None
        limit = self._settings.watch_timeout
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._revision,
            "timeoutSeconds": str(max(1, round(limit))),
        }
        opened, heard_before = self._clock(), self.counts["events"] + self.counts["bookmarks"]
        trouble: Trouble | None = None
        longest = limit + max(1.0, GRACE * limit)
        try:
            async with (
                asyncio.timeout(max(0.0, min(self._list_due - opened, longest))),
                self._api.stream(self._path, query) as pieces,
            ):
                self._opened = self._clock()
                lines = _Lines()
                async for piece in pieces:
                    for number, line in enumerate(lines.add(piece)):
                        await self._take(line)
                        if number % LINES_AT_ONCE == LINES_AT_ONCE - 1:
                            await asyncio.sleep(0)
                if lines.unfinished:
                    trouble = Trouble("cut", "a watch ended within a line")
        except TimeoutError:
            if self._clock() >= self._list_due:
                return 0.0
            trouble = Trouble("timeout", f"a watch that was to end after {limit:g} s is open after {longest:g} s")
        except Trouble as caught:
            trouble = caught
            if caught.reason in ("garbage", "too_large"):  # what it said is lost, and would come again
                self._revision = None
        finally:
            self._look_at_watch()
            self._opened = None
        lasted = self._clock() - opened
        brief = lasted < min(STEADY, 0.8 * limit)
        if not brief:
            self._in_a_row["watch"] = 0
        if self.counts["events"] + self.counts["bookmarks"] > heard_before:
            self._well("watch")
            if trouble is not None and trouble.reason in ("cut", "timeout"):
                self.counts["cut"] += 1
                return min(self._pause("watch"), PAUSE_BETWEEN)
            if trouble is None:
                return min(self._pause("watch"), PAUSE_BETWEEN) if brief else 0.0
        if trouble is not None:
            raise trouble
        if lasted < 0.8 * limit:
            raise Trouble("cut", "a watch ended at once")
        # Either nothing at all happened in the cluster, or the revision means nothing to this server: only a list can
        # tell which. (Were the revision right, a bookmark had come with any write.)
        self.counts["silent"] += 1
        self._list_due = float("-inf")
        return 0.0

    async def _take(self, line: bytes) -> None:
        """One line of a watch.

        Raises:
            Expired, Trouble: what the line says; or it can't be read, so that what it said is lost.
        """
        try:
            event = _event(line)
            if event.type == "ERROR":
                raise _told(_error(event.object))
            if event.type not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
                raise ValueError(f"an event of the type {event.type[:40]!r}")
            found = _object(event.object)
            revision = found.metadata.resource_version
            if found.kind != self._kind or not revision or len(revision) > 128:
                raise ValueError(f"a {found.kind[:40]!r} of the revision {revision[:40]!r}")
            if event.type == "BOOKMARK":
                told = None
            elif len(line) > LARGE:
                told = await asyncio.to_thread(self._read_object, event.object)
            else:
                told = self._read_object(event.object)
        except _BAD as bad:
            raise Trouble("garbage", f"a line of a watch can't be read: {bad}") from None
        self.counts["bookmarks" if told is None else "events"] += 1
        if told is not None:
            self._apply(*told, deleted=event.type == "DELETED")
        self._revision = revision
        self._well("watch")

    def _apply(self, key: Key, uid: str, new: _Known[T] | None, *, deleted: bool) -> None:
        old = self._known.get(key)
        if deleted:
            if old is None or old.uid != uid:
                return  # told late: another has the name now
            new = None
        if new == old:
            return
        if new is None:
            del self._known[key]
        else:
            self._known[key] = new
        gone = [old.value] if old is not None and (new is None or new.uid != old.uid) else []
        self._deliver(gone, [] if new is None else [new.value])


class _Lines:
    """Lines out of pieces of any size, each within a bound."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def unfinished(self) -> bool:
        return self._size > 0

    def add(self, piece: bytes) -> Iterator[bytes]:
        *whole, rest = piece.split(b"\n")
        for end in whole:
            line = b"".join([*self._parts, end])
            self._parts, self._size = [], 0
            if line.strip():
                yield line
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > MAX_LINE_BYTES:
            raise Trouble("too_large", f"a line of a watch has more than {MAX_LINE_BYTES} bytes")


def _told(error: _Error) -> Exception:
    if error.code == 410:
        return Expired()
    return Trouble("server_error", f"the API server ended a watch with {error.code}: {in_a_line(error.message)}")


__all__ = ["Key", "Reflector", "ReflectorStatus", "State", "Unreadable"]
