"""Settings of all tests: property tests draw the same examples every time and have no deadline,
since a test must not fail because the machine is busy."""

from hypothesis import settings

settings.register_profile("minispec", deadline=None, derandomize=True)
settings.load_profile("minispec")
