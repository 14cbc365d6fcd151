"""Coverage and acceptance ceiling are told before the first step."""

import logging

import torch

from draftlab.cli.collect import Collected, count_tokens
from draftlab.cli.vocab_report import report_vocab
from draftlab.data.packing import Sample
from draftlab.drafters.vocab import DraftVocab, vocab_for
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
        report_vocab(vocab, target, collected(), is_chosen_here=False)
    lines = [line.split() for line in caplog.text.splitlines()]
    code = next(line for line in lines if line[:2] == ["code", "15"])
    assert code[2] == "0.0"
    assert "-" not in code
    assert any(line[:2] == ["all", "45"] for line in lines)
    assert "long tail" in caplog.text


def test_a_whole_vocabulary_has_nothing_to_tell(caplog):
    with caplog.at_level(logging.INFO, "draftlab"):
        report_vocab(None, tiny_target(num_hidden_layers=2), collected(), is_chosen_here=True)
    assert caplog.text == ""


def test_a_vocabulary_chosen_from_answers_is_measured_on_answers_it_did_not_see(caplog):
    """Every answer has words of its own, so none of another's is known; rare low ids fill up."""
    target = tiny_target(num_hidden_layers=2)
    own = [torch.arange(first, first + 5).repeat(2) for first in range(100, 255, 5)]
    mask = torch.arange(10) >= 2
    samples = [Sample(number, "chat", ids, mask) for number, ids in enumerate(own)]
    answers = Collected(samples, None, {}, {})
    vocab = vocab_for(target.drafter_view, 175, count_tokens(samples, target.spec.vocab_size))
    for is_chosen_here, inside in ((False, "100.0"), (True, "0.0")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "draftlab"):
            report_vocab(vocab, target, answers, is_chosen_here=is_chosen_here)
        line = next(x.split() for x in caplog.text.splitlines() if x.split()[:1] == ["chat"])
        assert line[2] == inside
        assert ("measured on 4 answers" in caplog.text) == is_chosen_here
