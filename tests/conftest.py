"""What no test leaves to the next, and no property depends on: how fast the machine is."""

import gc
import importlib
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish():
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # as the first optimizer does
    keep_what_lives()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        keep_what_lives()


def keep_what_lives():
    """What was imported, or made once, lives as long as the tests: no collection need go through it, as each after an
    error of memory would.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_allocator_settings(monkeypatch):
    """A preset writes them into the environment, where simulated runs and processes that are started find them."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # set first, so that what a test sets is taken back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
