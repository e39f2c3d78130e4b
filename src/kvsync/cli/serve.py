"""``kvsync serve``: the gateway in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from kvsync.cli.run import run


@click.command()
@click.option("-c", "--config", "file", type=click.Path(path_type=Path), help="YAML file with the fleet and settings.")
@click.option("--host", help="Address of the data port (gateway.host).")
@click.option("--port", type=int, help="Data port (gateway.port).")
@click.option("--admin-host", help="Address of the admin port (admin.host).")
@click.option("--admin-port", type=int, help="Admin port: health, metrics, admin API (admin.port).")
@click.option("--log-level", help="debug, info, warning or error (telemetry.log_level).")
@click.option("--log-format", help="text or json (telemetry.log_format).")
def serve(
    file: Path | None,
    host: str | None,
    port: int | None,
    admin_host: str | None,
    admin_port: int | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run the gateway in the foreground.

    Clients talk to it as to one vLLM server that has all the models. It sends each request to the engine that already
    holds the longest part of its prompt, unless that engine is too busy. While it runs, the file is read again when it
    changes (or on SIGHUP) and the fleet follows without losing a request. SIGTERM and SIGINT let open answers end;
    a second one ends them.

    \b
    fleet.yaml for two vLLM servers started with
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
                         "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'
      events: {enabled: true}
      tokenizer: {remote: {enabled: true, endpoint: engines}}
      models:
        - name: Qwen/Qwen3-8B
          engines:
            - {name: a, url: "http://10.0.0.5:8000", events: "tcp://10.0.0.5:5557", replay: "tcp://10.0.0.5:6557"}
            - {name: b, url: "http://10.0.0.6:8000", events: "tcp://10.0.0.6:5557", replay: "tcp://10.0.0.6:6557"}

    \b
    Every setting may also come from the environment: AIBrix's names, or KVSYNC_<SECTION>_<FIELD>.
    See what is in force, and every fault at once:  kvsync config check fleet.yaml
    See that it works:                              curl localhost:8081/readyz
    """
    flags: dict[str, object] = {
        "gateway.host": host,
        "gateway.port": port,
        "admin.host": admin_host,
        "admin.port": admin_port,
        "telemetry.log_level": log_level,
        "telemetry.log_format": log_format,
    }
    run(file, flags)
