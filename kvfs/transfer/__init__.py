"""Reads from several tiers at once, as the schedule decides: `runner.Transfer`."""
