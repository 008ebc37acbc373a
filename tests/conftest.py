"""One hypothesis profile for all tests: machines are shared, and the first call of a kernel compiles it."""

from hypothesis import settings

settings.register_profile("streampack", deadline=None)
settings.load_profile("streampack")
