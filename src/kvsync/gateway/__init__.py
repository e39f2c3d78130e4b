"""HTTP in, HTTP out: the data port, and the admin port beside it.

A request's way: :mod:`.server` accepts, :mod:`.http1` holds the client's connection, :mod:`.reader` makes requests of
its bytes, :mod:`.proxy` says who answers. :mod:`.exchange` takes one request to the engine that
:mod:`kvsync.requests.course` chooses for it; what a request means is all in that room. :mod:`.upstream` holds the
engines' connections, :mod:`.relay` passes the answer. :mod:`.admin` shows what the gateway knows, as :mod:`.openapi`
says.
"""
