"""Warnings that are given once are given once per test."""

import pytest

from protos.validation import warn_once


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    warn_once.cache_clear()
