"""Engines: how generation runs on a restored cache, one module per engine.

Each knows its engine's own API. Worst case: an engine update that moves it, which its tests show.
"""
