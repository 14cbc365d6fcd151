"""A draft model as a plain transformers folder: any engine that loads the target's family loads it.

Read write. Adapters come merged; the tokenizer is the target's, since draft and target must agree
on every id.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from draftlab.drafters.base import Drafter, ServingWeights
from draftlab.errors import NotExportable
from draftlab.export.base import ExportFormat, Served
from draftlab.export.table import serving_dtype
from draftlab.targets.fingerprint import fingerprint_tokenizer
from draftlab.targets.view import TargetView

_USAGE = """\
With transformers, as the assistant of `generate`:

```python
from transformers import AutoModelForCausalLM

assistant = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
target.generate(**inputs, assistant_model=assistant)
```"""


class HfFormat(ExportFormat, name="hf"):
    """Independent draft models, for transformers' `assistant_model` and vLLM's `draft_model`."""

    def write(
        self, drafter: Drafter, target: TargetView, folder: Path, history: Mapping[str, Any]
    ) -> Served:
        """Write the model, its generation settings and the target's tokenizer."""
        serving = drafter.serving_weights()
        if serving.architecture != "draft_model":
            raise NotExportable(
                f"export=hf writes draft models; transformers cannot load {serving.architecture}: "
                "use export=vllm"
            )
        model = _model_of(serving, serving_dtype(target.dtype))
        model.generation_config = GenerationConfig(
            eos_token_id=list(target.spec.eos_ids),
            pad_token_id=target.tokenizer.pad_token_id,
            num_assistant_tokens=drafter.settings.num_draft_tokens,
            num_assistant_tokens_schedule="constant",
        )
        model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        return Served(
            architecture="draft_model",
            method="draft_model",
            library="transformers",
            about=f"A draft model: a `{model.config.model_type}` causal language model of "
            f"{model.config.get_text_config().num_hidden_layers} layers.",
            limits=tuple(_limits(model, target, history)),
            max_draft_tokens=None,
            usage=_USAGE,
        )

    def check(self, folder: Path, target: TargetView) -> None:
        """Load the folder as a user would; nothing may be missing, left over or renamed."""
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        _, info = loaded
        problems = [f"{what}: {sorted(map(str, names))}" for what, names in info.items() if names]
        if problems:
            raise NotExportable(f"the written model does not load cleanly: {'; '.join(problems)}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if fingerprint_tokenizer(tokenizer) != target.spec.tokenizer_sha256:
            raise NotExportable(
                f"the tokenizer of target {target.spec.name} does not survive being saved and "
                "loaded; its ids would mean other tokens"
            )


def _model_of(serving: ServingWeights, dtype: torch.dtype) -> PreTrainedModel:
    settings = dict(serving.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.dtype = dtype
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(serving.tensors)
    return model.eval()


def _limits(model: PreTrainedModel, target: TargetView, history: Mapping[str, Any]) -> list[str]:
    limits = []
    config = model.config.get_text_config()
    if config.vocab_size != target.spec.vocab_size:
        limits.append(
            f"It has {config.vocab_size} rows of vocabulary, the target {target.spec.vocab_size}: "
            "vLLM serves it only with `use_heterogeneous_vocab`."
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < target.spec.max_positions:
        limits.append(f"It reads at most {longest} tokens, the target {target.spec.max_positions}.")
    if history.get("training_length"):
        limits.append(
            f"Trained on rows of at most {history['training_length']} tokens; beyond that fewer "
            "drafts may be accepted."
        )
    return [*limits, "transformers decodes with an assistant at batch size 1 only."]
