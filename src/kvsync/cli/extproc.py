"""``kvsync extproc``: Envoy's external processor in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from kvsync.cli.run import run


@click.command()
@click.option("-c", "--config", "file", type=click.Path(path_type=Path), help="YAML file with the fleet and settings.")
@click.option("--host", help="Address of the port that Envoy asks (extproc.host).")
@click.option("--port", type=int, help="Port that Envoy asks (extproc.port).")
@click.option("--admin-host", help="Address of the admin port (admin.host).")
@click.option("--admin-port", type=int, help="Admin port: health, metrics, admin API (admin.port).")
@click.option("--log-level", help="debug, info, warning or error (telemetry.log_level).")
@click.option("--log-format", help="text or json (telemetry.log_format).")
def extproc(
    file: Path | None,
    host: str | None,
    port: int | None,
    admin_host: str | None,
    admin_port: int | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run Envoy's external processor in the foreground.

    Envoy carries the requests and asks here where each of them goes: the same decisions as those of `kvsync serve`, by
    the same file. It listens for gRPC (port 50052; health service included) and has no data port of its own. Set
    extproc.enabled in the file and run `kvsync serve` for both.

    \b
    An Envoy configuration with everything that belongs to it:  deploy/envoy/envoy.yaml
    How the two fit together, and what happens when one fails:  docs/envoy.md
    See that it works:                                          curl localhost:8081/readyz
    """
    flags: dict[str, object] = {
        "gateway.enabled": False,
        "extproc.enabled": True,
        "extproc.host": host,
        "extproc.port": port,
        "admin.host": admin_host,
        "admin.port": admin_port,
        "telemetry.log_level": log_level,
        "telemetry.log_format": log_format,
    }
    run(file, flags)
