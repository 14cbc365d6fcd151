"""Whatever a drafter proposes, the decoder's output is the target's own."""

import pytest
import torch
from contract_kit import CASES, KINDS, K, make, some_ids
from scipy import stats
from toy_drafters import TOYS

import draftlab.decoding.verify as verify_module
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.drafters.store import build_drafter
from draftlab.sampling import Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.targets.step import Step
from draftlab.targets.tiny import TINY_FAMILIES, build_tiny_model, tiny_target, tiny_tokenizer

PROMPTS = [some_ids(n, seed=n) for n in (1, 2, 5, 9, 14, 3, 21, 8, 30, 4)]
FALSE_ALARM = 1e-6  # of a chi-square test whose seed is fixed anyway


def decode_settings(**changes):
    data = {
        "rule": "auto",
        "num_draft_tokens": K,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "max_new_tokens": 16,
        "batch_size": 8,
        "prefill_tokens": 16,
        "ignore_eos": False,
        "seed": 0,
    }
    return parse_settings(DecodeSettings, data | changes)


def answers(target, drafter, prompts=PROMPTS, **changes):
    settings = decode_settings(**changes)
    found = Decoder(target, drafter, settings).generate(
        prompts, max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size
    )
    return [g.output_ids for g in sorted(found, key=lambda g: g.prompt_index)]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return answers(target, None, batch_size=1)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_autoregressive_token_for_token(target, plain, case, batch_size):
    assert answers(target, make(case, target), batch_size=batch_size) == plain


@pytest.mark.parametrize("family", [f for f in TINY_FAMILIES if f != "llama"])
def test_greedy_decoding_is_exact_on_every_family(family, tmp_path):
    target = tiny_target(family)
    expected = answers(target, None)
    for kind in sorted({*KINDS, *TOYS} - {"draft_model"}):
        assert answers(target, make(kind, target)) == expected, kind
    assert answers(target, small_model_as_drafter(family, target, tmp_path)) == expected


def small_model_as_drafter(family, target, folder):
    """A draft model of the target's family, loaded from a folder."""
    build_tiny_model(family, torch.float32, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    data = {
        "kind": "draft_model",
        "num_draft_tokens": K,
        "start": "pretrained",
        "model": str(folder),
        "revision": None,
        "layers": None,
        "trainable": "all",
        "lora_rank": None,
        "lora_alpha": None,
        "objective": "forward_kl",
    }
    drafter = build_drafter(parse_settings(DraftModelSettings, data), target.view)
    assert isinstance(drafter, DraftModel)
    return drafter


# ---------------------------------------------------------------- sampling

SUPPORT = 3  # top-k: the joint law of three tokens has 27 cells
LENGTH = 3
SAMPLING = Sampling(temperature=1.0, top_k=SUPPORT)
NUM_SAMPLES = 3000
PROMPT = some_ids(10, seed=4)


@pytest.fixture(scope="module")
def exact_law(target):
    """Probability of every answer of LENGTH tokens, by enumeration."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(law)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        count, width = ids.shape
        step = Step(torch.arange(count), ids, torch.zeros(count, dtype=torch.int64), live=width)
        logits = target.run(target.open_kv(count, width), step).logits[:, -1]
        probs = process(logits, SAMPLING)
        law = {
            (*prefix, token): law[prefix] * probs[i, token].item()
            for i, prefix in enumerate(prefixes)
            for token in probs[i].nonzero().squeeze(1).tolist()
        }
    return law


def p_value(target, drafter, law):
    """Chi-square of sampled answers against the exact law; rare cells are merged."""
    drawn = answers(
        target,
        drafter,
        [PROMPT] * NUM_SAMPLES,
        temperature=1.0,
        top_k=SUPPORT,
        max_new_tokens=LENGTH,
        batch_size=500,
        prefill_tokens=8192,
        ignore_eos=True,
        num_draft_tokens=LENGTH - 1 if drafter is not None else K,
    )
    counts = {answer: 0 for answer in law}
    for answer in drawn:
        counts[answer] += 1  # an answer outside the support is a KeyError
    cells = sorted(law, key=law.__getitem__)
    merged, seen, expected = [], 0, 0.0
    for cell in cells:
        seen, expected = seen + counts[cell], expected + NUM_SAMPLES * law[cell]
        if expected >= 8:
            merged.append((seen, expected))
            seen, expected = 0, 0.0
    merged[-1] = (merged[-1][0] + seen, merged[-1][1] + expected)
    observed, wanted = zip(*merged, strict=True)
    return stats.chisquare(observed, wanted).pvalue


@pytest.mark.parametrize("case", CASES)
def test_sampled_answers_follow_the_exact_law(target, exact_law, case):
    assert p_value(target, make(case, target), exact_law) > FALSE_ALARM


@pytest.mark.parametrize("case", ["draft_model", "medusa", "ngram", "toy_self"])
def test_a_correction_drawn_from_p_itself_fails_the_same_test(target, exact_law, case, monkeypatch):
    """The negative control: the classic slip must be seen, or the test above proves nothing."""
    monkeypatch.setattr(verify_module, "residual", lambda p, q: p)
    assert p_value(target, make(case, target), exact_law) < FALSE_ALARM
