"""A draft model of the T5 family for a target of it: output is the target's own, token for token."""

from dataclasses import dataclass

import pytest
import torch
from scipy import stats
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from draftlab.data.batch import TokenBatch
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.verify import verify_exact_match, verify_speculative
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.draft_model import DraftModel, DraftModelSettings
from draftlab.errors import ConfigError, NotExportable, UnsupportedTarget
from draftlab.randomness import Noise, uniforms
from draftlab.sampling import GREEDY, Sampling, greedy_ids, process
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose
from draftlab.targets.encoder_decoder import build_encoder_decoder
from draftlab.targets.features import TargetFeatures
from draftlab.targets.step import Step
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

K = 3
PROMPTS = [[5, 9, 77, 30, 12], [3], [200, 4, 4, 18, 90, 41, 6, 6, 6], [150, 22]]
SAMPLED = Sampling(temperature=1.0, top_k=3)


def tiny_model(seed=0, noise=0.0, **sizes):
    tokenizer = tiny_tokenizer()
    entries = {"vocab_size": 261, "d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2}
    entries |= {"num_heads": 4, "relative_attention_num_buckets": 8}
    entries |= {"relative_attention_max_distance": 12, "feed_forward_proj": "gated-gelu"}
    entries |= {"decoder_start_token_id": 257, "pad_token_id": 257}
    entries |= {"eos_token_id": tokenizer.eos_token_id, "tie_word_embeddings": False} | sizes
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **entries)).double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.mul_(8.0)
            if name.endswith((".o.weight", ".wo.weight")):
                weight.mul_(12.0)  # or every answer would repeat its first token
            scale = noise * weight.std() if weight.numel() > 1 else 0.0
            weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        model.get_output_embeddings().weight.mul_(0.5)
    return model.eval()


@pytest.fixture(scope="module")
def target():
    return build_encoder_decoder(tiny_model(), tiny_tokenizer(), name="t5", source="tiny")


def settings(folder, **changes):
    data = {"kind": "draft_model", "num_draft_tokens": K, "start": "pretrained"}
    data |= {"model": str(folder), "revision": None, "layers": None, "trainable": "all"}
    data |= {"objective": "forward_kl"}
    data |= {"normalise": "sequence", "reference": None, "learn_fraction": None}
    return parse_settings(DraftModelSettings, data | changes)


def draft_with(folder, target, **choices):
    tiny_model(**choices).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return DraftModel(settings(folder), target.view).to(torch.float64).eval()


@dataclass
class Rounds:
    """Plays the decoder by hand: draft, verify, commit, for rows of their own lengths."""

    target: object
    drafter: object
    prompts: list
    sampling: Sampling = GREEDY
    seed: int = 0

    def __post_init__(self):
        count = len(self.prompts)
        self.rows = torch.arange(count)
        self.kv = self.target.open_kv(count, 48)
        with torch.inference_mode():
            self.state = self.drafter.open(count, 48, self.kv)
        starts = self.target.encode(self.kv, list(range(count)), self.prompts)
        self.texts = [list(start) for start in starts]
        self.accepted = []

    def play(self, turn):
        draws = uniforms(self.seed, self.rows.unsqueeze(1), torch.arange(K), turn, 1)
        budget = DraftBudget(self.rows, K, self.sampling)
        with torch.inference_mode():
            tree = self.change(self.drafter.propose(self.state, budget, draws))
        base = torch.tensor([len(text) - 1 for text in self.texts])
        anchors = torch.tensor([text[-1] for text in self.texts]).unsqueeze(1)
        ids = torch.cat([anchors, tree.tokens], dim=1)
        step = Step(self.rows, ids, base, int(base.max()) + K + 1)
        logits = self.target.run(self.kv, step).logits
        if self.sampling.is_greedy:
            verdict = verify_exact_match(tree, greedy_ids(logits))
        else:
            verdict = verify_speculative(
                tree,
                process(logits, self.sampling),
                accept_uniforms=uniforms(
                    self.seed, self.rows.unsqueeze(1), torch.arange(K), turn, 2
                ),
                next_uniforms=uniforms(self.seed, self.rows, turn, 3),
            )
        counts = verdict.num_accepted.tolist()
        self.accepted += counts
        next_ids = torch.cat([tree.tokens, tree.tokens[:, :1]], dim=1)
        next_ids.scatter_(1, verdict.num_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1))
        lengths = verdict.num_accepted + 1
        with torch.inference_mode():
            seen = Observation(self.rows, ids, lengths, next_ids, None, None)
            self.drafter.observe(self.state, seen)
        for text, new, count in zip(self.texts, next_ids.tolist(), counts, strict=True):
            text.extend(new[: count + 1])

    def change(self, tree):
        return tree


