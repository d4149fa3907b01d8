"""What tests of ctxcache, and of code that extends it, are made of: fakes, and the contract suites.

The fakes import nothing that is for tests only; `tiers.py` and `metadata.py` import pytest.
"""
