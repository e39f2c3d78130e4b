"""What a request means, whoever carries its bytes: the gateway's own sockets, or Envoy's.

:mod:`.admission` says what a head asks for: :mod:`.paths` is what is served, :mod:`.auth` to whom; the model list
(:mod:`.openai`) and refusals (:mod:`.errors`) need no engine. :mod:`.course` takes everything else from its
:mod:`.body` through tokens to a worker; :mod:`.refusals` says what tenants may not ask for, :mod:`.salts` and
:mod:`.inject` change what they must of the text, by :mod:`.edit`. :mod:`.headers` says which fields pass, both ways,
:mod:`.usage` finds the usage in an answer. :mod:`.ports` is what all of it needs from other rooms, :mod:`.rooms` holds
what serves there, :mod:`.turns` gives large bodies their turn. There is no socket here.
"""
