"""What a lossy rule made is called LOSSY wherever its figures stand."""

from dataclasses import replace

import pytest
import torch

from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.ngram import Ngram, NgramSettings
from draftlab.evaluation.conditions import describe_law
from draftlab.evaluation.files import read_eval
from draftlab.evaluation.results import Estimate, result_from_json, result_to_json
from draftlab.evaluation.settings import EvalSettings
from draftlab.evaluation.suite import evaluate
from draftlab.reports.compare import compare
from draftlab.reports.facts import ReportInput
from draftlab.reports.html import render_html
from draftlab.reports.markdown import render_markdown
from draftlab.reports.words import verdict
from draftlab.targets.tiny import tiny_target
from tests.evaluation.shipped import settings_from


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    target = tiny_target()
    drafter = Ngram(settings_from(NgramSettings, "drafter/ngram.yaml"), target.view)
    generator = torch.Generator().manual_seed(0)
    prompts = {"chat": [torch.randint(0, 250, (6,), generator=generator).tolist()] * 2}
    folder = tmp_path_factory.mktemp("eval")
    result = evaluate(
        target,
        {"ngram": drafter},
        prompts,
        settings_from(EvalSettings, "eval/smoke.yaml", max_new_tokens=6, speed_max_new_tokens=6),
        settings_from(
            DecodeSettings,
            "decode/sampled.yaml",
            rule="threshold",
            lossy=True,
            lossy_threshold=0.5,
        ),
        folder=folder,
    )
    return result, folder


def faster(result):
    """The same evaluation as if the drafter had been fast, on a machine that was calm."""
    (arm,) = result.arms
    quick = replace(arm.speed, speedup=Estimate(1.8, 1.7, 1.9, 36, "t"))
    return replace(result, arms=(replace(arm, speed=quick),), noise_floor=None)


def test_the_arm_says_so_in_its_name_and_in_every_file(evaluated):
    result, folder = evaluated
    (arm,) = result.arms
    assert (arm.name, arm.is_lossy) == ("ngram (LOSSY)", True)
    assert {row["arm"] for row in read_eval(folder).answers} == {"ngram (LOSSY)", "baseline"}
    assert result_from_json(result_to_json(result)) == result


def test_a_result_without_the_word_is_of_an_exact_rule(evaluated):
    data = result_to_json(evaluated[0])
    del data["arms"][0]["is_lossy"]
    assert not result_from_json(data).arms[0].is_lossy


def test_a_fast_lossy_drafter_is_no_lossless_speedup(evaluated):
    told = verdict(faster(evaluated[0]))
    assert told.headline.startswith("LOSSY, not a lossless speedup: ngram (LOSSY) decodes 1.80x")
    assert "do not have the target's law" in told.headline
    assert told.tone == "mixed"
    assert any("lossless: NO, the rule is LOSSY" in line for line in told.lines)


def test_both_reports_and_the_comparison_say_it(evaluated):
    result, folder = evaluated
    given = ReportInput(result=result)
    for text in (render_markdown(given), render_html(given)):
        assert "LOSSY, not a lossless speedup" in text
        assert "ngram (LOSSY)" in text
    table = compare(read_eval(folder), read_eval(folder))
    assert table.rows[0].cells[0].text.startswith("ngram (LOSSY): tau")
    assert "not lossless" in table.remarks[-1]


def test_the_law_is_told_in_words_and_what_is_off_is_left_out():
    how = settings_from(
        DecodeSettings, "decode/sampled.yaml", top_k=20, presence_penalty=0.5, stop=["x"]
    )
    assert describe_law(how) == "temperature 1, top_k 20, presence_penalty 0.5, stop ['x']"
    greedy = settings_from(DecodeSettings, "decode/greedy.yaml")
    assert describe_law(greedy) == "temperature 0 (greedy)"


def test_penalties_are_conditions_of_an_evaluation(evaluated):
    from draftlab.evaluation.conditions import describe_conditions

    settings = settings_from(EvalSettings, "eval/smoke.yaml")
    plain = settings_from(DecodeSettings, "decode/greedy.yaml")
    target, prompts = tiny_target(), {"chat": [[1, 2]]}
    before = describe_conditions(target, prompts, settings, plain).comparable
    changes = {"repetition_penalty": 1.2, "logit_bias": {3: float("-inf")}, "min_new_tokens": 2}
    changed = plain.model_copy(update={**changes, "stop": ["."]})
    after = describe_conditions(target, prompts, settings, changed).comparable
    assert {key for key in after if after[key] != before.get(key)} == {*changes, "stop"}
