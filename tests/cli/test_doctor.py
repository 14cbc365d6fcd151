from draftlab.cli import doctor
from draftlab.cli.main import main


def test_the_machine_is_described_and_nothing_secret_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_value")
    assert main(["doctor", f"paths.outputs={tmp_path}"]) == 0
    out = capsys.readouterr().out
    for word in ("torch ", "processor", "memory", "torch threads", "free disk", "GPUs"):
        assert word in out
    assert "hf_very_secret_value" not in out


def test_what_is_missing_comes_with_its_cure(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no_such_module": ("a thing", "pip install thing")})
    main(["doctor", f"paths.outputs={tmp_path}"])
    assert "not installed: a thing: pip install thing" in capsys.readouterr().out


def test_outputs_that_cannot_be_written_are_missing(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["doctor", f"paths.outputs={file}"]) == 1
    out = capsys.readouterr().out
    assert "missing: a folder for outputs: cannot write into" in out
    assert "demo model" in out
