"""A small draft model with a tokenizer of its own, for kinds that are given a model by name."""

import tempfile
from functools import cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftlab.targets.tiny import build_tiny_model


@cache
def other_model():
    """Save a tiny model whose tokens are the target's in another order, and pairs of them."""
    folder = tempfile.mkdtemp(prefix="other-vocabulary-")
    build_tiny_model("llama", torch.float32, seed=1).save_pretrained(folder)
    other_tokenizer().save_pretrained(folder)
    return folder


def other_tokenizer():
    """Byte-level BPE with merges; the first bytes of the tiny target's vocabulary merge a lot."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    firsts = sorted(alphabet)[:6]
    merges = [(a, b) for a in firsts for b in firsts if a != b]
    letters = [*alphabet, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(letters)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
