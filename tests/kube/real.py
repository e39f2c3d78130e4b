"""A real kube-apiserver with a real etcd (``scripts/kube``), started for one run of the tests and ended by its pid."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final

SCRIPTS: Final = Path(__file__).parents[2] / "scripts" / "kube"


class RealApiServer:
    """See the module. ``start`` and ``stop`` may be called again and again; the state stays.

    Args:
        binary: that ``scripts/kube/build.sh`` made.
        folder: for state and logs.
    """

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._ports = _free_ports()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._ports[0]}"

    @property
    def ca_file(self) -> Path:
        return self._folder / "ca.crt"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, for kubectl."""
        return self._folder / "kubeconfig"

    @property
    def token(self) -> str:
        """The administrator's."""
        return (self._folder / "admin.token").read_text().strip()

    def __enter__(self) -> RealApiServer:
        self._run("start.sh", str(self._binary), str(self._folder), *map(str, self._ports))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run("stop.sh", str(self._folder))

    async def start(self) -> None:
        ports = map(str, self._ports)
        await asyncio.to_thread(self._run, "start.sh", str(self._binary), str(self._folder), *ports)

    async def stop(self, *, kill: bool = False) -> None:
        """The API server alone; etcd goes on."""
        signal = "KILL" if kill else "TERM"
        await asyncio.to_thread(self._run, "stop.sh", str(self._folder), "apiserver", signal)

    async def stop_etcd(self) -> None:
        await asyncio.to_thread(self._run, "stop.sh", str(self._folder), "etcd", "KILL")

    def compact(self) -> None:
        """Drop all of the store's history up to now."""
        etcd = f"http://127.0.0.1:{self._ports[1]}"
        subprocess.run([str(self._binary), "compact", "--endpoint", etcd], check=True, capture_output=True, timeout=60)

    def _run(self, script: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(SCRIPTS / script), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, f"{script}: {done.stderr}"


def _free_ports() -> tuple[int, int]:
    """For the API server and for etcd, which takes the next one as well."""
    while True:
        with socket.socket() as api, socket.socket() as etcd, socket.socket() as peer:
            api.bind(("127.0.0.1", 0))
            etcd.bind(("127.0.0.1", 0))
            first = etcd.getsockname()[1]
            try:
                peer.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return api.getsockname()[1], first
