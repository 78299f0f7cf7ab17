"""Imported by fla; nothing of it is used."""
