"""A small target, heads trained on its answers for seconds, and what our own decoder does with them.

The target has 64 rows for 61 tokens, so that heads with a draft vocabulary or a mask token meet
padding rows as they do in real models. Mostly it counts on by seven; what its layers add to that is
hard to learn, so a head trained for seconds is right at every depth, but not always.
"""

from dataclasses import dataclass

import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftlab.data.batch import TokenBatch
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.randomness import Noise
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.target import build_target

ROWS, TOKENS = 64, 61
PROMPTS = [[3, 17, 40, 9, 22], [50, 2, 31, 8, 8, 60, 14], [12, 45, 33], [7, 29, 19, 55, 1, 36]]
MAX_TOKENS = 48


def make_target(head_dim):
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        # token i is mostly followed by i + 7: without that, answers fall into short circles
        words = model.model.embed_tokens.weight[:TOKENS]
        words.mul_(7.0)
        model.lm_head.weight[:TOKENS] = words.roll(7, 0)
        model.lm_head.weight[TOKENS:] = 0.0
    words = {f"t{i}": i for i in range(TOKENS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t2")),
        eos_token="t0",
        pad_token="t1",
        unk_token="t2",
    )
    return build_target(model, tokenizer, name="served", source="tiny")


def train(target, kind, *, steps, start=None, lr=3e-3, **keys):
    """Build a drafter, change its start if asked to, and train it on what the target says."""
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text())
    settings = drafter_class(kind).settings_class(**{**data, **keys})
    batch = make_batch(target)
    counts = torch.bincount(batch.input_ids[batch.loss_mask], minlength=ROWS)
    drafter = build_drafter(settings, target.view, counts, seed=1)
    if start is not None:
        start(drafter)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=lr)
    features = target.read_features(batch, drafter.needs)
    drafter.train()
    for step in range(steps):
        loss = drafter(batch, features, Noise(0, epoch=step))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    return drafter.eval()


def make_batch(target):
    """Give the answers that will be asked for, so that a head can know them by heart."""
    settings = decode_settings(max_new_tokens=MAX_TOKENS, batch_size=len(PROMPTS))
    answers = Decoder(target, None, settings).generate(PROMPTS)
    shape = (len(PROMPTS), max(map(len, PROMPTS)) + MAX_TOKENS)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    segments = torch.full(shape, -1)
    for row, answer in enumerate(answers):
        tokens = [*answer.prompt_ids, *answer.output_ids]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(answer.prompt_ids) : len(tokens)] = True
        segments[row, : len(tokens)] = 0
    order = torch.arange(shape[1]).expand(shape)
    samples = torch.where(segments == 0, torch.arange(shape[0]).unsqueeze(1), -1)
    return TokenBatch(ids, mask, torch.where(segments == 0, order, 0), segments, samples)


def decode_settings(**changes):
    data = yaml.safe_load((conf_dir() / "decode" / "greedy.yaml").read_text())
    fixed = {"ignore_eos": True, "fallback": False}
    return parse_settings(DecodeSettings, data | fixed | changes)


@dataclass(frozen=True)
class Decoded:
    """Tokens of every answer, verify steps, and how often each position was accepted."""

    tokens: list[list[int]]
    num_drafts: int
    per_position: list[int]


def decode(target, drafter, depth):
    """Decode greedily and count as vLLM does.

    Our decoder cuts the last drafts to the room that is left; vLLM does not. So ours goes on for a
    block longer, and only steps that begin before the limit are counted.
    """
    settings = decode_settings(
        num_draft_tokens=depth or None, max_new_tokens=MAX_TOKENS + depth + 1
    )
    found = Decoder(target, drafter, settings).generate(PROMPTS)
    counts, drafts = [0] * depth, 0
    for answer in found:
        known = 1  # the token that came with prefill
        for step in answer.steps:
            if known >= MAX_TOKENS:
                break
            assert step.num_drafted == depth
            drafts += 1
            for k in range(step.num_accepted):
                counts[k] += 1
            known += step.num_emitted
    tokens = [list(answer.output_ids[:MAX_TOKENS]) for answer in found]
    return Decoded(tokens, drafts, counts)
