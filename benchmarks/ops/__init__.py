"""Operators against their peers, cell by cell."""
