from draftlab.cli.main import main
from draftlab.runs.run_dir import create_run


def test_runs_are_listed_with_state_and_step(tmp_path, capsys):
    done = create_run(tmp_path, "adhoc", run_id="1")
    done.write_config({})
    done.mark_finished()
    stopped = create_run(tmp_path, "smoke/tiny", run_id="2")
    stopped.write_config({})
    stopped.metrics_path.write_text('{"step": 12, "time_s": 1, "split": "train"}\n')
    assert main(["runs", f"paths.outputs={tmp_path}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == [str(done.path), "done", "-", "-"]
    assert lines[2] == [str(stopped.path), "stopped", "12", "-"]


def test_an_empty_folder_says_how_to_start(tmp_path, capsys):
    assert main(["runs", f"paths.outputs={tmp_path}"]) == 0
    assert "draftlab train" in capsys.readouterr().out
