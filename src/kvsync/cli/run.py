"""Running a gateway in the foreground, whichever ports it opens: what ``kvsync serve`` and ``kvsync extproc`` share."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import click

from kvsync.cli.process import OTHER_FILES, allow_files, clients_within, settle_collector
from kvsync.config import ConfigError, Settings, load
from kvsync.extras import how_to_install

log = logging.getLogger("kvsync")


Flags: TypeAlias = Mapping[str, object]
"""Settings by their dotted names; ``None`` where a flag was not given."""


def options(
    section: str, *, host: str, port: str
) -> Callable[[Callable[[Path | None, Flags], None]], Callable[..., None]]:
    """Give a command its options, and what they say as file and flags.

    Args:
        section: of the settings, where the command's own address and port are.
        host, port: what those two are.
    """
    told = {
        "host": (str, f"{section}.host", host),
        "port": (int, f"{section}.port", port),
        "admin_host": (str, "admin.host", "Address of the admin port"),
        "admin_port": (int, "admin.port", "Admin port: health, metrics, admin API"),
        "log_level": (str, "telemetry.log_level", "debug, info, warning or error"),
        "log_format": (str, "telemetry.log_format", "text or json"),
    }

    def decorate(command: Callable[[Path | None, Flags], None]) -> Callable[..., None]:
        @wraps(command)
        def called(file: Path | None, **given: object) -> None:
            command(file, {setting: given[name] for name, (_, setting, _) in told.items()})

        for name, (kind, setting, what) in reversed(told.items()):
            click.option(f"--{name.replace('_', '-')}", type=kind, help=f"{what} ({setting}).")(called)
        path = click.Path(path_type=Path)
        return click.option("-c", "--config", "file", type=path, help="YAML file with the fleet and settings.")(called)

    return decorate


def run(file: Path | None, flags: Flags) -> None:
    """Until SIGTERM or SIGINT.

    Raises:
        ClickException: it can't start.
    """
    try:
        settings = load(file, os.environ, flags)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if settings.extproc.enabled:
        try:
            import_module("grpc")
            import_module("google.protobuf")
        except ModuleNotFoundError as missing:
            raise click.ClickException(
                f"{missing}: Envoy's external processor needs the extra 'envoy' ({how_to_install('envoy')})"
            ) from None
    import uvloop

    from kvsync.config.credentials import BadFile
    from kvsync.events.sync import KVSyncRefused
    from kvsync.telemetry import logs

    logs.setup(settings.telemetry.log_level, settings.telemetry.log_format)
    try:
        uvloop.run(_serve(settings, file, flags))
    except BadFile as bad:
        raise click.ClickException(f"{bad} ({bad.mend})") from None
    except KVSyncRefused as refused:
        raise click.ClickException(str(refused)) from None
    except OSError as error:
        raise click.ClickException(
            f"can't start: {error} (gateway.port, extproc.port and admin.port, or --port and --admin-port, choose "
            "other ports)"
        ) from None


async def _serve(settings: Settings, file: Path | None, flags: Flags) -> None:
    from kvsync.app import App

    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    app = App(settings, config_file=file, environ=os.environ, flags=flags)

    def asked_to_end() -> None:
        if end.is_set():
            log.info("asked again: open answers are ended")
            app.hurry()
        end.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_end)
    if settings.gateway.enabled:
        clients = settings.gateway.max_connections
        allowed = allow_files(2 * clients + OTHER_FILES)
        if (room := clients_within(allowed)) < clients:
            log.warning(
                "only %d files may be open: at most %d client connections are taken, not gateway.max_connections = %d; "
                "allow more files (ulimit -Hn), or lower it",
                allowed,
                room,
                clients,
            )
            app.gateway.max_connections = room
    loop.add_signal_handler(signal.SIGHUP, app.reload)
    await app.start()
    settle_collector()
    if not settings.models and not settings.kubernetes.enabled:
        log.warning(
            "no model is configured, so every request is refused: list models and engines in the YAML file, or have "
            "them found (kubernetes.enabled)"
        )
    try:
        await end.wait()
        if settings.gateway.enabled and (delay := settings.gateway.drain_delay):
            log.info("stopping: /readyz says no, requests are still taken for %g s", delay)
        await app.leave()
        limit = settings.gateway.drain_timeout
        if settings.extproc.enabled:
            still = settings.extproc.drain_delay
            log.info(
                "stopping: Envoy's questions are still taken for %g s, open answers may run for %g s more", still, limit
            )
        else:
            log.info("stopping: no more requests are taken, open answers may run for up to %g s", limit)
    finally:
        await app.stop()
    log.info("stopped")


__all__ = ["Flags", "options", "run"]
