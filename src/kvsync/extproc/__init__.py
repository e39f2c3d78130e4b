"""Envoy's external processor: Envoy carries the bytes, and asks here where to.

A request's way: :mod:`.server` holds Envoy's gRPC streams, one per request; :mod:`.conversation` is one of them,
without I/O: Envoy's messages in, answers out. It reads the request by :mod:`.heads` and has :mod:`kvsync.requests`
decide, the same code as behind the gateway's own port. :mod:`.carried` is that request's course, :mod:`.targets` knows
where engines are. :mod:`.replies` has the words that Envoy is told, :mod:`.health` says whether to ask here at all,
:mod:`.protocol` is the language. Needs the extra ``envoy``.
"""
