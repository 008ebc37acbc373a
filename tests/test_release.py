"""Tests of a release: the files of the wheel and of the source distribution, and the licenses of its dependencies."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from streampack_services.export import FILES

import streampack
from tests import dependencies_page

ROOT = Path(__file__).parent.parent
WEB = ROOT / "services/streampack_services/web"
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "services", "streampack")
PERMISSIVE = ("MIT", "BSD", "Apache", "ISC", "PSF", "0BSD", "Zlib", "CC0", "LLVM")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel and a source distribution from a copy of the project, and return their folder."""
    folder = tmp_path_factory.mktemp("release")
    (source := folder / "source").mkdir()
    subprocess.run(["cp", "-R", *(ROOT / name for name in (*SOURCES, "deploy", "tests")), source], check=True)
    build = "from setuptools import build_meta as b; print(b.build_wheel('..'), b.build_sdist('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    return folder


def files_of(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_is_complete(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"streampack-{streampack.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    for folder, there in ((FILES, "streampack_services/deploy"), (WEB, "streampack_services/web")):
        expected = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        assert {
            path.relative_to(tmp_path / there) for path in (tmp_path / there).rglob("*") if path.is_file()
        } == expected
    assert (tmp_path / "streampack/py.typed").exists()
    assert (tmp_path / "streampack_services/py.typed").exists()
    (info,) = tmp_path.glob("*.dist-info")
    assert {"LICENSE", "NOTICE"} <= {path.name for path in (info / "licenses").iterdir()}
    words = [sys.executable, "-m", "streampack", "export", "docker", str(tmp_path / "out")]
    subprocess.run(words, cwd=built, env={"PYTHONPATH": str(tmp_path)}, check=True, capture_output=True)
    assert f'STREAMPACK="streampack[service]=={streampack.__version__}"' in (tmp_path / "out/Dockerfile").read_text()


def test_the_source_distribution_has_what_builds_the_wheel_and_no_tests(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "CHANGELOG.md", "LICENSE", "NOTICE", "streampack/py.typed"} <= names
    assert "services/streampack_services/web/index.html" in names
    assert not {name for name in names if name.startswith("tests")}


def test_the_page_of_dependencies_is_current() -> None:
    assert (ROOT / "docs/reference/dependencies.md").read_text() == dependencies_page.page()


def test_every_package_of_a_broker_has_a_permissive_license() -> None:
    for name in dependencies_page.closure("service"):
        assert dependencies_page.license_of(name).startswith(PERMISSIVE), name


def test_the_changelog_s_newest_release_is_this_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    released = [line for line in headings if line != "## [Unreleased]"]
    assert released[0].startswith(f"## [{streampack.__version__}]")


def test_the_version_is_the_same_everywhere_and_the_repository_has_one_address() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == streampack.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    found = subprocess.run(
        ["git", "grep", "-l", "github.com/OWNER"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) <= {"pyproject.toml", "CONTRIBUTING.md", "tests/test_release.py"}


def test_the_workflow_calls_what_ci_runs_and_fits_the_schema_of_its_host() -> None:
    file = ROOT / ".github/workflows/ci.yaml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = yaml.safe_load(file.read_text())["jobs"]
    runs = {step.get("run") for job in jobs.values() for step in job["steps"]}
    assert {".ci/run", "make docs-artifact"} <= runs
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yaml"):
        tree = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(tree)
        ids = [part["id"] for part in tree["body"]]
        assert len(ids) == len(set(ids))
