"""A node and its tiers: what each holds, copies to them behind every store, reading back what only
they have, and room in them."""
