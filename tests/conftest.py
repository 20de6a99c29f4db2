"""Fixtures for all tests."""

from tests.triton_server import two_stage_server

__all__ = ["two_stage_server"]
