"""Tokenizers that write their tokens in the ways found in the wild, learned from a few lines."""

import json

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun.",
    "def add(first, second):\n    return first + second\n",
    "In the morning the others were there; nothing was heard of the quick answer.",
    "Zürich, naïve café, 日本語 and 🎉 in one line!",
]
TEXT = (
    "The brown dog sleeps, and the others were quick:\n    return there + 12\n\n"
    "naïve 日本語 🎉🎉 café  in the   sun!"
) * 4


def byte_level(size=330, eos="<|im_end|>", **special):
    """GPT-2's way: every byte is a letter, a space is Ġ."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    return wrap(backend, eos_token=eos, **special)


def sentencepiece(size=150):
    """Llama 2's way: a space is ▁, one stands before every text, bytes as <0xAB>."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    learned.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # words apart
    learned.train_from_iterator(
        LINES[:3], trainers.BpeTrainer(vocab_size=size, show_progress=False)
    )
    plan = json.loads(learned.to_str())["model"]
    letters = sorted(plan["vocab"], key=plan["vocab"].get)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    backend = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in plan["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = learned.normalizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = wrap(backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = beginning_with("<s>", 1)
    return tokenizer


def wordpiece(size=160):
    """BERT's way: ## continues a word."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.train_from_iterator(
        LINES,
        trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=["[UNK]", "[SEP]"], show_progress=False
        ),
    )
    return wrap(backend, unk_token="[UNK]", eos_token="[SEP]")


def beginning_with(token, index):
    """A post-processor that puts one special token in front."""
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, index)])


def wrap(backend, **special):
    """Give the tokenizer that transformers would load."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
