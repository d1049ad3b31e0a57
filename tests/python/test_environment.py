"""What `make` fetches for itself, on machines that have none of it."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[2] / "tools" / "environment.py"
# As the real one does in a folder: leaves a package there, here of one header.
APT_GET = """#!/bin/sh
mkdir -p package/DEBIAN package/usr/include/catch2
touch package/usr/include/catch2/catch.hpp
printf 'Package: catch2\nVersion: 2\nArchitecture: all\nMaintainer: a\nDescription: b\n' \
    > package/DEBIAN/control
dpkg-deb -b package catch2_2_all.deb
"""


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not Debian's kind of system")
def test_catch2_is_unpacked_where_there_is_no_environment_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("environment", ENVIRONMENT)
    assert spec is not None
    assert spec.loader is not None
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    apt_get = tmp_path / "bin" / "apt-get"
    apt_get.parent.mkdir()
    apt_get.write_text(APT_GET)
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apt_get.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "SYSTEM_INCLUDES", [])
    monkeypatch.setattr(environment, "CATCH2", tmp_path / ".venv" / "catch2")
    environment.install_catch2()
    assert (tmp_path / ".venv" / "catch2" / "usr" / "include" / "catch2" / "catch.hpp").exists()
