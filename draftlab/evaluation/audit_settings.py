"""Keys of the `audit` block of conf/audit.yaml."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from draftlab.settings.base import Settings


class AuditSettings(Settings):
    """How much an audit looks at.

    Attributes:
        prompts: evaluation prompts answered greedily, in turn from every domain.
        max_new_tokens: length limit of those answers, tokens.
        sampled_prompts: prompts that are answered over and over, the shortest ones.
        sampled_tokens: length limit of those answers, tokens.
        minutes: time for sampled answers; the last round of them is finished.
        samples: sampled answers of each arm instead, all prompts together; None goes by the clock.
        batch_size: sampled answers decoded at once; also the width of the second plain arm.
        alpha: chance of a false alarm in the sampled part.
        seed: root of the draws.
    """

    prompts: PositiveInt
    max_new_tokens: PositiveInt
    sampled_prompts: PositiveInt
    sampled_tokens: PositiveInt
    minutes: PositiveFloat
    samples: PositiveInt | None
    batch_size: Annotated[int, Field(ge=2)]
    alpha: Annotated[float, Field(gt=0, lt=1)]
    seed: NonNegativeInt
