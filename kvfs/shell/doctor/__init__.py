"""What a machine and a store need for kvfs to work and to be fast: each point checked, with advice.

`examine` says in which order; beside it stands one module for each thing that is examined. Every
check looks, none repairs. A check that hits something odd says so as its finding; it never raises,
and none waits longer than a few seconds, whatever hangs.
"""
