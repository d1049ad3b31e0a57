"""tools/environment.py: the packages that `make` installs on a machine that lacks them."""

import os
import shutil
from pathlib import Path

import environment
import pytest
from packaging_tools import ROOT

# Like the real `apt-get download`, this leaves packages in the current folder, with a header each.
APT_GET = """#!/bin/sh
shift 3
for name in "$@"; do
    mkdir -p $name/DEBIAN $name/usr/include/$name
    touch $name/usr/include/$name/header.h
    echo "Package: $name" > $name/DEBIAN/control
    echo "Version: 2" >> $name/DEBIAN/control
    printf 'Architecture: all\\nMaintainer: a\\nDescription: b\\n' >> $name/DEBIAN/control
    dpkg-deb -b $name ${name}_2_all.deb
done
"""


def test_extras_match_pyproject():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["optional-dependencies"]
    for extras in (environment.EXTRAS, ["frameworks"]):
        expected = sorted({name for extra in extras for name in listed[extra]})
        assert environment.extras(extras) == expected


@pytest.mark.parametrize("settings", ["", "global.index-url='https://mirror'"])
def test_pip_is_used_instead_of_uv_if_its_settings_name_an_index(monkeypatch, settings):
    commands = []

    def succeeds(command):
        commands.append([str(part) for part in command])
        return True

    monkeypatch.setattr(environment, "REQUESTED_TORCH", "2.11.0")
    monkeypatch.setattr(environment, "ask", lambda *command: settings)
    monkeypatch.setattr(environment, "succeeds", succeeds)
    monkeypatch.setattr(environment, "run", lambda *command: succeeds(list(command)))
    environment.install_packages(Path("python"))
    assert "torch==2.11.0" in commands[-1]
    assert commands[-1][0].endswith("uv") == (settings == "")


def test_tools_that_only_the_active_environment_has_are_linked(tmp_path, monkeypatch):
    for name in ("active/bin/ctest", "active/bin/cmake", "own/bin/cmake"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "active/bin/python"))
    monkeypatch.setattr(environment, "VENV", tmp_path / "own")
    environment.link_tools()
    assert (tmp_path / "own/bin/ctest").readlink() == tmp_path / "active/bin/ctest"
    assert not (tmp_path / "own/bin/cmake").is_symlink()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="not Debian's kind of system")
def test_headers_are_unpacked_before_the_environment_exists(tmp_path, monkeypatch, capsys):
    apt_get = tmp_path / "bin" / "apt-get"
    apt_get.parent.mkdir()
    apt_get.write_text(APT_GET)
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apt_get.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(environment, "SYSTEM_INCLUDES", [])
    monkeypatch.setattr(environment, "CPP_HEADERS", tmp_path / ".venv" / "headers")
    monkeypatch.setattr(environment, "DEBIAN", {"catch2": "catch2", "json-dev": "json-dev"})
    for _ in range(2):
        environment.install_cpp_headers()
        for name in ("catch2", "json-dev"):
            assert (tmp_path / ".venv/headers/usr/include" / name / "header.h").exists()
    assert capsys.readouterr().out == "environment: fetching catch2, json-dev\n"
