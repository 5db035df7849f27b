"""Settings: flags over pyproject.toml over defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomfix.config import Configuration, Flags, check_codes

CODES = ("OOM001", "OOM101", "OOM102", "OOM201")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    return tmp_path


def test_defaults(project: Path):
    settings = Configuration(Flags(), CODES).settings("src/train.py")
    assert settings.root == str(project)
    assert (settings.select, settings.ignore, settings.exclude) == ((), (), ())
    assert (settings.fail_on, settings.target_torch, settings.baseline) == ("warning", None, None)


def test_the_nearest_pyproject_with_a_table_is_read(project: Path):
    (project / "pyproject.toml").write_text(
        '[tool.oomfix]\nselect = ["oom1"]\nignore = ["OOM102"]\nfail-on = "error"\nexclude = ["old/"]\n'
        'target-torch = "1.13"\nbaseline = "known.json"\n[tool.oomfix.presets.mine]\nbudget_gib = 10\n'
    )
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    configuration = Configuration(Flags(), CODES)
    settings = configuration.settings("src/train.py")
    assert configuration.problems == []
    assert settings.root == str(project)
    assert (settings.select, settings.ignore, settings.exclude) == (("OOM1",), ("OOM102",), ("old/",))
    assert (settings.fail_on, settings.target_torch) == ("error", (1, 13))
    assert settings.baseline == str(project / "known.json")


def test_flags_win(project: Path):
    (project / "pyproject.toml").write_text('[tool.oomfix]\nselect = ["OOM1"]\nfail-on = "error"\n')
    flags = Flags(select=("OOM2",), fail_on="never", target_torch=(2, 3), baseline="b.json")
    settings = Configuration(flags, CODES).settings("src")
    assert (settings.select, settings.fail_on) == (("OOM2",), "never")
    assert (settings.target_torch, settings.baseline) == ((2, 3), "b.json")


def test_a_flag_leaves_the_other_settings_as_they_are(project: Path):
    (project / "pyproject.toml").write_text('[tool.oomfix]\nignore = ["OOM2"]\nfail-on = "error"\n')
    settings = Configuration(Flags(fail_on="note"), CODES).settings("src")
    assert (settings.ignore, settings.fail_on) == (("OOM2",), "note")


def test_each_path_has_the_settings_of_its_own_project(project: Path):
    for name, code in (("a", "OOM1"), ("b", "OOM2")):
        (project / name).mkdir()
        (project / name / "pyproject.toml").write_text(f'[tool.oomfix]\nselect = ["{code}"]\n')
    configuration = Configuration(Flags(), CODES)
    assert [configuration.settings(name).select for name in ("a", "b", "src")] == [("OOM1",), ("OOM2",), ()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.oomfix\n", "not TOML: "),
        ("[tool]\noomfix = 3\n", "[tool.oomfix]: got 3, expected a table"),
        ('[tool.oomfix]\nselct = ["OOM1"]\n', "[tool.oomfix]: unknown key 'selct'; did you mean select?"),
        ("[tool.oomfix]\nfail_on = 'error'\n", "[tool.oomfix]: unknown key 'fail_on'; did you mean fail-on?"),
        ("[tool.oomfix]\nselect = 'OOM1'\n", "[tool.oomfix] select: got 'OOM1', expected a list of strings"),
        (
            '[tool.oomfix]\nignore = ["OOM191"]\n',
            "[tool.oomfix] ignore: 'OOM191' is no rule and no prefix of one; did you mean OOM101?",
        ),
        ("[tool.oomfix]\nfail-on = 'all'\n", "fail-on: got 'all', expected one of error, warning, note, never"),
        ("[tool.oomfix]\ntarget-torch = 2.3\n", "[tool.oomfix] target-torch: got 2.3, expected a string"),
        ("[tool.oomfix]\ntarget-torch = 'new'\n", "'new': expected a torch version such as 2.3"),
    ],
)
def test_a_faulty_pyproject_is_told_once_in_one_line(project: Path, text: str, message: str):
    (project / "pyproject.toml").write_text(text)
    configuration = Configuration(Flags(), CODES)
    configuration.settings("src/train.py")
    configuration.settings("src")
    configuration.settings(".")
    ((path, problem),) = configuration.problems
    assert path == "pyproject.toml"
    assert message in problem
    assert "\n" not in problem


def test_a_fault_leaves_the_other_keys_in_force(project: Path):
    (project / "pyproject.toml").write_text('[tool.oomfix]\nselct = []\nfail-on = "note"\n')
    assert Configuration(Flags(), CODES).settings("src").fail_on == "note"


def test_a_pyproject_that_is_no_utf8_is_told(project: Path):
    (project / "pyproject.toml").write_bytes(b"[tool.oomfix]\nselect = ['\xe9']\n")
    configuration = Configuration(Flags(), CODES)
    configuration.settings("src")
    assert configuration.problems[0][1].startswith("not TOML: ")


def test_codes_are_read_in_any_case_and_by_prefix():
    assert check_codes([" oom101", "OOM2"], CODES) == ("OOM101", "OOM2")


@pytest.mark.parametrize("code", ["", "OOM9", "E501", "OOM1011"])
def test_a_code_that_names_no_rule_is_refused(code: str):
    with pytest.raises(ValueError, match="is no rule and no prefix of one"):
        check_codes([code], CODES)
