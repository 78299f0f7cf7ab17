"""Streams that are cut over ranks."""
