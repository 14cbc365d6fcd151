"""What a reduced draft vocabulary costs, by domain, before a step is trained."""

import logging

import torch

from draftlab.cli.collect import Collected
from draftlab.data.packing import PackedRow, Sample, collate
from draftlab.drafters.vocab import DraftVocab, describe_coverage, measure_coverage
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.target import Target

log = logging.getLogger(__name__)

_SAMPLES_A_DOMAIN = 8
_JUDGED_A_DOMAIN = 256


def report_vocab(vocab: DraftVocab | None, target: Target, collected: Collected) -> None:
    """Log coverage and acceptance ceiling of a reduced draft vocabulary; nothing for a whole one.

    The target's own law is looked at for a few answers of every domain.
    """
    if vocab is None or vocab.size == vocab.target_vocab_size:
        return
    by_domain: dict[str, list[Sample]] = {}
    for sample in collected.samples:
        if sample.num_learned:
            by_domain.setdefault(sample.domain, []).append(sample)
    learned = {name: _learned(samples) for name, samples in by_domain.items()}
    judges = {}
    for name, samples in by_domain.items():
        stride = max(1, len(samples) // _SAMPLES_A_DOMAIN)
        some = [_judges(sample, target, collected) for sample in samples[::stride]]
        judges[name] = torch.cat(some[:_SAMPLES_A_DOMAIN])[:_JUDGED_A_DOMAIN]
    coverage = measure_coverage(vocab, target.view, learned, judges)
    log.info("%s", describe_coverage(vocab, coverage))


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
