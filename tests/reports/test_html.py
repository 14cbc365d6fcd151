import re
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from draftlab.evaluation.results import EvalResult
from draftlab.reports.facts import ReportInput, Sample, TrainingFacts
from draftlab.reports.html import render_html, write_report

METRICS = [
    *[{"step": s, "split": "train", "time_s": s, "train/loss": 4 - s / 50} for s in range(50)],
    {"step": 49, "split": "validation", "time_s": 50, "accept/tau": 1.4},
]
TRAINING = TrainingFacts("eagle3", 400, 5.6, 61234, 480, "built-in prompts", 400)


class Balanced(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in {"meta", "br", "link", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(text):
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def page(result):
    return render_html(ReportInput(result, (TRAINING,), METRICS, run="demo/x"))


def test_the_page_is_one_well_formed_file_with_nothing_from_elsewhere(page):
    tags = parse(page).tags
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert tags.count("svg") == 5
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "url(http" not in page
    assert "@import" not in page


def test_every_plot_is_valid_svg_and_no_id_is_used_twice_for_different_things(page):
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for svg in plots:
        ElementTree.fromstring(svg)
        assert "<style" not in svg
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', svg)) for svg in plots]
    assert sum(map(len, clips)) == len(set().union(*clips))


def test_verdict_worst_domain_conditions_and_definitions_are_there(page, result):
    for text in (
        "decodes 1.", "lowest tau", "TensorRT-LLM", "Not measured", "Q4_1, dequantised",
        "AMD EPYC 9R14", "without an interval", "Noise floor", "61,234", "temperatures above 0",
    ):  # fmt: skip
        assert text in page
    assert page.count('class="low"') == len(result.arms)


def test_domains_with_few_timed_prompts_show_a_marked_ratio_without_interval(page):
    assert re.search(r"\d\.\d\dx \*\s*<small>n = 3</small>", page)


def test_hostile_text_is_shown_and_never_run(result):
    evil = "<script>alert('x')</script> $\\frac{1}{2}$ & \"q\""
    arm = result.arms[1]
    domains = (replace(arm.domains[0], domain=evil), *arm.domains[1:])
    details = {**result.conditions.details, "target": {"name": evil, "dtype": evil}}
    hostile = replace(
        result,
        suite=evil,
        arms=(replace(arm, name=evil, domains=domains),),
        conditions=replace(result.conditions, details=details),
    )
    given = ReportInput(
        hostile,
        (replace(TRAINING, drafter=evil, data=evil),),
        METRICS,
        (Sample(evil, evil, evil),),
        run=evil,
        pending=(evil,),
        provenance={"command": shlex.join(["draftlab", evil]), "time": evil},
    )
    page = render_html(given)
    assert "script" not in parse(page).tags
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 10


def test_no_prompt_or_answer_is_shown_unless_asked(result):
    sample = Sample("chat", "tell me a secret", "the secret is 42")
    assert "secret" not in render_html(ReportInput(result))
    shown = render_html(ReportInput(result, samples=(sample,)))
    assert "the secret is 42" in shown


def test_the_report_is_valid_after_the_first_stage_alone(result, ngram_arm):
    first = EvalResult(result.format, result.suite, result.conditions, (ngram_arm,), None)
    page = render_html(ReportInput(first, pending=("eagle3",)))
    assert parse(page).tags.count("svg") == 4
    assert "eagle3: still to be trained or measured." in page
    assert "noise floor" in page


def test_a_result_without_speed_audit_or_choice_still_makes_a_report(result, eagle_arm):
    domains = tuple(replace(d, speed=None) for d in eagle_arm.domains)
    bare = replace(eagle_arm, speed=None, audit=None, choice=None, domains=domains)
    page = render_html(ReportInput(replace(result, arms=(bare,), noise_floor=None)))
    parse(page)
    assert "not audited" in page
    assert "Speed of eagle3." in page


def test_both_files_are_written(result, tmp_path):
    html, markdown = write_report(tmp_path, ReportInput(result))
    assert html.read_text().startswith("<!doctype html>")
    text = markdown.read_text()
    assert text.startswith(
        "# Speculative decoding of SmolLM2-135M-Instruct (Q4\\_1, dequantised)\n\nsuite domains · "
    )
    assert "| **eagle3" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_the_same_input_gives_the_same_page(result):
    assert render_html(ReportInput(result)) == render_html(ReportInput(result))


def test_importing_reports_loads_no_heavy_package():
    code = (
        "import sys, draftlab.reports.html;"
        "print([m for m in ('torch', 'matplotlib', 'scipy', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
