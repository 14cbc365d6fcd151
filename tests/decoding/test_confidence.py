"""Drafters that tell how sure they are: told before the draw, and drafting ends early by it."""

import pytest
import torch
import yaml
from scripted import decode_settings

from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.sampling import Sampling
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir

KINDS = ["draft_model", "eagle3"]


@pytest.fixture(scope="module", params=KINDS)
def drafter(request, target):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{request.param}.yaml").read_text())
    data["num_draft_tokens"] = 4
    settings = parse_settings(drafter_class(request.param).settings_class, data)
    return build_drafter(settings, target.view, None).to(target.dtype).eval()


@pytest.fixture
def trees(drafter, monkeypatch):
    seen, propose = [], drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *args: seen.append(propose(*args)) or seen[-1])
    return seen


def test_confidence_is_the_laws_largest_probability(target, drafter, trees, prompts):
    settings = decode_settings(min_confidence=1e-9, temperature=1.0, max_new_tokens=8)
    Decoder(target, drafter, settings).generate(prompts[:3])
    assert trees
    for tree in trees:
        for row, count in enumerate(tree.num_nodes.tolist()):
            told, law = tree.confidence[row, :count].double(), tree.law_probs[row, :count].double()
            assert torch.allclose(told, law.amax(-1), atol=1e-6)


def test_drafting_ends_when_no_row_is_sure(target, drafter, trees, prompts):
    plain = Decoder(target, None, decode_settings()).generate(prompts[:3])
    decoder = Decoder(target, drafter, decode_settings(min_confidence=0.999))
    got = decoder.generate(prompts[:3])
    assert [g.output_ids for g in got] == [g.output_ids for g in plain]
    for tree in trees:
        width = tree.tokens.shape[1]
        # every node but the first of all was asked for by a row that was sure up to there
        assert width == 1 or (tree.confidence[:, : width - 1] >= 0.999).all(1).any()
    assert min(tree.tokens.shape[1] for tree in trees) == 1
    assert min(step.num_drafted for g in got for step in g.steps) == 0


def test_nobody_is_asked_when_nothing_is_cut(target, drafter, trees, prompts):
    Decoder(target, drafter, decode_settings(max_new_tokens=4)).generate(prompts[:1])
    assert all(tree.confidence is None for tree in trees)


def test_greedy_and_drawn_rows_share_a_batch(target, drafter, prompts):
    laws = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.8, top_k=5)]
    decoder = Decoder(target, drafter, decode_settings(max_new_tokens=8))
    together = decoder.generate(prompts[:3], sampling=laws)
    alone = [
        decoder.generate([p], sampling=law, row_keys=[i])[0]
        for i, (p, law) in enumerate(zip(prompts[:3], laws, strict=True))
    ]
    assert [g.output_ids for g in together] == [g.output_ids for g in alone]
