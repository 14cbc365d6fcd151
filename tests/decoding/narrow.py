"""A target that says four words only, its exact law, and a test of answers against it."""

import torch
from scipy import stats

from draftlab.sampling import Sampling, process
from draftlab.targets.step import Step
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

NUM_WORDS = 4
PROMPT = [3, 1, 0, 1, 2]
SAMPLING = Sampling(temperature=2.0)
LENGTH = 3
NUM_SAMPLES = 1500
FALSE_ALARM = 1e-6


def narrow_target():
    """Every embedding is large where the head's rows of all other tokens are far below zero."""
    model = build_tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 60.0
        head = model.get_output_embeddings().weight
        head[:, 0] = -16.0
        head[:NUM_WORDS, 0] = 0.0
    return build_target(model, tiny_tokenizer(), name="narrow", source="tiny")


def exact_law(target):
    """Probability of every answer of LENGTH words, by enumeration."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        prefixes = list(law)
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        count, width = ids.shape
        step = Step(torch.arange(count), ids, torch.zeros(count, dtype=torch.int64), live=width)
        probs = process(target.run(target.open_kv(count, width), step).logits[:, -1], SAMPLING)
        law = {
            (*prefix, word): law[prefix] * probs[i, word].item()
            for i, prefix in enumerate(prefixes)
            for word in range(NUM_WORDS)
        }
    return law


def p_value(decoder, law, num_samples=NUM_SAMPLES):
    """Chi-square of sampled answers against the exact law; rare cells are merged."""
    drawn = decoder.generate([PROMPT] * num_samples, max_new_tokens=LENGTH, batch_size=500)
    counts = dict.fromkeys(law, 0)
    for answer in drawn:
        counts[answer.output_ids] += 1  # an answer outside the support is a KeyError
    merged, seen, expected = [], 0, 0.0
    for cell in sorted(law, key=law.__getitem__):
        seen, expected = seen + counts[cell], expected + num_samples * law[cell]
        if expected >= 8:
            merged.append((seen, expected))
            seen, expected = 0, 0.0
    merged[-1] = (merged[-1][0] + seen, merged[-1][1] + expected)
    observed, wanted = zip(*merged, strict=True)
    return stats.chisquare(observed, wanted).pvalue
