"""The file of a wheel for several releases of torch, which `make test-wheels` names."""

import os
import re
import sys
import zipfile
from pathlib import Path

import ampfuse
import pytest
from packaging_tools import dynamic_entries, run

WHEEL = Path(os.environ["AMPFUSE_WHEEL"])
ARCHIVE = zipfile.ZipFile(WHEEL)
NAMES = [name for name in ARCHIVE.namelist() if not name.endswith("/")]
MINORS = sorted({int(minor) for minor in re.findall(r"ampfuse/lib/torch2\.(\d+)/", str(NAMES))})


def of_distribution(end):
    """Return the text of a file that describes the distribution."""
    (name,) = (name for name in NAMES if ".dist-info/" in name and name.endswith(end))
    return ARCHIVE.read(name).decode()


def test_name_has_no_torch_and_the_tags_of_one_python_and_old_systems():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = rf"ampfuse-{ampfuse.__version__}-{python}-{python}-manylinux_2_\d+_x86_64\.whl"
    assert re.fullmatch(name, WHEEL.name)
    assert f"Tag: {python}-{python}-manylinux_2_" in of_distribution("/WHEEL")


def test_audit_finds_nothing_that_the_tag_does_not_allow():
    shown = run(os.environ["AUDITWHEEL"], "show", WHEEL)
    tag = re.search(r"manylinux_\d+_\d+_x86_64", WHEEL.name)[0]
    assert f'"{tag}"' in shown


def test_metadata_require_the_releases_of_torch_whose_libraries_are_in_it():
    metadata = of_distribution("/METADATA")
    assert re.search(rf"^Requires-Dist: torch[<>=.,\d]*>=2\.{MINORS[0]}\b", metadata, re.MULTILINE)
    assert re.search(
        rf"^Requires-Dist: torch[<>=.,\d]*<2\.{MINORS[-1] + 1}\b", metadata, re.MULTILINE
    )
    assert "License-Expression: " in metadata
    assert f"\nVersion: {ampfuse.__version__}\n" in metadata


def test_licence_is_in_the_wheel():
    for name in ("LICENSE", "NOTICE"):
        assert of_distribution(f".dist-info/licenses/{name}")
    assert "ampfuse/share/licenses/ampfuse/LICENSE" in NAMES


@pytest.mark.parametrize("minor", MINORS)
def test_each_release_has_library_module_and_targets_of_cmake(minor):
    inside = [name.rsplit("/", 1)[1] for name in NAMES if f"/torch2.{minor}/" in name]
    assert sorted(re.sub(r"\.cpython.*", "", name) for name in inside) == [
        "_C",
        "ampfuseTargets-release.cmake",
        "ampfuseTargets.cmake",
        f"libampfuse.so.{'.'.join(ampfuse.__version__.split('.')[:2])}",
    ]


def test_libraries_find_torch_beside_the_package_and_name_no_path_of_the_builder(tmp_path):
    paths = {}
    for name in NAMES:
        if ".so" in name:
            found = dynamic_entries(ARCHIVE.extract(name, tmp_path), "(?:RUNPATH|RPATH)")
            kind = re.search(r"(libampfuse_cuda|libampfuse|_C)\.", name)[1]
            paths.setdefault(kind, set()).update(found)
    has_kernels = ampfuse.has_cuda()
    of_library = "$ORIGIN/../../../torch/lib" + (":$ORIGIN/.." if has_kernels else "")
    assert paths == {"libampfuse": {of_library}, "_C": {"$ORIGIN"}} | (
        {"libampfuse_cuda": set()} if has_kernels else {}
    )


def test_size_is_that_of_a_short_download():
    assert WHEEL.stat().st_size <= (120e6 if ampfuse.has_cuda() else 20e6)


def test_packages_of_the_environment_fit_together():
    run(sys.executable, "-m", "pip", "check")
