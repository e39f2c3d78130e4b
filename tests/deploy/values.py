"""Values of the chart: all on, all off, and what lies between. What each renders is judged by schemas (test_chart.py)
and by a real API server (tests/kube)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVERYTHING: Mapping[str, Any] = {
    "fullnameOverride": "gateway",
    "image": {"repository": "images.example/kvsync", "digest": "sha256:" + "0" * 64, "pullSecrets": [{"name": "pull"}]},
    "replicas": 3,
    "config": {
        "gateway": {
            "port": 9443,
            "drain_timeout": 30.5,
            "engine_api_key_file": "/etc/kvsync/secrets/engine-key/key",
            "tls": {"cert": "/etc/kvsync/secrets/tls.data/tls.crt", "key": "/etc/kvsync/secrets/tls.data/tls.key"},
        },
        "admin": {
            "host": "::",
            "port": 9444,
            "tls": {"cert": "/etc/kvsync/secrets/tls.data/tls.crt", "key": "/etc/kvsync/secrets/tls.data/tls.key"},
        },
        "index": {"max_bytes": 8 << 30},
        "extproc": {"enabled": True},
        "redis": {"url": "redis://redis:6379", "password_file": "/etc/kvsync/secrets/engine-key/key"},
        "kubernetes": {"namespaces": ["*"], "selector": "team=serving"},
        "models": [
            {"name": "m", "engines": [{"name": "a", "url": "http://10.0.0.1:8000", "events": "tcp://10.0.0.1:5557"}]}
        ],
        "tenants": [{"name": "t", "api_key_hashes": ["0" * 64]}],
    },
    "env": [
        {"name": "AIBRIX_PREFIX_CACHE_LOCAL_ROUTER_METRICS_ENABLED", "value": "true"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "secrets": [{"name": "engine-key"}, {"name": "tls.data"}],
    "volumes": [{"name": "tokenizers", "persistentVolumeClaim": {"claimName": "tokenizers", "readOnly": True}}],
    "volumeMounts": [{"name": "tokenizers", "mountPath": "/tokenizers", "readOnly": True}],
    "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "12Gi"}},
    "service": {
        "type": "LoadBalancer",
        "port": 443,
        "annotations": {"example/cost": "1"},
        "externalTrafficPolicy": "Local",
    },
    "serviceAccount": {"name": "router", "annotations": {"example/role": "r"}},
    "autoscaling": {"enabled": True},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}],
        "egress": {
            "enabled": True,
            "engines": [{"ipBlock": {"cidr": "10.0.0.0/16"}}],
            "apiServer": [{"ipBlock": {"cidr": "10.96.0.1/32"}}],
            "redis": [{"podSelector": {"matchLabels": {"app": "redis"}}}],
            "redisPorts": [6379, 16379],
            "rules": [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 8000, "protocol": "TCP"}]}],
        },
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "tlsConfig": {"insecureSkipVerify": True}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "rack",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "kvsync"}},
        }
    ],
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "gateway", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "high",
    "podLabels": {"team": "serving"},
    "podAnnotations": {"example/note": "yes"},
    "envoy": {"enabled": True, "image": {"pullSecrets": [{"name": "pull"}]}},
}
NOTHING: Mapping[str, Any] = {
    "replicas": 1,
    "config": {
        "events": {"enabled": False},
        "tokenizer": {"remote": {"enabled": False, "endpoint": None}},
        "kubernetes": {"enabled": False},
    },
    "serviceAccount": {"create": False},
    "rbac": {"create": False},
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "preStopSeconds": 0,
    "topologySpreadConstraints": [],
}
ALL_EGRESS: Mapping[str, Any] = {"networkPolicy": {"egress": {"enabled": True}}}
ENVOY: Mapping[str, Any] = {
    "config": {"gateway": {"enabled": False}, "extproc": {"enabled": True}},
    "envoy": {"enabled": True},
}
MATRIX: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "nothing": NOTHING,
    "some namespaces": {"config": {"kubernetes": {"namespaces": ["chat", "code"]}}, **ALL_EGRESS},
    "all namespaces": {"config": {"kubernetes": {"namespaces": ["*"]}}, **ALL_EGRESS},
    "no discovery": {"config": {"kubernetes": {"enabled": False}}, **ALL_EGRESS},
    "Envoy asks": {"config": {"gateway": {"enabled": False}, "extproc": {"enabled": True}}},
    "both doors": {"config": {"extproc": {"enabled": True, "port": 9052, "drain_delay": 7.5}}},
    "Redis": {"config": {"redis": {"url": "rediss://redis.data:6380"}}, **ALL_EGRESS},
    "Envoy": ENVOY,
    "Envoy fails open": {
        "fullnameOverride": "route",
        "config": {
            "gateway": {"enabled": False, "max_body_bytes": 8 << 20},
            "extproc": {"enabled": True, "port": 9052},
        },
        "envoy": {
            "enabled": True,
            "replicas": 1,
            "image": {"digest": "sha256:" + "0" * 64},
            "address": "::",
            "port": 8443,
            "failOpen": True,
            "fallback": {"host": "engines.chat.svc", "port": 8001},
            "service": {"type": "NodePort", "externalTrafficPolicy": "Local"},
        },
    },
    "no zmq": {"image": {"tag": "0.1.0-nozmq"}, "config": {"events": {"enabled": False}}},
    "one replica": {"replicas": 1},
    "none": {"replicas": 0},
    "egress": {"networkPolicy": {"egress": {"enabled": True}}},
    "nobody scrapes": {"networkPolicy": {"scrapers": []}},
    "autoscaled": {"autoscaling": {"enabled": True}, "replicas": 1},
    "monitored": {"serviceMonitor": {"enabled": True}},
    "long name": {"nameOverride": "x" * 40},
}
