import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_carries_conf_recipes_prompts_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        here = {
            f"draftlab/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*.*")
            if path.is_file()
        }
        assert here
        assert here <= names
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "draftlab").rglob("*.py")}
    assert sources <= names
    assert "draftlab/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "outputs", "conf", "recipes"))]


@pytest.mark.slow
def test_commands_work_from_the_unpacked_wheel_in_another_folder(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys, draftlab; from draftlab.cli.main import main; "
        "assert 'site' in draftlab.__file__, draftlab.__file__; "
        "sys.exit(main(['recipes']) or main(['check']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all settings are valid" in done.stdout
