"""The whole audit on a tiny target: true drafters pass, broken rules do not.

Fixed seeds. Power: the broken residual moves the law of the first drafted token by about 0.15 in
total variation; with 1,024 answers of each arm the tests find that (p below 1e-6), and the same
audit of the rule as it is accuses nobody.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import yaml

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.errors import ConfigError
from draftlab.evaluation.audit import audit_drafter
from draftlab.evaluation.audit_draws import rank_tokens
from draftlab.evaluation.audit_results import DraftCounts, report_to_json
from draftlab.evaluation.audit_seed import check_same_seed
from draftlab.evaluation.audit_settings import AuditSettings
from draftlab.reports.audit import audit_headline, audit_lines
from draftlab.sampling import Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

PROMPTS = {"copying": [[7, 8, 9, 7, 8, 9, 7], [40, 41, 40, 41]], "talking": [[60, 61, 62]]}


def decode(**changes):
    data = yaml.safe_load((conf_dir() / "decode" / "sampled.yaml").read_text())
    return DecodeSettings(**{**data, **changes})


def settings(**changes):
    small = {
        "prompts": 3,
        "max_new_tokens": 8,
        "sampled_prompts": 1,
        "sampled_tokens": 4,
        "samples": 64,
        "batch_size": 256,
    }
    data = yaml.safe_load((conf_dir() / "audit.yaml").read_text())["audit"]
    return AuditSettings(**{**data, **small, **changes})


@pytest.fixture(scope="module")
def targets():
    return {dtype: tiny_target(dtype=dtype) for dtype in (torch.float64, torch.bfloat16)}


@pytest.fixture(scope="module")
def target(targets):
    return targets[torch.float64]


def drafter_of(kind, target, **changes):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text())
    parsed = parse_settings(drafter_class(kind).settings_class, {**data, **changes})
    return build_drafter(parsed, target.view).to(dtype=target.dtype).eval()


def audited(target, kind, *, how=None, prompts=PROMPTS, changed=None, **changes):
    drafter = drafter_of(kind, target, **(changed or {}))
    return audit_drafter(target, drafter, prompts, settings(**changes), how or decode())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["ngram", "eagle3", "medusa"])
def test_a_drafter_that_was_never_trained_passes(targets, kind, dtype):
    report = audited(targets[dtype], kind)
    assert report.passes
    assert report.greedy.drafts.num_drafted > 0
    assert report.greedy.verdict.num_compared == 3
    assert report.sampled.num_draws == 64
    assert audit_headline(report).startswith("PASSED. ")


@pytest.mark.parametrize("part", ["greedy", "sampled"])
def test_a_part_without_judged_drafts_is_not_said_to_have_passed(target, part):
    report = audited(target, "ngram", samples=512)
    both = "greedy answers are the target's own; no difference in sampled answers; "
    assert both in audit_headline(report)
    idle = replace(getattr(report, part), drafts=DraftCounts(0, 0))
    told = audit_headline(replace(report, **{part: idle}))
    assert told.startswith("PASSED. ")
    assert f"the {part} part proves nothing, for no draft token was judged in it" in told
    other = {"greedy": "sampled", "sampled": "greedy"}[part]
    assert f"{other} answers" in told
    assert f"{part} answers" not in told


def test_the_headline_claims_what_was_tested_a_shift_between_ranks(target):
    """Lengths see less than a hundredth here; that says nothing of which tokens came out."""
    report = audited(target, "ngram", samples=512)
    sizes = {test.name: test.detectable_tv for test in report.sampled.tests}
    length = next(test for test in report.sampled.tests if test.name == "length")
    tests = (*report.sampled.tests, replace(length, detectable_tv=0.005))
    told = audit_headline(replace(report, sampled=replace(report.sampled, tests=tests)))
    least = min(size for name, size in sizes.items() if "by rank" in name and size is not None)
    assert f"a shift of {least:.2f} between the ranks of tokens would have been found" in told
    assert "total variation" not in told
    assert any("only inside a bin" in line for line in audit_lines(report))


def test_a_tree_passes(target):
    tree = {"kind": "static", "shape": [2, 1]}
    report = audited(target, "medusa", how=decode(tree=tree))
    assert report.passes
    assert report.sampled.rule == "without_replacement"


def test_a_greedy_walk_that_goes_one_node_too_far_is_found(target, monkeypatch):
    from draftlab.decoding.rules import exact_match

    real = exact_match.count_leading
    monkeypatch.setattr(
        exact_match,
        "count_leading",
        lambda accepted, tree: (real(accepted, tree) + 1).minimum(tree.num_nodes),
    )
    report = audited(target, "medusa", how=decode(temperature=0.0))
    assert not report.passes
    assert report.sampled is None
    assert report.greedy.verdict.num_defects > 5
    assert any(line.strip().startswith("DEFECT") for line in audit_lines(report))


@pytest.mark.parametrize("is_broken", [False, True])
def test_drawing_from_p_where_the_residual_is_due_is_found(target, monkeypatch, is_broken):
    if is_broken:
        monkeypatch.setattr("draftlab.decoding.rules.chain.residual", lambda p, q: p)
    report = audited(
        target,
        "self_speculative",
        changed={"exit_layer": 3, "num_draft_tokens": 1},
        how=decode(rule="point_mass"),
        prompts={"copying": [[40, 41, 40, 41, 40]]},
        max_new_tokens=4,
        samples=1024,
        sampled_tokens=3,
    )
    assert report.greedy.passes
    assert report.sampled.drafts.num_accepted > 200
    assert report.passes is not is_broken
    assert any(test.p_value < 1e-6 for test in report.sampled.tests) is is_broken
    assert ("do not follow the target's law" in audit_headline(report)) is is_broken


def test_a_lossy_rule_fails_by_name_however_few_answers_there_are(target):
    how = decode(rule="threshold", lossy=True, lossy_threshold=0.5)
    report = audited(target, "medusa", how=how, samples=16)
    assert not report.passes
    assert report.greedy.passes
    assert "rule=threshold is LOSSY" in audit_headline(report)
    assert any("LOSSY" in line for line in audit_lines(report))


def test_sampled_verify_gives_plain_samplings_tokens(target):
    report = audited(target, "ngram", how=decode(rule="sampled_verify"))
    check = report.sampled.same_seed
    assert check.num_identical == check.num_answers == 3
    assert report.passes


def test_a_token_that_one_seed_does_not_explain_is_a_defect(target):
    how = decode(seed=3, max_new_tokens=6)
    plain = Decoder(target, None, how).generate(PROMPTS["copying"])
    ids = list(plain[1].output_ids)
    ids[4] = (ids[4] + 1) % 250
    wrong = [plain[0], replace(plain[1], output_ids=tuple(ids))]

    def check(tolerance):
        return check_same_seed(
            target,
            plain,
            wrong,
            sampling=how.sampling,
            seed=3,
            tolerance=tolerance,
            prefill_tokens=64,
        )

    strict = check(1e-9)
    (fork,) = strict.forks
    assert (fork.prompt, fork.position, strict.num_identical) == (1, 4, 1)
    assert not strict.passes
    assert 0 < fork.distance <= 1
    assert check(1.0).passes


def test_ranks_and_their_probabilities_are_the_targets_own(target):
    answers = [((7, 8, 9), (5, 6)), ((40, 41), (1, 2, 3))]
    law = Sampling(temperature=1.0)
    found = rank_tokens(target, answers, law, prefill_tokens=8)
    for (prompt, output), tokens in zip(answers, found, strict=True):
        for place, token in enumerate(tokens):
            ids = [*prompt, *output[:place]]
            with torch.inference_mode():
                kv = target.open_kv(1, len(ids))
                step = Step(torch.tensor([0]), torch.tensor([ids]), torch.tensor([0]), len(ids))
                logits = target.run(kv, step).logits[0, -1]
            rank = int((logits > logits[output[place]]).sum())
            edges = (0, 1, 2, 4, 8, 16, 64)
            assert token.bin == sum(rank > edge for edge in edges)
            p = process(logits, law).sort(descending=True).values
            bounds = [0, 1, 2, 3, 5, 9, 17, 65, len(p)]
            expected = [float(p[a:b].sum()) for a, b in itertools.pairwise(bounds)]
            assert token.bin_probs == pytest.approx(expected, abs=1e-9)


def test_penalties_stops_and_limits_are_audited_as_they_are_decoded(target):
    how = decode(repetition_penalty=1.3, presence_penalty=0.5, min_new_tokens=3, top_k=20)
    report = audited(target, "ngram", how=how)
    assert report.passes
    assert "repetition_penalty 1.3" in report.sampled.sampling
    assert not any(test.name.startswith("all tokens") for test in report.sampled.tests)


def test_an_audit_without_drafts_says_that_it_proves_nothing(target):
    report = audited(target, "ngram", samples=8)
    none = DraftCounts(0, 0)
    empty = replace(
        report,
        greedy=replace(report.greedy, drafts=none),
        sampled=replace(report.sampled, drafts=none),
    )
    assert audit_headline(empty).startswith("PASSED, but proves nothing")


def test_the_record_is_plain_json_whatever_was_measured(target):
    report = audited(target, "ngram", samples=8)
    odd = replace(report, sampled=replace(report.sampled, worst_tv=float("nan")))
    data = json.loads(json.dumps(report_to_json(odd), allow_nan=False))
    assert data["sampled"]["worst_tv"] == "nan"
    assert data["conditions"]["dtype"] == "float64"


def test_no_prompt_is_refused(target):
    with pytest.raises(ConfigError, match="no prompt to audit on"):
        audit_drafter(target, drafter_of("ngram", target), {"a": []}, settings(), decode())
