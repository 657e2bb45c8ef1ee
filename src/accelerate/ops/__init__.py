"""Collectives over nested data: the wire, and what is gathered, reduced, broadcast and padded over it."""
