"""Properties are tried on the same examples every time: a failure here is one everywhere."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")