@torch.no_grad()
def greedy(target, prompt, count):
    text = [target.model.config.decoder_start_token_id]
    for _ in range(count):
        logits = target.model(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([text])
        ).logits
        text.append(int(logits[0, -1].argmax()))
    return text


@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0], ids=["twin", "near", "far"])
def test_greedy_answers_are_the_targets_own_whatever_the_draft(target, tmp_path, noise):
    drafter = draft_with(tmp_path, target, noise=noise)
    rounds = Rounds(target, drafter, PROMPTS)
    for turn in range(6):
        rounds.play(turn)
    for prompt, text in zip(PROMPTS, rounds.texts, strict=True):
        assert text == greedy(target, prompt, len(text) - 1)
    assert len({token for text in rounds.texts for token in text}) > 8
    # the first round runs without a draft, for nothing has been observed yet
    rate = sum(rounds.accepted[4:]) / (len(rounds.accepted[4:]) * K)
    assert {0.0: rate == 1.0, 0.1: 0.1 < rate < 0.9, 3.0: rate < 0.1}[noise], rate


def test_the_prompt_is_encoded_once_and_again_for_the_next_sequence(target, tmp_path, monkeypatch):
    drafter = draft_with(tmp_path, target)
    inner = drafter._encoder_decoder
    calls = []
    encode = inner.door.encode
    monkeypatch.setattr(
        inner.door, "encode", lambda prompts: calls.append(prompts) or encode(prompts)
    )
    rounds = Rounds(target, drafter, PROMPTS[:2])
    for turn in range(4):
        rounds.play(turn)
    assert sorted(tuple(p) for prompts in calls for p in prompts) == sorted(map(tuple, PROMPTS[:2]))
    drafter.close(rounds.state, torch.tensor([1]))
    rounds.texts[1] = list(target.encode(rounds.kv, [1], [PROMPTS[2]])[0])
    calls.clear()
    for turn in range(4, 8):
        rounds.play(turn)
    assert calls == [[PROMPTS[2]]]
    assert rounds.texts[1] == greedy(target, PROMPTS[2], len(rounds.texts[1]) - 1)
    assert rounds.texts[0] == greedy(target, PROMPTS[0], len(rounds.texts[0]) - 1)


def test_drafts_are_drawn_from_the_draft_models_own_law(target, tmp_path):
    """Uniforms at interval midpoints: counts are the law's to 1 / rows."""
    drafter = draft_with(tmp_path, target, seed=4)
    rows = 200
    rounds = Rounds(target, drafter, [PROMPTS[0]] * rows, Sampling(temperature=1.0))
    text = [257, 9, 30]
    ids = torch.tensor([text[:-1]] * rows)
    with torch.inference_mode():
        drafter.observe(
            rounds.state,
            Observation(
                rounds.rows,
                ids,
                torch.full((rows,), 2),
                torch.tensor([text[1:]] * rows),
                None,
                None,
            ),
        )
        middle = ((torch.arange(rows, dtype=torch.float64) + 0.5) / rows).unsqueeze(1)
        budget = DraftBudget(rounds.rows, 1, Sampling(temperature=1.0))
        tree = drafter.propose(rounds.state, budget, middle)
    with torch.no_grad():
        logits = drafter.model(
            input_ids=torch.tensor(PROMPTS[:1]), decoder_input_ids=torch.tensor([text])
        ).logits
    exact = logits[0, -1].softmax(-1)
    assert torch.allclose(tree.law_probs[0, 0], exact, atol=1e-9)
    counts = torch.bincount(tree.tokens[:, 0], minlength=261) / rows
    assert float((counts - exact).abs().max()) <= 1.01 / rows


class Lying(Rounds):
    """Reports the law at twice the temperature it drew at."""

    def change(self, tree):
        law = tree.law_probs.sqrt()
        law = law / law.sum(-1, keepdim=True)
        return type(tree)(tree.tokens, tree.parents, tree.num_nodes, law, tree.law_ids)


