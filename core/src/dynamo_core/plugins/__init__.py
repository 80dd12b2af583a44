"""Finds plugins among the installed distributions and loads the ones that are asked for by name.

`loader` loads, `catalog` lists without importing anything, `hooks` tells listeners what happens.
"""
