"""A trace of requests, replayed against a set of tiers, simulated or real."""
