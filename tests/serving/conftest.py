"""One run of vLLM for all heads of a model runner. Without an interpreter that has vLLM, all of this is skipped.

`make test-serving` makes the environment and names its interpreter in SERVING_PYTHON.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from serving_cases import HEADS, METHODS
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
            item.add_marker(pytest.mark.timeout(1800))
            if not PYTHON:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def targets():
    """The target of each width of attention heads."""
    torch.set_num_threads(1)
    widths = {head.head_dim for heads in METHODS.values() for head in heads.values()}
    return {width: make_target(width) for width in widths}


@pytest.fixture(scope="session")
def greedy(targets):
    """Answers of the targets alone."""
    return {width: decode(target, None, depth=0).tokens for width, target in targets.items()}


@pytest.fixture(scope="session")
def served(request, targets, tmp_path_factory):
    """Train, export and serve the heads that are asked about, right and wrong ones.

    vLLM's start is the dear part, so all of them are served by one process, one after the other, or
    by two when some need another of its model runners.

    Returns:
        What our decoder found, by (method, head), vLLM's answers by (method, head, mistake), the
        mistake None for the head as it was exported, and how sure our confidence heads are of what
        vLLM's are asked about, by (method, head).
    """
    wanted = {
        (item.callspec.params["method"], item.callspec.params["name"])
        for item in request.session.items
        if "served" in item.fixturenames
    }
    root = tmp_path_factory.mktemp("served")
    for width, target in targets.items():
        target.model.save_pretrained(root / f"target-{width}")
    ours, asked, sure = {}, {}, {}
    for method, name in HEADS:
        if (method, name) not in wanted:
            continue
        head, folder = METHODS[method][name], root / f"{method}-{name}"
        target = targets[head.head_dim]
        drafter = train(target, head.kind, steps=head.steps, start=head.start, **head.keys)
        ours[method, name] = decode(target, drafter, head.depth)
        right = exported(drafter, target, folder, head)
        right["target"] = str(root / f"target-{head.head_dim}")
        if getattr(drafter, "confidence", None) is not None:
            right["judged"], sure[method, name] = judged(drafter)
        asked[method, name, None] = right
        for mistake, make in head.mistakes.items():
            wrong = root / f"{method}-{name}-{mistake}"
            shutil.copytree(folder, wrong)
            make(wrong)
            speculative = {**right["speculative"], "model": str(wrong)}
            asked[method, name, mistake] = {**right, "speculative": speculative}
    answers = {}
    for runner in ("first", "second"):
        some = {k: head for k, head in asked.items() if METHODS[k[0]][k[1]].runner == runner}
        if some:
            told = ask_engine(root, runner, list(some.values()))
            answers |= dict(zip(some, told, strict=True))
    return ours, answers, sure


def exported(drafter, target, folder, head):
    """Export a head; give what its serve command says."""
    form = "hf" if head.kind == "draft_model" else "vllm"
    defaults = yaml.safe_load((conf_dir() / "export" / f"{form}.yaml").read_text())
    settings = ExportSettings(**{**defaults, "num_draft_tokens": head.depth})
    words = shlex.split(export_drafter(drafter, target.view, settings, folder).serve_command)
    told = {"overrides": {}, "judged": None}
    for option, key in (("--hf-overrides", "overrides"), ("--speculative-config", "speculative")):
        if option in words:
            told[key] = json.loads(words[words.index(option) + 1])
    return told


def judged(drafter):
    """Make up hidden states and tokens before them; give them, and how sure a DSpark head is."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, drafter.target.spec.hidden_size, generator=generator)
    previous = torch.arange(5) * 9
    with torch.no_grad():
        logits = drafter.confidence(torch.cat([hidden, drafter.markov_in(previous)], dim=-1))
    told = {"hidden": hidden.tolist(), "previous": previous.tolist()}
    return told, logits.sigmoid().squeeze(-1).tolist()


def ask_engine(root, runner, heads):
    asked = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "heads": heads}
    (root / "asked.json").write_text(json.dumps(asked))
    command = [PYTHON, str(HERE / "engine.py"), "asked.json", "answered.json", runner]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((root / "answered.json").read_text())
