"""``kvsync serve``: the gateway in the foreground."""

from __future__ import annotations

from pathlib import Path

import click

from kvsync.cli.run import Flags, options, run


@click.command()
@options("gateway", host="Address of the data port", port="Data port")
def serve(file: Path | None, flags: Flags) -> None:
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
    run(file, flags)
