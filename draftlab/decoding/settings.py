"""Keys of conf/decode/*.yaml and conf/regenerate/*.yaml."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from draftlab.data.feature_bytes import FeatureDtype
from draftlab.decoding.verify import RuleName
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling
from draftlab.settings.base import Settings, read_mapping

Bias = Annotated[float, Field(allow_inf_nan=True)]  # -inf bans a token


class StaticTreeSettings(Settings):
    """A tree of one shape.

    Attributes:
        kind: "static".
        shape: children of every node, level by level, such as [3, 2, 1]; or a JSON file of nodes,
            each the ranks on the way to it, such as [[0], [1], [0, 0]].
    """

    kind: Literal["static"]
    shape: Annotated[list[PositiveInt], Field(min_length=1)] | str


class DynamicTreeSettings(Settings):
    """A tree grown where the drafter is sure.

    Attributes:
        kind: "dynamic".
        num_nodes: N, draft nodes that are verified.
        top_k: children of a node, and nodes that a level expands.
        depth: levels.
    """

    kind: Literal["dynamic"]
    num_nodes: PositiveInt
    top_k: PositiveInt
    depth: PositiveInt


class BudgetedTreeSettings(Settings):
    """A dynamic tree of which as much is verified as promises most tokens a second.

    What a target pass costs by its width is measured when decoding starts.

    Attributes:
        kind: "budgeted".
        max_nodes: draft nodes at most.
        top_k: as in a dynamic tree; 1 is a chain, whose length is chosen, for any drafter that
            tells its confidence.
        depth: levels.
    """

    kind: Literal["budgeted"]
    max_nodes: PositiveInt
    top_k: PositiveInt
    depth: PositiveInt


class MeasuredTreeSettings(Settings):
    """The static tree that accepts most, by what the drafter counted while it was trained.

    Attributes:
        kind: "measured".
        num_nodes: N, draft nodes.
    """

    kind: Literal["measured"]
    num_nodes: PositiveInt


TreeSettings = Annotated[
    StaticTreeSettings | DynamicTreeSettings | BudgetedTreeSettings | MeasuredTreeSettings,
    Field(discriminator="kind"),
]


class DecodeSettings(Settings):
    """How answers are decoded.

    Attributes:
        rule: how draft tokens are accepted; auto takes the best exact rule for the drafter.
        lossy: allows the rules that do not keep the target's law; everything they made is LOSSY.
        lossy_epsilon: of rule=typical.
        lossy_delta: of rule=typical.
        lossy_threshold: of rule=threshold.
        num_draft_tokens: K of a chain, or None for the drafter's own.
        tree: shape of drafts with branches; None drafts chains.
        min_confidence: a chain ends before a node that its drafter is less sure of; None is off.
        fallback: decode plainly while drafting does not pay, by the clock.
        temperature: 0 is greedy.
        top_k: None is off.
        top_p: None is off.
        min_p: None is off.
        repetition_penalty: 1 is off.
        frequency_penalty: 0 is off.
        presence_penalty: 0 is off.
        logit_bias: token id to what is added to its logit; None is off.
        max_new_tokens: an answer's length limit, tokens.
        min_new_tokens: tokens before an end token may come.
        stop: strings that end an answer.
        batch_size: sequences decoded at once; finished ones are replaced.
        prefill_tokens: prompt tokens a target pass takes at most.
        graphs: rounds as CUDA graphs; auto uses them on CUDA wherever nothing needs the host.
        ignore_eos: go on past end tokens, up to the limit.
        seed: root of the draws.
    """

    rule: RuleName
    lossy: bool
    lossy_epsilon: float | None
    lossy_delta: float | None
    lossy_threshold: float | None
    num_draft_tokens: PositiveInt | None
    tree: Annotated[TreeSettings | None, BeforeValidator(read_mapping)]
    min_confidence: Annotated[float, Field(gt=0, le=1)] | None
    fallback: bool
    temperature: float
    top_k: PositiveInt | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Annotated[Mapping[int, Bias] | None, BeforeValidator(read_mapping)]
    max_new_tokens: PositiveInt
    min_new_tokens: NonNegativeInt
    stop: list[str]
    batch_size: PositiveInt
    prefill_tokens: PositiveInt
    graphs: Literal["auto", "on", "off"]
    ignore_eos: bool
    seed: NonNegativeInt

    @model_validator(mode="after")
    def _check_choices(self) -> "DecodeSettings":
        if self.tree is not None and self.num_draft_tokens is not None:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} has no effect with a tree, which has a "
                "depth of its own; pass null"
            )
        if self.tree is not None and self.min_confidence is not None:
            raise ValueError(
                f"min_confidence={self.min_confidence} cuts chains and has no effect with a tree; "
                "pass null, or decode.tree={kind: budgeted, ...}"
            )
        if self.ignore_eos and self.min_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} has no effect with ignore_eos=true; pass 0"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens="
                f"{self.max_new_tokens}; expected at most that"
            )
        _require_law(self)
        return self

    @property
    def sampling(self) -> Sampling:
        """The law that p is computed under."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            min_new_tokens=self.min_new_tokens,
        )


class RegenerateSettings(Settings):
    """How the target answers training prompts.

    Attributes:
        answers_per_prompt: answers of each prompt; more than one needs a temperature above 0.
        temperature: 0 is greedy.
        top_k: None is off.
        top_p: None is off.
        min_p: None is off.
        max_new_tokens: an answer's length limit, tokens.
        batch_size: sequences decoded at once.
        prompts_per_shard: the unit that is committed whole or run again.
        capture_features: keep the hidden states the drafter needs, so that training needs no
            second target pass.
        features_dtype: what they are written in: target (its own dtype), bf16, or fp8 with a scale
            a vector; half the bytes each time.
    """

    answers_per_prompt: PositiveInt
    temperature: float
    top_k: PositiveInt | None
    top_p: float | None
    min_p: float | None
    max_new_tokens: PositiveInt
    batch_size: PositiveInt
    prompts_per_shard: PositiveInt
    capture_features: bool
    features_dtype: FeatureDtype

    @model_validator(mode="after")
    def _check(self) -> "RegenerateSettings":
        if self.features_dtype != "target" and not self.capture_features:
            raise ValueError(
                f"regenerate.features_dtype={self.features_dtype} has no effect with "
                "regenerate.capture_features=false; pass regenerate.features_dtype=target, or "
                "capture features"
            )
        _require_law(self)
        return self

    @property
    def sampling(self) -> Sampling:
        """The law answers are drawn from."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


def _require_law(settings: DecodeSettings | RegenerateSettings) -> None:
    """Let the law's own refusal be told with the group it stands in."""
    try:
        settings.sampling  # noqa: B018 - refuses what is no law
    except ConfigError as error:
        raise ValueError(str(error)) from None
