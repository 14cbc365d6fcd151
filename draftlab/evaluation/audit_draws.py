"""Sampled answers of two decoders, reduced to features that a wrong law would shift.

In: two decoders and a few prompts. Out: `Draws` of each. Biases of acceptance rules live in how
likely the emitted tokens were, so places are looked at by rank: how many tokens the target held
likelier after that very prefix, in a pass of its own. Read first: compare_arms.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation
from draftlab.evaluation.audit_results import DraftCounts
from draftlab.evaluation.audit_settings import AuditSettings
from draftlab.evaluation.forced import Answer, as_ints, open_rows, prefill_prompts, run_at
from draftlab.evaluation.two_sample import FeatureTest, Surplus, compare_draws
from draftlab.sampling import Sampling, process
from draftlab.targets.target import Target

_JOINT_TOKENS = 3
_JOINT_BINS = 64
# ranks 0, 1, 2, 3-4, 5-8, 9-16, 17-64, 65 and more
_RANK_EDGES = (0, 1, 2, 4, 8, 16, 64)
_RANK_BINS = len(_RANK_EDGES) + 1
# ids looked at one by one; the others are in the last bin
_LIKELIEST = 128
_ENDED = -1

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Draws:
    """What is kept of one arm's answers, an entry an answer.

    Attributes:
        joint: bin of its prompt and first tokens together.
        ranks: of every place, the bin of its token's rank; -1 where the answer had ended.
        lengths: tokens.
        surplus: of all tokens, by rank; stays 0 where the law reads the context.
        num_drafted: draft tokens verified, of all answers.
        num_accepted: of them accepted.
        sample: the first few answers.
    """

    joint: list[int] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    surplus: Surplus = field(default_factory=lambda: _no_surplus())
    num_drafted: int = 0
    num_accepted: int = 0
    sample: list[Answer] = field(default_factory=list)

    @property
    def drafts(self) -> DraftCounts:
        """What was drafted."""
        return DraftCounts(self.num_drafted, self.num_accepted)


def draw_both(
    target: Target,
    plain: Decoder,
    drafted: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: AuditSettings,
    *,
    prefill_tokens: int,
    progress: Progress,
) -> tuple[Draws, Draws]:
    """Answer the prompts over and over, as often by one decoder as by the other.

    The number of answers does not depend on what they say, so that testing once at the end is fair.

    Args:
        target: ranks tokens.
        plain: decodes without a drafter.
        drafted: decodes with one; its seed is another than the plain one's.
        prompts: a few.
        settings: how many answers, or how long.
        prefill_tokens: prompt tokens a pass takes at most.
        progress: called with (answers or seconds done, in all).
    """
    arms = Draws(), Draws()
    began, seconds, number = time.monotonic(), 60 * settings.minutes, 0
    progress(0, settings.samples or round(seconds))
    while True:
        wanted = settings.batch_size
        if settings.samples is not None:
            wanted = min(wanted, settings.samples - number)
        keys = list(range(number, number + wanted))
        asked = [prompts[key % len(prompts)] for key in keys]
        for decoder, draws in zip((plain, drafted), arms, strict=True):
            answers = decoder.generate(
                asked,
                max_new_tokens=settings.sampled_tokens,
                batch_size=settings.batch_size,
                row_keys=keys,
            )
            _note(
                target,
                draws,
                answers,
                settings.sampled_tokens,
                plain.settings.sampling,
                prefill_tokens,
            )
        number += wanted
        spent = time.monotonic() - began
        if settings.samples is not None:
            progress(number, settings.samples)
            if number >= settings.samples:
                return arms
        else:
            progress(min(round(spent), round(seconds)), round(seconds))
            if spent >= seconds:
                return arms


def compare_arms(plain: Draws, drafted: Draws, *, alpha: float) -> tuple[FeatureTest, ...]:
    """Compare first tokens together, every place by rank, lengths, and all tokens by rank.

    Args:
        plain: answers without drafts.
        drafted: answers with drafts.
        alpha: chance of any false alarm.
    """
    features = {f"first {_JOINT_TOKENS} tokens together": (plain.joint, drafted.joint)}
    for place in range(len(plain.ranks[0])):
        mine, theirs = ([ranks[place] for ranks in arm.ranks] for arm in (plain, drafted))
        features[f"token {place + 1} by rank"] = (mine, theirs)
    features["length"] = (plain.lengths, drafted.lengths)
    surpluses = {}
    if plain.surplus.counts.any() and drafted.surplus.counts.any():
        surpluses = {"all tokens by rank, less p": (plain.surplus, drafted.surplus)}
    return compare_draws(features, surpluses, alpha=alpha)


@dataclass(frozen=True, slots=True)
class RankedToken:
    """One output token beside the target's law at its place.

    Attributes:
        bin: of its rank: tokens with a larger logit.
        bin_probs: what each bin had, in probability.
    """

    bin: int
    bin_probs: tuple[float, ...]


def rank_tokens(
    target: Target, answers: Sequence[Answer], law: Sampling, *, prefill_tokens: int
) -> list[list[RankedToken]]:
    """Rank every output token after its own prefix, all places of an answer in one pass.

    Args:
        target: the target.
        answers: (prompt, output) pairs.
        law: makes probabilities of logits; reads no context.
        prefill_tokens: prompt tokens a pass takes at most.
    """
    width = max(len(output) for _, output in answers)
    with torch.inference_mode():
        kv, answers = open_rows(target, answers, spare=max(width, prefill_tokens))
        prefill_prompts(target, kv, answers, prefill_tokens)
        logits = run_at(target, kv, answers, range(len(answers)), 0, width=width)
        padded = [[*output, *[0] * (width - len(output))] for _, output in answers]
        own = logits.gather(2, as_ints(target, padded).unsqueeze(2))
        edges = as_ints(target, list(_RANK_EDGES))
        bins = torch.bucketize((logits > own).sum(2), edges).tolist()
        likely = logits.topk(min(_LIKELIEST, logits.shape[2]), dim=2)
        # of equal logits all have the rank of the first
        ranks = torch.searchsorted(-likely.values, -likely.values)
        probs = process(logits, law).gather(2, likely.indices).double()
        shares = probs.new_zeros(*probs.shape[:2], _RANK_BINS)
        shares.scatter_add_(2, torch.bucketize(ranks, edges), probs)
        shares[..., -1] += (1 - shares.sum(2)).clamp_min(0)
    return [
        [
            RankedToken(bins[row][place], tuple(shares[row, place].tolist()))
            for place in range(len(output))
        ]
        for row, (_, output) in enumerate(answers)
    ]


def _no_surplus() -> Surplus:
    return Surplus(np.zeros(_RANK_BINS), np.zeros(_RANK_BINS), np.zeros((_RANK_BINS, _RANK_BINS)))


def _note(
    target: Target,
    draws: Draws,
    answers: Sequence[Generation],
    tokens: int,
    law: Sampling,
    prefill_tokens: int,
) -> None:
    pairs = [(g.prompt_ids, g.output_ids) for g in answers]
    # peaked laws give the same answer many times
    distinct = list(dict.fromkeys(pairs))
    found = rank_tokens(target, distinct, law.context_free, prefill_tokens=prefill_tokens)
    ranked = dict(zip(distinct, found, strict=True))
    for pair, answer in zip(pairs, answers, strict=True):
        bins = [token.bin for token in ranked[pair]]
        draws.ranks.append((*bins, *[_ENDED] * (tokens - len(bins))))
        draws.joint.append(_joint_bin(pair))
        draws.lengths.append(len(pair[1]))
        draws.num_drafted += sum(step.num_drafted for step in answer.steps)
        draws.num_accepted += sum(step.num_accepted for step in answer.steps)
    if not law.reads_context:
        draws.surplus = _add(draws.surplus, [token for pair in pairs for token in ranked[pair]])
    if not draws.sample:
        draws.sample = distinct


def _add(surplus: Surplus, tokens: Sequence[RankedToken]) -> Surplus:
    probs = np.array([token.bin_probs for token in tokens])
    counts = np.bincount([token.bin for token in tokens], minlength=_RANK_BINS)
    return Surplus(
        surplus.counts + counts,
        surplus.expected + probs.sum(0),
        surplus.covariance + np.diag(probs.sum(0)) - probs.T @ probs,
    )


def _joint_bin(answer: Answer) -> int:
    prompt, output = answer
    text = repr((prompt, output[:_JOINT_TOKENS]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % _JOINT_BINS
