"""Fixtures and settings for all tests."""

from hypothesis import settings

from tests.triton_server import two_stage_server

__all__ = ["two_stage_server"]

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("skippy", deadline=None)
settings.load_profile("skippy")
