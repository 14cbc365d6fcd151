"""Runs of vLLM, one process a method. Without an interpreter that has vLLM, all of this is skipped.

`make test-serving` makes the environment and names its interpreter in SERVING_PYTHON.
"""

import functools
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from serving_cases import METHODS
from serving_heads import MAX_TOKENS, PROMPTS, decode, make_target, train

from draftlab.export.base import export_drafter
from draftlab.export.settings import ExportSettings
from draftlab.settings.locate import conf_dir

PYTHON = os.environ.get("SERVING_PYTHON", "")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="SERVING_PYTHON names no interpreter with vLLM")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.serving)
            item.add_marker(pytest.mark.timeout(600))
            if not PYTHON:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def target():
    torch.set_num_threads(1)
    return make_target()


@pytest.fixture(scope="session")
def greedy(target):
    """Answers of the target alone."""
    return decode(target, None, depth=0).tokens


@pytest.fixture(scope="session")
def served(target, tmp_path_factory):
    """Train, export and serve all heads of a method, right and wrong ones, in one process.

    Gives what our decoder found by head, and vLLM's answers by head and by (head, mistake).
    """

    @functools.cache
    def run(method):
        root = tmp_path_factory.mktemp(method)
        target.model.save_pretrained(root / "target")
        ours, asked = {}, {}
        for name, head in METHODS[method].items():
            drafter = train(target, head.kind, steps=head.steps, **head.keys)
            ours[name] = decode(target, drafter, head.depth)
            config = exported(drafter, target, root / name, head)
            asked[name] = config
            for mistake, make in head.mistakes.items():
                wrong = root / f"{name}-{mistake}"
                shutil.copytree(root / name, wrong)
                make(wrong)
                asked[f"{name}-{mistake}"] = {**config, "model": str(wrong)}
        return ours, ask_engine(root, asked)

    return run


def exported(drafter, target, folder, head):
    form = "hf" if head.kind == "draft_model" else "vllm"
    defaults = yaml.safe_load((conf_dir() / "export" / f"{form}.yaml").read_text())
    settings = ExportSettings(**{**defaults, "num_draft_tokens": head.depth})
    command = export_drafter(drafter, target.view, settings, folder).serve_command
    return json.loads(shlex.split(command)[-1])


def ask_engine(root, heads):
    asked = {
        "target": str(root / "target"),
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "heads": heads,
    }
    (root / "asked.json").write_text(json.dumps(asked))
    command = [PYTHON, str(HERE / "engine.py"), "asked.json", "answered.json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((root / "answered.json").read_text())
