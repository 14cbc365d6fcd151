"""What a reduced draft vocabulary costs, by domain, before a step is trained."""

import logging

import torch

from draftlab.cli.collect import Collected, count_tokens
from draftlab.data.packing import PackedRow, Sample, collate
from draftlab.drafters.vocab import DraftVocab, describe_coverage, measure_coverage, vocab_for
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.target import Target

log = logging.getLogger(__name__)

_SAMPLES_A_DOMAIN = 8
_JUDGED_A_DOMAIN = 256
_HELD_OF = 8  # one answer of so many is left out of the choice, to be measured on


def report_vocab(
    vocab: DraftVocab | None, target: Target, collected: Collected, *, is_chosen_here: bool
) -> None:
    """Log coverage and acceptance ceiling of a reduced draft vocabulary; nothing for a whole one.

    The words a vocabulary was chosen by are nearly all in it, and say little of those to come. So
    one chosen here is not measured itself, but its like: chosen from most of the answers, measured
    on the rest. The target's own law is looked at for a few answers of every domain.

    Args:
        vocab: the drafter's.
        target: whose answers they are.
        collected: what is trained on.
        is_chosen_here: whether it was chosen from these very answers, not brought by a drafter.
    """
    if vocab is None or vocab.size == vocab.target_vocab_size:
        return
    by_domain: dict[str, list[Sample]] = {}
    for sample in collected.samples:
        if sample.num_learned:
            by_domain.setdefault(sample.domain, []).append(sample)
    note = ""
    if is_chosen_here:
        held = {name: samples[::_HELD_OF] for name, samples in by_domain.items()}
        rest = [s for samples in by_domain.values() for i, s in enumerate(samples) if i % _HELD_OF]
        if rest:
            counts = count_tokens(rest, vocab.target_vocab_size)
            vocab = vocab_for(target.drafter_view, vocab.size, counts)
            by_domain, num_held = held, sum(map(len, held.values()))
            note = (
                f"\n  measured on {num_held:,} answers, by a vocabulary of this size chosen from "
                f"the other {len(rest):,}; the drafter's is chosen from all"
            )
    learned = {name: _learned(samples) for name, samples in by_domain.items()}
    judges = {}
    for name, samples in by_domain.items():
        stride = max(1, len(samples) // _SAMPLES_A_DOMAIN)
        some = [_judges(sample, target, collected) for sample in samples[::stride]]
        judges[name] = torch.cat(some[:_SAMPLES_A_DOMAIN])[:_JUDGED_A_DOMAIN]
    coverage = measure_coverage(vocab, target.view, learned, judges)
    log.info("%s%s", describe_coverage(vocab, coverage), note)


def _learned(samples: list[Sample]) -> Tensor:
    return torch.cat([sample.ids[1:][sample.mask[1:]] for sample in samples])


def _judges(sample: Sample, target: Target, collected: Collected) -> Float[Tensor, "M D"]:
    """Give the final hidden states that predict learned tokens, a share of a long answer's."""
    captured = collected.captured
    if captured is not None and captured.wants_final:
        final = sample.load_features()[1]
    else:
        batch = collate([PackedRow((sample,))])
        final = target.read_features(batch, FeatureRequest(wants_final=True)).final
        final = None if final is None else final[0].cpu()
    assert final is not None, "asked for, so given"
    rows = final[:-1][sample.mask[1:]]
    return rows[:: max(1, _SAMPLES_A_DOMAIN * len(rows) // _JUDGED_A_DOMAIN)]
