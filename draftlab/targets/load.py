"""From settings to a target, whatever its source.

In: `TargetSettings`. Out: a frozen, admitted `Target`. Read load_target; `resolve` decides once
what a machine can do, so that a run's config.yaml repeats it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.targets.demo import DEMO_NAME, DEMO_QUANTISATION, prepare_demo
from draftlab.targets.encoder_decoder import FAMILIES as ENCODER_DECODERS
from draftlab.targets.encoder_decoder import build_encoder_decoder
from draftlab.targets.fast import FastDoor, refuse_fast_door
from draftlab.targets.flash_chain import check_flash_chain, find_flash_chains
from draftlab.targets.gguf import read_gguf
from draftlab.targets.self_check import TOLERANCE, compare_doors
from draftlab.targets.settings import TargetSettings
from draftlab.targets.sharding import LayerShards, cut_layers, require_processes
from draftlab.targets.target import Target, build_target
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

log = logging.getLogger(__name__)


def resolve(settings: TargetSettings) -> TargetSettings:
    """Replace every "auto" about this machine by what it stands for: device and dtype.

    Raises:
        ConfigError: a device this machine does not have.
    """
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device, "target.device")
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if _multiplies_bfloat16(torch.device(device)) else "float32"
    return settings.model_copy(update={"device": device, "dtype": dtype})


def load_target(settings: TargetSettings, *, is_sharded: bool = False) -> Target:
    """Load a target, freeze it and take it through the gate.

    Args:
        settings: which target, and where.
        is_sharded: cut its layers over the processes, which all load it together.

    Raises:
        ConfigError: a name, revision or device that does not exist; nothing to cut over.
        TargetMismatch: the tokenizer does not belong to the model.
        UnsupportedTarget: a quantised, incomplete or exotic model, or one that cannot be cut.
    """
    settings = resolve(settings)
    if is_sharded:
        require_processes()
        refuse_fast_shards(settings)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    with _without_progress_bars():
        model, tokenizer, name, quantisation = _read(settings, dtype)
    _refuse_packed(model, name)
    shards = None
    if is_sharded:
        _refuse_encoder(model, name)
        shards = cut_layers(model, torch.device(settings.device))
    else:
        nn.Module.to(model, settings.device)
    build = build_encoder_decoder if _has_encoder(model.config) else build_target
    target = build(
        model,
        tokenizer,
        name=name,
        source=settings.source,
        quantisation=quantisation,
    )
    if shards is None:
        choose_kernels(target, settings.kernels)
    else:
        _use_shards(target, shards)
    if commit := getattr(model.config, "_commit_hash", None):
        target.report["revision"] = commit
    return target


def choose_kernels(target: Target, kernels: str) -> None:
    """Put the fast pass in place where it serves the target and equals the reference.

    Args:
        target: just built, on the reference.
        kernels: auto, reference or fast.

    Raises:
        ConfigError: fast was asked for and cannot serve this target.
        UnsupportedTarget: fast was asked for and gives other numbers.
    """
    if kernels == "reference":
        return
    refusal = target.speculation_refusal or refuse_fast_door(target.model, target.config)
    if refusal is None and target.kv_shape is not None:
        try:
            door, found = _build_fast_door(target, target.kv_shape)
        except UnsupportedTarget as error:
            if kernels == "fast":
                raise
            refusal = str(error)
        else:
            target.report.update(found)
            target.use_door(door)
            return
    if kernels == "fast":
        raise ConfigError(
            f"target.kernels=fast does not serve {target.spec.name}: {refusal}; pass "
            "target.kernels=auto"
        )
    target.report["fast_refusal"] = refusal


def _build_fast_door(target: Target, kv_shape: tuple[int, int]) -> tuple[FastDoor, dict[str, Any]]:
    """Build and compare the fast pass, with a flash-attention kernel where one agrees."""
    with torch.inference_mode():
        door = FastDoor(target.model, target.config, target.report["windows"])
    for chain in find_flash_chains(target.device, target.dtype, kv_shape[1]):
        door.chain = chain
        try:
            check_flash_chain(
                chain,
                heads=int(target.config["num_attention_heads"]),
                kv_shape=kv_shape,
                dtype=target.dtype,
                device=target.device,
                tolerance=TOLERANCE[target.dtype],
            )
            found = compare_doors(target.reference, door, target.view, kv_shape)
        except Exception as error:  # whatever a foreign kernel does wrong, there is another way
            log.warning("%s is installed, but not used: %s", chain.name, error)
            door.chain = None
        else:
            # it splits long rows in ways that hang on a pass's width; the probe's are too short
            return door, {**found, "attention": chain.name, "rows_bitwise_equal": False}
    found = compare_doors(target.reference, door, target.view, kv_shape)
    return door, {**found, "attention": "sdpa"}


def refuse_fast_shards(settings: TargetSettings) -> None:
    """Refuse fused kernels for a target whose layers are cut over processes.

    Raises:
        ConfigError: target.kernels=fast.
    """
    if settings.kernels == "fast":
        raise ConfigError(
            "target.kernels=fast keeps whole weights of its own, and hardware.shard cuts the "
            "target's over processes; pass target.kernels=auto, or hardware.shard=none"
        )


def _refuse_encoder(model: PreTrainedModel, name: str) -> None:
    if _has_encoder(model.config):
        raise UnsupportedTarget(
            f"target {name} is an encoder-decoder, whose layers draftlab does not cut over "
            "processes; pass hardware.shard=none"
        )


def _use_shards(target: Target, shards: LayerShards) -> None:
    """Note what cutting means for a target; refuse one that runs a pass a sample.

    Raises:
        UnsupportedTarget: its processes would run different numbers of passes.
    """
    if target.kv_shape is None:
        raise UnsupportedTarget(
            f"target {target.spec.name} cannot be cut over processes: each sample takes a pass of "
            f"its own, since {target.speculation_refusal}; pass hardware.shard=none"
        )
    target.shards = shards
    target.report["cut_over_processes"] = shards.num_processes
    target.report["fast_refusal"] = (
        f"its layers are cut over {shards.num_processes} processes, and fused weights are whole"
    )


def _read(settings: TargetSettings, dtype: torch.dtype) -> tuple[PreTrainedModel, Any, str, str]:
    name = settings.name or ""
    match settings.source:
        case "tiny":
            model = build_tiny_model(settings.family, dtype, settings.seed)
            return model, tiny_tokenizer(), f"tiny-{settings.family}", "none"
        case "demo":
            folder = prepare_demo(Path(settings.cache_dir).expanduser())
            return *_read_plain(str(folder), settings, dtype), DEMO_NAME, DEMO_QUANTISATION
        case "gguf":
            path = Path(name).expanduser()
            if not path.is_file():
                raise ConfigError(f"target.name={name} is no file; expected a .gguf file")
            return *read_gguf(path, dtype), path.stem, "GGUF, dequantised"
        case "local":
            folder = Path(name).expanduser()
            if not (folder / "config.json").is_file():
                raise ConfigError(
                    f"target.name={name}: expected a folder with config.json, weights and a "
                    "tokenizer, as transformers saves it; target=gguf reads a .gguf file, "
                    "target=hub a hub id"
                )
            return *_read_plain(str(folder), settings, dtype), name, "none"
        case "hub":
            return *_read_plain(name, settings, dtype), name, "none"


def _read_plain(
    place: str, settings: TargetSettings, dtype: torch.dtype
) -> tuple[PreTrainedModel, Any]:
    """Load a folder or hub id. Keys for gated models come from the environment (HF_TOKEN) only."""
    common: dict[str, Any] = {
        "revision": settings.revision or "main",
        "trust_remote_code": settings.remote_code == "trust",
    }
    try:
        config = AutoConfig.from_pretrained(place, **common)
        if getattr(config, "quantization_config", None) is not None:
            method = config.quantization_config.get("quant_method", "unknown")
            raise UnsupportedTarget(
                f"target {place} is quantised ({method}); draftlab runs plain weights: pass the "
                "unquantised model, or a dequantised copy"
            )
        tokenizer = AutoTokenizer.from_pretrained(place, **common)
        model, info = _read_model(place, config, dtype, common)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot load target {place} (revision {common['revision']}): {first.rstrip('.')}; "
            "check the name, the network and, for gated models, HF_TOKEN"
        ) from None
    if missing := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
        raise UnsupportedTarget(
            f"target {place} lacks {len(missing)} weights that its config asks for, such as "
            f"{missing[0]}; they would be random: check the folder for missing shards"
        )
    return model, tokenizer


def _read_model(
    place: str, config: Any, dtype: torch.dtype, common: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with fused attention where the family has it, never with one picked by a default."""
    if dtype is torch.float64:  # the grouped matmul of expert layers refuses it
        config._experts_implementation = "eager"

    kind = AutoModelForSeq2SeqLM if _has_encoder(config) else AutoModelForCausalLM

    def read(attention: str) -> Any:
        return kind.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            **common,
        )

    try:
        return read("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return read("eager")


def _has_encoder(config: Any) -> bool:
    return config.is_encoder_decoder and config.model_type in ENCODER_DECODERS


def _refuse_packed(model: PreTrainedModel, name: str) -> None:
    """Refuse weights that are not what they look like: meta, integer, or inside wrapped linears."""
    for path, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point():
            kind = "on the meta device" if weight.is_meta else f"of dtype {weight.dtype}"
            raise UnsupportedTarget(
                f"target {name}: weight {path} is {kind}; draftlab runs plain weights that are "
                "wholly in memory: load an unquantised model without offloading"
            )
    for path, module in model.named_modules():
        kind = type(module)
        is_known = kind.__module__.startswith(("torch.nn.", "transformers.models."))
        if "Linear" in kind.__name__ and not is_known:
            raise UnsupportedTarget(
                f"target {name}: {path} is a {kind.__module__}.{kind.__name__}, not a plain "
                "linear; merge adapters and dequantise the model first"
            )


def check_device(device: str, key: str) -> None:
    """Refuse a device that this machine does not have.

    Args:
        device: as settings name it.
        key: the setting.

    Raises:
        ConfigError: no device at all, or one that torch does not see.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{key}={device} is no device; expected cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{key}={device}, but torch sees {torch.cuda.device_count()} CUDA devices; pass "
            f"{key}=cpu or another index"
        )


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
