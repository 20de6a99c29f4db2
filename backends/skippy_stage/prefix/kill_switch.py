"""The kill switch of the prefix cache: two environment variables that beat every deployment (spec 10.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KILL_SWITCHES: Final = ("SKIPPY_KV_CACHE", "SKIPPY_PREFIX_CACHE")
OFF_FORMS: Final = ("0", "off", "false", "disabled", "disable")


def prefix_cache_killed(environ: Mapping[str, str]) -> bool:
    """Whether one of the variables says off; an "on" in one does not mask an "off" in the other.

    Case and spaces around the value don't count. Any other value changes nothing: how the cache works is the
    deployment's to say.
    """
    return any(environ.get(name, "").strip().lower() in OFF_FORMS for name in KILL_SWITCHES)
