"""Shared by all tests: assertions of the shipped contract suites explain themselves like the tests' own."""

import pytest

pytest.register_assert_rewrite("ctxcache.testing.tiers", "ctxcache.testing.metadata")
