"""Request → token ids, as the engine would compute them.

:class:`~kvsync.tokenize.service.TokenizerService` is the face of the room; :mod:`~kvsync.tokenize.types` is what it
hands out. Inside: ``request`` reads bodies, ``remote`` asks a vLLM server, ``local`` (with ``messages``, ``template``
and ``boundaries``) does it here, ``prove`` and ``block0`` decide whether local may be trusted.
"""
