"""One node among many: who else is there, what they change, and the bytes that they have.

`joined` puts it together beside a node; `membership` knows the others, `location` what they have,
`fetcher` brings their bytes here, each file an `arrival` of `pieces`; `source` shows them what is
here.
"""
