"""Bytes that captured hidden states will take, known before anything is loaded or written.

The drafter is built for a target of the same shape whose weights hold no memory, and asked what it
reads; so no kind of drafter is named here.
"""

import torch

from draftlab.data.feature_bytes import FeatureDtype, bytes_of_vector
from draftlab.targets.features import FeatureRequest


def bytes_of_token(
    needs: FeatureRequest, width: int, features_dtype: FeatureDtype, dtype: str
) -> int:
    """Count the bytes that one token's hidden states take in a file, exactly.

    Args:
        needs: hidden states that are kept.
        width: D of the target.
        features_dtype: what they are written in.
        dtype: of the target's weights.
    """
    number = torch.empty(0, dtype=getattr(torch, dtype))
    vector = bytes_of_vector(width, features_dtype, number.element_size())
    return vector * (len(needs.tap_layers) + needs.wants_final)
