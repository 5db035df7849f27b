"""The target torch version, as requirement files say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomfix.target import parse_version, target_of


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("requirements.txt", "torch>=1.8,<2", (1, 8)),
        ("requirements.txt", "torch==2.1.0+cu118", (2, 1)),
        ("requirements.txt", "torch == 1.13.1 ; python_version < '3.8'", (1, 13)),
        ("requirements.txt", "torch[opt-einsum]~=2.3  # not 3.0", (2, 3)),
        ("requirements.txt", "torch<2.0", (1, 13)),
        ("requirements.txt", "torch<=1.12", (1, 12)),
        ("requirements.txt", "torch>=1.4\ntorch==2.5; sys_platform == 'win32'", (1, 4)),
        ("requirements-gpu.txt", "torch==2.4", (2, 4)),
        ("dev_requirements.txt", "torch==2.4", (2, 4)),
        ("pyproject.toml", '[project]\ndependencies = ["numpy>=3.0", "torch>=2.2", "pandas>=4.0"]', (2, 2)),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^1.11"', (1, 11)),
        ("setup.cfg", "[options]\ninstall_requires =\n    torch>=1.10", (1, 10)),
        ("environment.yml", "dependencies:\n  - pytorch=1.12.1=py3.8_cuda11.3", (1, 12)),
        ("environment.yml", "dependencies:\n  - pytorch::pytorch>=1.9", (1, 9)),
        ("requirements.txt", "Torch==1.9", (1, 9)),
        ("requirements.txt", "torch (>=1.7,<2)", (1, 7)),
        ("requirements.txt", "https://a.org/cu113/torch-1.11.0%2Bcu113-cp38-cp38-linux_x86_64.whl", (1, 11)),
        ("requirements.txt", "torch @ https://a.org/torch-2.0.1+cpu-cp310-cp310-linux_x86_64.whl", (2, 0)),
        ("constraints.txt", "torch==1.10", (1, 10)),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = {version = "^1.13", source = "cpu"}', (1, 13)),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = {source = "cpu", version = ">=1.8"}', (1, 8)),
        ("Pipfile", '[packages]\ntorch = {version="==1.10", index="pytorch"}', (1, 10)),
        ("setup.py", 'setup(install_requires=["numpy>=3", "torch>=1.6"])', (1, 6)),
        ("env.yml", "dependencies:\n  - pytorch=1.12", (1, 12)),
        ("conda_gpu.yaml", "dependencies:\n  - pytorch=1.12", (1, 12)),
        ("requirements.txt", "torch", None),
        ("requirements.txt", "https://a.org/torch-scatter-1.2.0-cp38-cp38-linux_x86_64.whl", None),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = {path = "../torch"}', None),
        ("requirements.txt", "torch!=1.5", None),
        ("requirements.txt", "torchvision==0.9\ntorch_geometric==1.2\npytorch-lightning==1.5", None),
        ("requirements.txt", "# torch==1.2", None),
        ("requirements.txt", "https://example.org/torch-1.2.0-cp38.whl", None),
        ("notes.txt", "torch==1.2", None),
    ],
)
def test_the_oldest_allowed_version_is_the_target(tmp_path: Path, name: str, line: str, expected):
    (tmp_path / ".git").mkdir()
    (tmp_path / name).write_text(line + "\n")
    assert target_of(str(tmp_path)) == expected


def test_the_nearest_folder_that_says_it_wins_up_to_the_repository(tmp_path: Path):
    inner = tmp_path / "repository" / "src" / "model"
    inner.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text("torch==1.1")
    assert target_of(str(inner)) is None
    (tmp_path / "repository" / "requirements").mkdir()
    (tmp_path / "repository" / "requirements" / "base.txt").write_text("torch==1.2")
    assert target_of(str(inner)) == (1, 2)
    (inner.parent / "requirements.txt").write_text("torch==1.3")
    assert target_of(str(inner)) == (1, 3)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.3", (2, 3)),
        ("1.13.1", (1, 13)),
        (" 2.10 ", (2, 10)),
        ("2", (2, 0)),
        ("v2.1", (2, 1)),
        ("1.13.1+cu117", (1, 13)),
        ("2.13.0a0+git0dd5a3f", (2, 13)),
        ("2.6.0.dev20241112+cu124", (2, 6)),
        ("2.1.0a0+b5021ba", (2, 1)),
        ("2.4.0rc2", (2, 4)),
        ("1.9.0.post2", (1, 9)),
    ],
)
def test_versions_are_read(text: str, version: tuple[int, int]):
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["two", "2.x", ">=2.3", "", "2.3.1.4", "2.3+", "2.3 or later"])
def test_what_is_no_version_is_refused_by_name(text: str):
    with pytest.raises(ValueError, match="expected a torch version such as"):
        parse_version(text)
