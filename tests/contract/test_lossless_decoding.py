"""Whatever a drafter proposes, the decoder's output is the target's own."""

import pytest
import torch
import yaml
from contract_kit import CASES, KINDS, K, make, some_ids
from scipy import stats
from toy_drafters import TOYS

import draftlab.decoding.rules.chain as chain_rules
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.drafters.store import build_drafter
from draftlab.sampling import Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.step import Step
from draftlab.targets.target import build_target
from draftlab.targets.tiny import TINY_FAMILIES, build_tiny_model, tiny_target, tiny_tokenizer

PROMPTS = [some_ids(n, seed=n) for n in (1, 2, 5, 9, 14, 3, 21, 8, 30, 4)]
NUM_WORDS = 4
FALSE_ALARM = 1e-6  # of a chi-square test whose seed is fixed anyway


def decode_settings(**changes):
    data = yaml.safe_load((conf_dir() / "decode" / "greedy.yaml").read_text())
    data |= {"num_draft_tokens": K, "max_new_tokens": 16, "batch_size": 8, "prefill_tokens": 16}
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
def narrow_target():
    return make_narrow_target()


def make_narrow_target():
    """A target that says NUM_WORDS tokens only, so that drafts are often accepted and often not.

    Every embedding is large in dimension 0, which the final norm keeps, and the head's rows of all
    other tokens are far below zero there.
    """
    model = build_tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 60.0
        head = model.get_output_embeddings().weight
        head[:, 0] = -16.0
        head[:NUM_WORDS, 0] = 0.0
    return build_target(model, tiny_tokenizer(), name="narrow", source="tiny")


@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_autoregressive_token_for_token(target, case):
    expected = answers(target, None)
    assert answers(target, make(case, target)) == expected


@pytest.mark.parametrize("case", sorted({*KINDS, *TOYS}))
def test_one_row_at_a_time_gives_the_same_answers(narrow_target, case):
    prompts = [[i % NUM_WORDS for i in prompt] for prompt in PROMPTS[:5]]
    drafter = make(case, narrow_target)
    expected = answers(narrow_target, None, prompts)
    assert answers(narrow_target, drafter, prompts, batch_size=1) == expected
    assert answers(narrow_target, drafter, prompts) == expected


@pytest.mark.parametrize("family", [f for f in TINY_FAMILIES if f != "llama"])
def test_greedy_decoding_is_exact_on_every_family(family, tmp_path):
    target = tiny_target(family)
    few = {"prompts": [PROMPTS[i] for i in (0, 3, 6, 8)], "max_new_tokens": 10, "batch_size": 3}
    expected = answers(target, None, **few)
    for kind in sorted({*KINDS, *TOYS} - {"draft_model"}):
        assert answers(target, make(kind, target), **few) == expected, kind
    assert answers(target, small_model_as_drafter(family, target, tmp_path), **few) == expected


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
        "objective": "forward_kl",
        "reference": None,
        "learn_fraction": None,
        "normalise": "sequence",
    }
    drafter = build_drafter(parse_settings(DraftModelSettings, data), target.view)
    assert isinstance(drafter, DraftModel)
    return drafter


# ---------------------------------------------------------------- sampling

LENGTH = 3
SAMPLING = Sampling(temperature=2.0)
NUM_SAMPLES = 1500
PROMPT = [3, 1, 0, 1, 2, 3, 1, 0, 2, 1]


@pytest.fixture(scope="module")
def exact_law(narrow_target):
    """Probability of every answer of LENGTH words, by enumeration."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(law)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        count, width = ids.shape
        step = Step(torch.arange(count), ids, torch.zeros(count, dtype=torch.int64), live=width)
        out = narrow_target.run(narrow_target.open_kv(count, width), step)
        probs = process(out.logits[:, -1], SAMPLING)
        assert probs[:, NUM_WORDS:].sum(-1).max() < 1e-9
        law = {
            (*prefix, word): law[prefix] * probs[i, word].item()
            for i, prefix in enumerate(prefixes)
            for word in range(NUM_WORDS)
        }
    return law


def p_value(target, drafter, law, **changes):
    """Chi-square of sampled answers against the exact law; rare cells are merged."""
    settings = {
        "temperature": SAMPLING.temperature,
        "max_new_tokens": LENGTH,
        "batch_size": 500,
        "prefill_tokens": 8192,
        "ignore_eos": True,
        "num_draft_tokens": LENGTH - 1,
    }
    drawn = answers(target, drafter, [PROMPT] * NUM_SAMPLES, **settings | changes)
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


@pytest.mark.parametrize(
    "case", sorted({*KINDS, *TOYS, "medusa-reduced", "hybrid-mixed", "suffix-global"})
)
def test_sampled_answers_follow_the_exact_law(narrow_target, exact_law, case):
    assert p_value(narrow_target, make(case, narrow_target), exact_law) > FALSE_ALARM


@pytest.mark.parametrize("case", ["draft_model", "hybrid-mixed", "ngram", "toy_self"])
def test_a_correction_drawn_from_p_itself_fails_the_same_test(
    narrow_target, exact_law, case, monkeypatch
):
    """The negative control: the classic slip must be seen, or the test above proves nothing."""
    monkeypatch.setattr(chain_rules, "residual", lambda p, q: p)
    assert p_value(narrow_target, make(case, narrow_target), exact_law) < FALSE_ALARM
