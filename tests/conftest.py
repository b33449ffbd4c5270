"""One hypothesis profile for all tests: no deadlines (the machine is shared), the same examples."""

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
