"""A simulated run finds rewritten content under the names of files that stay as they are."""

import importlib
import runpy
import sys

from oomfix.profile.overlay import overlay
from oomfix.profile.patches import Patches

MODULE = "def value():\n    return 'old'\n"
REWRITTEN = "# coding: latin-1\n\ndef value():\n    return 'n\u00e9w'\n".encode("latin-1")


def test_imports_find_the_rewritten_module_although_the_old_one_is_compiled_already(tmp_path, monkeypatch):
    import inspect

    path = tmp_path / "overlaid_module.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    module = importlib.import_module("overlaid_module")
    assert module.value() == "old" and (tmp_path / "__pycache__").exists()
    del sys.modules["overlaid_module"]
    with Patches() as patches:
        overlay(patches, {str(path.resolve()): REWRITTEN})
        module = importlib.import_module("overlaid_module")
        assert module.value() == "n\u00e9w"
        assert inspect.getsource(module.value) == "def value():\n    return 'n\u00e9w'\n"
    del sys.modules["overlaid_module"]
    assert importlib.import_module("overlaid_module").value() == "old"
    del sys.modules["overlaid_module"]
    assert path.read_text() == MODULE


def test_a_script_is_run_as_rewritten_under_its_own_name_through_a_link_too(tmp_path):
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text("found = 'old'\n")
    link.symlink_to(script)
    with Patches() as patches:
        overlay(patches, {str(script.resolve()): b"found = 'new', __file__, __name__\n"})
        for path in (script, link):
            found = runpy.run_path(str(path), run_name="__main__")["found"]
            assert found == ("new", str(path), "__main__")
    assert runpy.run_path(str(script))["found"] == "old"
