"""What hardware there is: one table of backends, and what can be asked of it.

Imports torch inside functions only.
"""
