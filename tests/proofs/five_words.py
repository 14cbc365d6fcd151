"""A float64 target of five words, and its law computed a second time, in plain Python."""

import math

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftlab.targets.target import build_target

NUM_WORDS = 5
EOS = 4
PROMPT = (1, 3, 0)


def five_word_target(**sizes):
    """Two random layers over five ids, the last of which ends answers."""
    words = {letter: i for i, letter in enumerate("abcde")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        eos_token="e",
        pad_token="a",
    )
    config = AutoConfig.for_model(
        "llama",
        vocab_size=NUM_WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        **{"num_hidden_layers": 2, **sizes},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
    return build_target(model.to(torch.float64), tokenizer, name="five words", source="tiny")


def law_of(logits, answer, sampling):
    """Turn logits after a prompt and an answer into the law they stand for, one id at a time.

    The definitions are those of `Sampling`; nothing here is shared with what ships.
    """
    scores = [x + dict(sampling.logit_bias).get(i, 0.0) for i, x in enumerate(logits)]
    for i in {*PROMPT, *answer}:
        times = sampling.repetition_penalty
        scores[i] = scores[i] / times if scores[i] > 0 else scores[i] * times
    for i in set(answer):
        scores[i] -= sampling.frequency_penalty * answer.count(i) + sampling.presence_penalty
    if len(answer) < sampling.min_new_tokens:
        scores[EOS] = -math.inf
    scores = [x / sampling.temperature for x in scores]
    if sampling.top_k is not None:
        least = sorted(scores)[-sampling.top_k]
        scores = [x if x >= least else -math.inf for x in scores]
    weights = [math.exp(x - max(scores)) for x in scores]
    if sampling.top_p is not None:
        kept, mass = set(), 0.0
        for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
            if mass >= sampling.top_p * sum(weights):
                break
            kept.add(i)
            mass += weights[i]
        weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    if sampling.min_p is not None:
        weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


class Words:
    """The target alone: its law after any answer, and the joint law of whole answers."""

    def __init__(self, target, sampling, length):
        self.target, self.sampling, self.length = target, sampling, length
        self._laws = {}

    def p(self, answer):
        """Give the law of the token after an answer, by a whole pass without any memory."""
        if answer not in self._laws:
            logits = self.target.forward_plainly(torch.tensor([[*PROMPT, *answer]])).logits
            self._laws[answer] = law_of(logits[0, -1].tolist(), answer, self.sampling)
        return self._laws[answer]

    def is_over(self, answer):
        return len(answer) == self.length or answer[-1:] == (EOS,)

    def joint(self, answer=(), mass=1.0):
        """Give the probability of every whole answer, token by token."""
        if self.is_over(answer):
            return {answer: mass}
        found = {}
        for word, chance in enumerate(self.p(answer).tolist()):
            if chance:
                found |= self.joint((*answer, word), mass * chance)
        return found
