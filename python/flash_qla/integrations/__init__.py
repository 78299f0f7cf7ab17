"""Putting this library in place of other packages' functions, by a supported call each."""
