"""``kvsync extproc``: Envoy's external processor in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from kvsync.cli.run import Flags, options, run


@click.command()
@options("extproc", host="Address of the port that Envoy asks", port="Port that Envoy asks")
def extproc(file: Path | None, flags: Flags) -> None:
    """Run Envoy's external processor in the foreground.

    Envoy carries the requests and asks here where each of them goes: the same decisions as those of `kvsync serve`, by
    the same file. It listens for gRPC (port 50052; health service included) and has no data port of its own. Set
    extproc.enabled in the file and run `kvsync serve` for both.

    \b
    An Envoy configuration with everything that belongs to it:  deploy/envoy/envoy.yaml
    How the two fit together, and what happens when one fails:  docs/envoy.md
    See that it works:                                          curl localhost:8081/readyz
    """
    run(file, {"gateway.enabled": False, "extproc.enabled": True, **flags})
