"""A made-up evaluation with the shape of a real one."""

import random
from dataclasses import replace

import pytest

from draftlab.decoding.records import Generation, StepRecord
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.evaluation.results import (
    FORMAT,
    ArmResult,
    AuditVerdict,
    Conditions,
    DomainResult,
    Estimate,
    EvalResult,
    LengthChoice,
    LengthOption,
)
from draftlab.evaluation.speed import Timing, compute_speed

DOMAINS = (
    "chat", "coding", "math", "reasoning", "question answering", "summarization", "extraction",
    "tool calls", "translation", "writing", "role-play", "multilingual",
)  # fmt: skip


def made_up_generation(rng, index, rate, depth, step_s, draft_s):
    steps, tokens = [], [rng.randrange(9000)]
    while len(tokens) < 96:
        accepted = 0
        while accepted < depth and rng.random() < rate:
            accepted += 1
        emitted = min(accepted + 1, 96 - len(tokens))
        tokens += [rng.randrange(9000) for _ in range(emitted)]
        noise = rng.uniform(0.97, 1.04)
        steps.append(
            StepRecord(depth, accepted, emitted, (), draft_s * noise, step_s * noise, 3e-4, 1)
        )
    decode_s = sum(s.draft_s + s.verify_s + s.commit_s for s in steps) * 1.01
    return Generation(
        index, (1, 2, 3), tuple(tokens), "length", tuple(steps), rng.uniform(0.03, 0.05), decode_s
    )


def made_up_arm(name, kind, rate, depth, step_s, draft_s, domains=DOMAINS, seed=0):
    rng = random.Random(seed)
    answers, timings, results = {}, [], []
    place = 0
    for d, domain in enumerate(domains):
        own = max(0.05, rate - 0.035 * d)
        answers[domain] = [
            made_up_generation(rng, i, own * rng.uniform(0.8, 1.2), depth, step_s, draft_s)
            for i in range(12)
        ]
        for g in answers[domain][:3]:
            plain = made_up_generation(rng, place, 0.0, 0, 0.0128, 0.0)
            for arm, one in ((name, g), ("baseline", plain)):
                timings.append(Timing(arm, place, 0, one.first_token_s + one.decode_s, one))
            place += 1
        own_prompts = range(place - 3, place)
        results.append(
            DomainResult(
                domain,
                compute_acceptance(answers[domain], seed=0, num_draws=200),
                compute_speed(timings, arm=name, baseline="baseline", prompts=own_prompts),
            )
        )
    speed = compute_speed(timings, arm=name, baseline="baseline")
    return ArmResult(
        name=name,
        kind=kind,
        num_parameters=0 if kind == "ngram" else 9_700_000,
        num_draft_tokens=depth,
        choice=LengthChoice(
            depth,
            tuple(
                LengthOption(
                    k, 1 + rate * k / (k + 1), step_s + k * draft_s / depth, 80.0 - abs(k - depth)
                )
                for k in (1, 2, 3, 4, 6)
            ),
            12,
            "by hand",
        ),
        acceptance=compute_acceptance(
            [g for gs in answers.values() for g in gs], seed=0, num_draws=200
        ),
        speed=replace(speed, num_identical=36),
        audit=AuditVerdict(True, 36, 3456, 3456, 0, 0, 0.0, True, 0.0, 36, 36, None, ()),
        domains=tuple(results),
    )


CONDITIONS = Conditions(
    {
        "target": "SmolLM2-135M-Instruct", "weights": "3f" * 32, "quantisation": "Q4_1, dequantised",
        "dtype": "bfloat16", "kernels": "fused, packed weights", "device": "cpu",
        "cpu": "AMD EPYC 9R14", "gpus": [], "threads": 2, "prompts_sha256": "ab" * 32,
        "domains": dict.fromkeys(DOMAINS, 12), "temperature": 0.0, "top_k": None, "top_p": None,
        "min_p": None, "ignore_eos": False, "max_new_tokens": 128, "batch_size": 12,
        "speed_prompts_per_domain": 3, "speed_max_new_tokens": 96,
    },
    {
        "baseline": "the same target decoding one token a step in the same process",
        "target": {"name": "SmolLM2-135M-Instruct", "source": "gguf", "dtype": "bfloat16",
                   "quantisation": "Q4_1, dequantised"},
        "machine": {"system": "Linux x86_64", "cores": 2},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0"},
        "eval": {"warmup_prompts": 3, "repeats": 1, "seed": 0},
        "rows_bitwise_equal": True,
    },
)  # fmt: skip


@pytest.fixture(scope="session")
def ngram_arm():
    return made_up_arm("ngram", "ngram", 0.32, 4, 0.0152, 0.0001, seed=1)


@pytest.fixture(scope="session")
def eagle_arm():
    return made_up_arm("eagle3", "eagle3", 0.68, 3, 0.0149, 0.0021, seed=2)


@pytest.fixture(scope="session")
def result(ngram_arm, eagle_arm):
    noise = Estimate(1.002, 0.991, 1.013, 36, "t")
    return EvalResult(FORMAT, "domains", CONDITIONS, (ngram_arm, eagle_arm), noise)
