"""What `draftlab bench gpu` runs on: a random target of an 8B's shape, built on the device.

In: a device. Out: a `Target` with as many layers as memory allows, prompts, and decoders. Weights
are random, so texts mean nothing; times and exactness are real. What a layer adds is kept small
beside the embedding, so that the next token hangs mostly on the newest one: a head can learn that
in a minute, and drafts are accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from draftlab.decoding.graphs import StaticRunner
from draftlab.decoding.judging import Judge
from draftlab.decoding.plan import make_plan
from draftlab.decoding.records import Generation
from draftlab.decoding.requests import make_rows
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.timing import DeviceClock
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import DynamicTree
from draftlab.settings.locate import conf_dir
from draftlab.targets.load import choose_kernels
from draftlab.targets.target import Target, build_target
from draftlab.targets.tiny import tiny_tokenizer

_MEMORY_SHARE = 0.7  # of what is free, for weights and the fused copies of most of them
_COPIES = 1.8
_LOUD_EMBEDDING, _QUIET_LAYERS = 100.0, 0.1
_NUM_PROMPT_IDS = 250  # below the tokenizer's markers and end token


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the target and of the measurements.

    Attributes:
        shape: entries of a Llama's config.
        dtype: of the weights.
        context: committed tokens at which passes are timed.
        widths: T of the curve.
        batches: rows at once.
        tokens: length of timed answers.
        copy_bytes: of the copied buffer.
        draws: of the sampler's test.
        positions: of the bitwise oracle.
        answers: learned from.
        answer_tokens: length of each.
        train_steps: optimizer steps of the head.
        draft_vocab: ids that the head can say.
        repeats: of every timing.
    """

    shape: dict[str, int]
    dtype: torch.dtype
    context: int
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int
    copy_bytes: int
    draws: int
    positions: int
    answers: int
    answer_tokens: int
    train_steps: int
    draft_vocab: int
    repeats: int


FULL = Sizes(
    shape={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    dtype=torch.bfloat16,
    context=512,
    widths=(1, 2, 3, 4, 5, 8, 16, 32, 64),
    batches=(1, 8),
    tokens=192,
    copy_bytes=4 << 30,
    draws=1 << 20,
    positions=64,
    answers=96,
    answer_tokens=96,
    train_steps=150,
    draft_vocab=32_000,
    repeats=20,
)
SMOKE = Sizes(
    shape={
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    dtype=torch.float64,
    context=16,
    widths=(1, 2, 5),
    batches=(1, 2),
    tokens=10,
    copy_bytes=1 << 16,
    draws=1 << 14,
    positions=4,
    answers=4,
    answer_tokens=12,
    train_steps=3,
    draft_vocab=100,
    repeats=2,
)


def build(sizes: Sizes, device: torch.device) -> Target:
    """Build the random target where it will run; fewer layers where memory is short."""
    shape = dict(sizes.shape)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        shape["num_hidden_layers"] = _layers_that_fit(sizes, free * _MEMORY_SHARE / _COPIES)
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        "llama",
        **shape,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(sizes.dtype)
    try:
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    model = model.to(device=device, dtype=sizes.dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)  # laws with a favourite
        model.get_input_embeddings().weight.mul_(_LOUD_EMBEDDING)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(_QUIET_LAYERS)
            layer.mlp.down_proj.weight.mul_(_QUIET_LAYERS)
    name = f"random-llama-{shape['num_hidden_layers']}x{shape['hidden_size']}"
    target = build_target(model, tokenizer, name=name, source="tiny")
    choose_kernels(target, "auto")
    # every id of a random target is a token, whatever its tokenizer knows
    target.spec = replace(target.spec, num_token_ids=target.spec.vocab_size)
    target.view.spec = target.spec
    return target


def _layers_that_fit(sizes: Sizes, room: float) -> int:
    s = sizes.shape
    attention = s["head_dim"] * (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"])
    layer = s["hidden_size"] * (attention + 3 * s["intermediate_size"])
    ends = 2 * s["vocab_size"] * s["hidden_size"]
    size = sizes.dtype.itemsize
    return max(1, min(s["num_hidden_layers"], int((room / size - ends) / layer)))


def prompts_of(count: int, *, length: int, seed: int) -> list[list[int]]:
    """Make random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, _NUM_PROMPT_IDS, (count, length), generator=generator).tolist()


def settings_of(**changes: Any) -> DecodeSettings:
    """Read conf/decode/greedy.yaml without Hydra, with some values changed."""
    text = (Path(conf_dir()) / "decode" / "greedy.yaml").read_text(encoding="utf-8")
    return DecodeSettings.model_validate({**yaml.safe_load(text), "ignore_eos": True, **changes})


class StaticAnswers:
    """Device-only rounds: captured on CUDA, the same rounds launched one by one elsewhere."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: DecodeSettings,
        *,
        captures: bool = True,
    ) -> None:
        """Prepare a runner and its rule; without `captures` also CUDA launches one by one."""
        self._target, self._settings = target, settings
        plan = make_plan(settings, drafter)
        self._judge = Judge(
            settings,
            has_drafter=drafter is not None,
            is_tree=plan.shape is not None,
            draws=not isinstance(plan.shape, DynamicTree),
        )
        self._runner = StaticRunner(
            target,
            drafter,
            settings,
            plan,
            clock=DeviceClock(target.device),
            eos_ids=frozenset(),
            captures=captures and target.device.type == "cuda",
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        batch_size: int,
    ) -> list[Generation]:
        """Answer prompts, in their order."""
        rows = make_rows(
            self._target,
            prompts,
            sampling=self._settings.sampling,
            max_new_tokens=max_new_tokens,
            stops=None,
            row_keys=None,
        )
        found = self._runner.run(rows, batch_size, None, self._judge.rule)
        return sorted(found, key=lambda answer: answer.prompt_index)
