"""Fingerprints of weights and tokenizers: equal when, and only when, the things are the same."""

import hashlib
import json
from typing import Any

import torch
from torch import nn

from draftlab.shapes import Tensor
from draftlab.targets.sharding import whole_tensor

_SAMPLES = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_weights(model: nn.Module) -> str:
    """Hash every parameter's name, shape, dtype, exact bit sum and a spread sample of its bits.

    The sum is over the bits read as integers, so it is exact in any order and on any device; a
    weight that changes anywhere changes it. Much faster than hashing gigabytes. Weights of another
    dtype are other weights; weights cut over processes are the same ones, put together in turn.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
        whole = whole_tensor(weight.detach())
        bits = whole.contiguous().view(-1).view(_INTEGERS[weight.element_size()])
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
        digest.update(_sample(bits).cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Hash what decides a conversation's ids: vocabulary, special tokens and chat template."""
    facts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "eos": tokenizer.eos_token,
        "bos": tokenizer.bos_token,
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _sample(bits: Tensor) -> Tensor:
    return bits[:: max(1, bits.numel() // _SAMPLES)]