@torch.no_grad()
def exact_law(target, prompt, length):
    """The law of the first tokens of an answer, all of them: top-k keeps three a place."""
    law = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor([[257, *text] for text in law])
        prompts = torch.tensor([prompt] * len(law))
        logits = target.model(input_ids=prompts, decoder_input_ids=texts).logits[:, -1]
        probs = process(logits, SAMPLED)
        law = {
            (*text, token): mass * float(probs[i, token])
            for i, (text, mass) in enumerate(law.items())
            for token in probs[i].nonzero().flatten().tolist()
        }
    return law


def p_value(rounds, law, length):
    """Chi-square of the sampled answers against the law; cells below 8 are merged."""
    for turn in range(length):
        rounds.play(turn)
    counts = dict.fromkeys(law, 0)
    for text in rounds.texts:
        counts[tuple(text[1 : length + 1])] += 1
    merged, seen, expected = [], 0, 0.0
    for cell in sorted(law, key=law.__getitem__):
        seen, expected = seen + counts[cell], expected + len(rounds.texts) * law[cell]
        if expected >= 8:
            merged.append((seen, expected))
            seen, expected = 0, 0.0
    merged[-1] = (merged[-1][0] + seen, merged[-1][1] + expected)
    observed, wanted = zip(*merged, strict=True)
    return stats.chisquare(observed, wanted).pvalue


def test_sampled_answers_follow_the_exact_law_and_a_wrong_law_is_seen(target, tmp_path):
    """1,500 answers of 3 tokens, 27 cells: a law off by 5 % in TV would fail at this level."""
    drafter = draft_with(tmp_path, target, noise=0.1)
    law = exact_law(target, PROMPTS[0], 3)
    assert len(law) == 27
    many = [PROMPTS[0]] * 1500
    assert p_value(Rounds(target, drafter, many, SAMPLED, seed=1), law, 3) > 1e-6
    assert p_value(Lying(target, drafter, many, SAMPLED, seed=1), law, 3) < 1e-6


def test_it_is_used_as_it_is(target, tmp_path):
    drafter = draft_with(tmp_path, target)
    assert not [p for p in drafter.parameters() if p.requires_grad]
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    batch = TokenBatch(zeros, zeros > 0, zeros, zeros, zeros)
    with pytest.raises(ConfigError, match="nothing to train"):
        drafter(batch, TargetFeatures(None, None), Noise(0))
    with pytest.raises(NotExportable, match="give the engine its folder"):
        drafter.serving_weights()


def test_pairs_that_do_not_fit_are_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="start=layers serves targets of the types"):
        DraftModel(settings(None, start="layers", model=None), target.view)
    build_tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="name of a sequence-to-sequence language model"):
        DraftModel(settings(tmp_path), target.view)
    from draftlab.drafters.hetero import Hetero, HeteroSettings

    data = {"kind": "hetero", "num_draft_tokens": K, "model": str(tmp_path)}
    chosen = parse_settings(HeteroSettings, data | {"revision": None, "method": "tli"})
    with pytest.raises(UnsupportedTarget, match="pass drafter=draft_model"):
        Hetero(chosen, target.view)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("rule", ["auto", "sampled_verify"])
def test_the_decoder_answers_as_the_target_alone_does(target, tmp_path, batch_size, rule):
    drafter = draft_with(tmp_path, target, noise=0.1)
    words = [f"decode.rule={rule}"]
    if rule == "sampled_verify":
        words += ["decode.temperature=1.0", "decode.top_k=3"]
    given = parse_settings(DecodeSettings, compose("generate", words).data["decode"])
    answers = Decoder(target, drafter, given).generate(
        PROMPTS, max_new_tokens=12, batch_size=batch_size
    )
    plain = Decoder(target, None, given).generate(PROMPTS, max_new_tokens=12)
    assert [a.output_ids for a in answers] == [a.output_ids for a in plain]
    assert [list(a.prompt_ids) for a in answers] == PROMPTS
    assert sum(step.num_accepted for a in answers for step in a.steps) > 0
    if rule == "auto":
        for answer, prompt in zip(plain, PROMPTS, strict=True):
            ours = list(answer.output_ids)
            assert ours == greedy(target, prompt, len(ours))[1:]
