"""Evaluations of draft trees: a tree of N nodes has fewer levels than nodes."""

from dataclasses import replace

import pytest
import torch

from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.medusa import Medusa, MedusaSettings
from draftlab.errors import ConfigError
from draftlab.evaluation import suite
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.evaluation.files import Evaluation
from draftlab.evaluation.results import differing_drafts, merge
from draftlab.evaluation.settings import EvalSettings
from draftlab.evaluation.suite import evaluate
from draftlab.reports.compare import compare
from draftlab.reports.facts import ReportInput
from draftlab.reports.page import build_page
from draftlab.targets.tiny import tiny_target
from tests.evaluation.scripted import generation, step
from tests.evaluation.shipped import settings_from


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def medusa(target):
    settings = settings_from(MedusaSettings, "drafter/medusa.yaml")
    return Medusa(settings, target.view).to(target.dtype).eval()


def run(target, medusa, **decode):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (n + 3,), generator=generator).tolist() for n in range(4)]
    settings = settings_from(
        EvalSettings,
        "eval/smoke.yaml",
        prompts_per_domain=4,
        max_new_tokens=10,
        speed_prompts_per_domain=2,
        speed_max_new_tokens=8,
        draft_lengths=(),
    )
    greedy = settings_from(DecodeSettings, "decode/greedy.yaml", **decode)
    return evaluate(target, {"medusa": medusa}, {"chat": prompts}, settings, greedy)


TREE = {"kind": "static", "shape": [3, 2]}


@pytest.fixture(scope="module")
def of_tree(target, medusa):
    """Widths that audits were asked for, and a result: 3 + 6 nodes in 2 levels."""
    asked, real = [], suite.audit

    def watch(*args, **rest):
        asked.append(rest["draft_width"])
        return real(*args, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "audit", watch)
        return asked, run(target, medusa, tree=TREE)


def test_records_of_a_tree_count_nodes_and_its_figures_end_at_its_levels():
    answers = [generation([step(9, 2), step(9, 0)])]
    stats = compute_acceptance(answers, seed=0, depth=2)
    assert [e.value for e in stats.survival] == [0.5, 0.5]
    assert [e.value for e in stats.alpha] == [0.5, 1.0]
    # a chain that was cut short has no more depths than it drafted
    assert len(compute_acceptance([generation([step(1, 0)])], seed=0, depth=4).survival) == 1


def test_depth_nodes_and_the_width_of_the_audit_are_those_that_ran(of_tree):
    widths, result = of_tree
    arm = result.arms[0]
    assert (arm.num_draft_tokens, arm.num_nodes, widths) == (2, 9, [9])
    assert len(arm.acceptance.survival) == len(arm.acceptance.alpha) == 2
    assert {len(domain.acceptance.survival) for domain in arm.domains} == {2}


def test_the_report_says_shape_rule_and_nodes(of_tree):
    page = build_page(ReportInput(result=of_tree[1]))
    told = dict(page.conditions)
    assert told["drafts"] == "medusa K = 2, 9 nodes"
    assert told["shape of drafts"] == "static tree, shape [3, 2]"
    assert told["acceptance rule"] == "auto: the best exact one"
    assert page.domains[0].title == "medusa, K = 2, 9 nodes"


def test_the_report_says_what_cuts_and_rests_drafts(target, medusa):
    told = dict(
        build_page(
            ReportInput(result=run(target, medusa, fallback=True, num_draft_tokens=3))
        ).conditions
    )
    assert told["shape of drafts"] == "chain"
    assert "plain decoding" in told["fallback"]
    assert told["drafts"] == "medusa K = 3"


def test_a_tree_and_a_chain_are_compared_with_a_word_but_not_merged(target, medusa, of_tree):
    chain, tree = run(target, medusa), of_tree[1]
    assert differing_drafts(chain, tree) == [
        "tree: None against {'kind': 'static', 'shape': [3, 2]}"
    ]
    table = compare(Evaluation(chain, ()), Evaluation(tree, ()))
    assert any(remark.startswith("Drafted differently: tree") for remark in table.remarks)
    with pytest.raises(ConfigError, match="tree: None against"):
        merge(chain, tree)


def test_results_from_before_shapes_were_noted_stay_comparable(of_tree):
    tree = of_tree[1]
    old = {k: v for k, v in tree.conditions.details.items() if k not in ("tree", "fallback")}
    older = replace(tree, conditions=replace(tree.conditions, details=old))
    assert differing_drafts(older, tree) == []
    merge(older, tree)
    assert "shape of drafts" not in dict(build_page(ReportInput(result=older)).conditions)
