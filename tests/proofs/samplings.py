"""Laws that the whole engine is enumerated under, and what counts as equal and as seen."""

from draftlab.sampling import Sampling
from proofs.five_words import EOS

TOLERANCE = 1e-10
SEEN = 0.003  # a broken engine is at least this far off, in total variation
SAMPLINGS = {
    "top-k": Sampling(temperature=1.3, top_k=3, logit_bias=((EOS, 1.0),)),
    "penalties": Sampling(
        temperature=1.6,
        top_k=3,
        repetition_penalty=1.5,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        logit_bias=((EOS, 1.5), (2, 1.0)),
    ),
    "no early end": Sampling(
        temperature=1.6, top_p=0.9, min_p=0.1, logit_bias=((EOS, 2.5),), min_new_tokens=2
    ),
}
