"""Imported beside TileLang; nothing of it is used."""
