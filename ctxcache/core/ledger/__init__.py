"""The ledger: the one owner of where every segment and every session is in its life.

Pure; `ledger.py` has the events.
"""
