"""HTTP in, HTTP out: the data port, and the admin port beside it.

A request's way: :mod:`.server` accepts, :mod:`.http1` holds the client's connection, :mod:`.reader` makes requests of
its bytes, :mod:`.paths` says what is served, :mod:`.auth` to whom, :mod:`.proxy` who answers. :mod:`.exchange` takes
one request through :mod:`.body`, tokenizing and choosing to an engine; :mod:`.salts` and :mod:`.inject` change what
they must of its text, by :mod:`.edit`. :mod:`.upstream` holds the engines' connections, :mod:`.relay` passes the
answer, :mod:`.headers` says which fields pass, :mod:`.usage` finds the usage, :mod:`.errors` has the gateway's own
words. :mod:`.ports` is what it needs from other rooms; :mod:`.admin` shows what it knows, as :mod:`.openapi` says.
"""
