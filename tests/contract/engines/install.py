"""Install genuine vLLM and SGLang for CPU, each in a virtual environment of its own: `python install.py vllm sglang`.

They go to `$ROLLOUT_LIFECYCLE_ENGINES`, or `~/.cache/rollout-lifecycle/engines`, and what is there and complete is
reused. Each takes some minutes and 2 to 4 GB the first time. Needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENGINES", "Installation"]

_HERE = Path(__file__).parent
_PLUGIN = _HERE.parents[2] / "adapters" / "transfers" / "vllm_plugin"


@dataclass(frozen=True)
class Installation:
    """One engine of one version.

    Args:
        name: Also the name of the file of pins beside this one.
        version: For the folder's name; the pins decide.
        plugin: Directory of a package of ours that the engine loads, or `None`.
    """

    name: str
    version: str
    plugin: Path | None = None

    @property
    def home(self) -> Path:
        """Where it is, or will be."""
        root = os.environ.get("ROLLOUT_LIFECYCLE_ENGINES") or Path.home() / ".cache" / "rollout-lifecycle" / "engines"
        return Path(root) / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.home / "venv" / "bin" / "python"

    @property
    def complete(self) -> bool:
        """Whether it is there as the pins want it, with our plugin as it stands."""
        return not self._lacking(self._pins) and (self.plugin is None or not self._lacking(self.plugin))

    def install(self) -> None:
        """Install whatever is missing. A half-made environment is made anew; a changed plugin is only replaced."""
        if self._lacking(self._pins):
            shutil.rmtree(self.home, ignore_errors=True)
            self.home.mkdir(parents=True)
            self._run(sys.executable, "-m", "venv", str(self.home / "venv"))
            # Without dependencies: the pins name all of them, and the engines' own wishes cannot be met on CPU.
            self._pip("--no-deps", "--requirement", str(self._pins))
            self._stamp(self._pins)
        if self.plugin is not None and self._lacking(self.plugin):
            self._pip("--no-deps", "--force-reinstall", str(self.plugin))
            self._stamp(self.plugin)

    @property
    def _pins(self) -> Path:
        return _HERE / f"{self.name}.txt"

    def _lacking(self, source: Path) -> bool:
        stamp = self._stamp_of(source)
        return not (stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest(source))

    def _stamp(self, source: Path) -> None:
        self._stamp_of(source).write_text(_digest(source), encoding="utf-8")

    def _stamp_of(self, source: Path) -> Path:
        return self.home / f"{source.name}.complete"

    def _pip(self, *arguments: str) -> None:
        self._run(str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments)

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


ENGINES = {
    "sglang": Installation("sglang", "0.5.23"),
    "vllm": Installation("vllm", "0.32.0", plugin=_PLUGIN),
}


def _digest(source: Path) -> str:
    """Return a digest of a file, or of a package's files."""
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.suffix in {".py", ".toml"})
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def main(names: list[str]) -> int:
    """Install the engines of these names, all of them if there are none."""
    if unknown := set(names) - set(ENGINES):
        sys.stderr.write(f"no engine is called {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}\n")
        return 2
    for name in names or ENGINES:
        engine = ENGINES[name]
        if not engine.complete:
            print(f"installing {name} {engine.version} in {engine.home}", flush=True)
            engine.install()
        print(f"{name} {engine.version} is in {engine.home}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
