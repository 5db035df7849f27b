"""The other tools, each in a virtual environment of its own: TorchFix asks for an older libcst than the rest.

The training libraries run in the process of the bench, with the same torch: they are only made importable.
"""

import subprocess
import sys
import venv
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

REQUIREMENTS = {
    "torchfix": "torchfix==0.7.0",
    "torch-preflight": "torch-preflight",  # the newest there is: the tables say which
    "ruff": "ruff==0.17.5",
}


LIBRARIES = {
    "accelerate": "accelerate==1.15.0",
    "lightning_fabric": "lightning-fabric==2.6.6",
    "lightning_utilities": "lightning-utilities==0.15.3",
}


def libraries(folder: Path | None) -> list[str]:
    """Make the training libraries importable in this process, beside its own torch; returns names with versions.

    Those that are installed are taken. Else they go into a folder of their own, without what they depend on: torch is
    that of this process, and so is the rest (what transformers needs is enough).

    Args:
        folder: where the tools of the benches are; None: `default_folder`.

    Raises:
        subprocess.CalledProcessError: pip could not install them.
    """
    if is_installed("accelerate") and (is_installed("lightning_fabric") or is_installed("lightning")):
        fabric = "lightning_fabric" if is_installed("lightning_fabric") else "lightning"
        return [f"{name} {import_module(name).__version__}" for name in ("accelerate", fabric)]
    target = (default_folder() if folder is None else folder) / "libraries"
    if not all((target / name).is_dir() for name in LIBRARIES):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, *LIBRARIES.values()], check=True)
    sys.path.append(str(target))
    return [requirement.replace("==", " ") for requirement in LIBRARIES.values()]


def is_installed(name: str) -> bool:
    """Whether a package can be imported here; it is not."""
    return find_spec(name) is not None


class Rival:
    """An installed tool.

    Args:
        folder: where the virtual environments of all tools are; made when needed.
        name: a key of `REQUIREMENTS`, which is also the name of its command.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._environment = folder / name
        self.command = str((self._environment / "bin" / name).absolute())
        if not Path(self.command).exists():
            venv.create(self._environment, with_pip=True)
            pip = [str(self._environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, REQUIREMENTS[name]], check=True)

    @property
    def version(self) -> str:
        """Its version as its own environment says."""
        packages = self._environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        names = {
            distribution.metadata["Name"].lower(): distribution.version
            for distribution in distributions(path=[str(packages / "site-packages")])
        }
        return names[self.name]


def default_folder() -> Path:
    """Where the benches keep what they download."""
    from platformdirs import user_cache_path

    return user_cache_path("oomfix-bench", appauthor=False)
