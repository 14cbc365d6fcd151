"""Coverage and acceptance ceiling are told before the first step."""

import logging

import torch

from draftlab.cli.collect import Collected
from draftlab.cli.vocab_report import report_vocab
from draftlab.data.packing import Sample
from draftlab.drafters.vocab import DraftVocab
from draftlab.targets.tiny import tiny_target


def collected():
    samples = []
    for number, domain in enumerate(["chat", "chat", "code"]):
        ids = torch.randint(100 * (domain == "code"), 200, (20,))
        samples.append(Sample(number, domain, ids, torch.arange(20) >= 5))
    return Collected(samples, None, {}, {})


def test_every_domain_has_its_line_with_the_targets_own_ceilings(caplog):
    target = tiny_target(num_hidden_layers=2)
    vocab = DraftVocab(torch.arange(100), target.spec.vocab_size)
    with caplog.at_level(logging.INFO, "draftlab"):
        report_vocab(vocab, target, collected())
    lines = [line.split() for line in caplog.text.splitlines()]
    code = next(line for line in lines if line[:2] == ["code", "15"])
    assert code[2] == "0.0"
    assert "-" not in code
    assert any(line[:2] == ["all", "45"] for line in lines)
    assert "long tail" in caplog.text


def test_a_whole_vocabulary_has_nothing_to_tell(caplog):
    with caplog.at_level(logging.INFO, "draftlab"):
        report_vocab(None, tiny_target(num_hidden_layers=2), collected())
    assert caplog.text == ""
