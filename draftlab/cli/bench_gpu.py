"""`draftlab bench gpu`, or `python -m draftlab.cli.bench_gpu`: what a CUDA device gives.

Needs torch, transformers and what draftlab's decoder imports; no datasets, no tracker, no Hydra, no
network. One run of about 8 minutes on an H200-class card. A part that fails is noted and the rest
goes on; a part that no time is left for is skipped. Writes bench_gpu.json and bench_gpu.md. Read
`main`.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftlab.cli.words import read_options
from draftlab.errors import ConfigError

_DEFAULTS = {"out": "bench_gpu", "minutes": "8"}
_SMOKE = "--cpu-smoke"
_RESERVE = 0.9  # of the time; no part is begun after it


@dataclass(slots=True)
class _Run:
    """Parts done so far, and the time they may take."""

    ends_at: float
    found: dict[str, Any] = field(default_factory=dict)

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Do one part, and note what it gave, or why it gave nothing."""
        if time.monotonic() > self.ends_at:
            self.found[name] = {"skipped": "no time was left"}
            return None
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        try:
            given = work()
        except Exception as error:  # what a new device does wrong is a finding, not the end
            self.found[name] = {"error": f"{type(error).__name__}: {error}"}
            return None
        told = given[1] if isinstance(given, tuple) else given
        if isinstance(told, dict):
            self.found[name] = {**told, "seconds": round(time.monotonic() - began, 2)}
        return given

    @property
    def num_failed(self) -> int:
        """Parts that broke, or whose check did not pass."""
        return sum("error" in part or part.get("passed") is False for part in self.found.values())


def main(args: list[str] | None = None) -> int:
    """Run every part and write both files.

    Returns:
        0 when every part ran and passed, 1 otherwise.
    """
    words = sys.argv[1:] if args is None else args
    is_smoke = _SMOKE in words
    options = read_options([word for word in words if word != _SMOKE], _DEFAULTS)
    minutes = _minutes(options["minutes"])
    import torch

    if not is_smoke and not torch.cuda.is_available():
        raise ConfigError(f"bench gpu needs a CUDA device; {_SMOKE} runs it tiny on the processor")
    run = _Run(time.monotonic() + 60 * minutes * _RESERVE)
    device = torch.device("cpu" if is_smoke else "cuda")
    _measure(run, device, is_smoke=is_smoke)
    folder = Path(options["out"]).expanduser()
    _write(folder, run.found)
    print(f"written: {folder / 'bench_gpu.json'} and bench_gpu.md")
    return 1 if run.num_failed else 0


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if minutes <= 0:
        raise ConfigError(f"minutes={text!r}: expected a number above 0")
    return minutes


def _measure(run: _Run, device: Any, *, is_smoke: bool) -> None:
    from draftlab.cli import bench_gpu_checks as checks
    from draftlab.cli import bench_gpu_speed as speed
    from draftlab.cli.bench_gpu_target import FULL, SMOKE, build

    sizes = SMOKE if is_smoke else FULL
    run.part("conditions", lambda: _conditions(device, is_smoke=is_smoke))
    copy = run.part("copy bandwidth", lambda: speed.measure_copy(sizes, device))
    run.part("sampler", lambda: checks.check_sampler(sizes, device))
    built = run.part("target", lambda: _build(build, sizes, device))
    if built is None:
        return
    target = built[0]
    if target.report["kernels"] == "fast":
        run.part("pass times", lambda: speed.measure_curve(target, sizes))
        if copy is not None:
            run.part("plain decoding", lambda: speed.measure_plain(target, sizes, copy))
    run.part("fixed shape", lambda: checks.check_fixed_shape(target, sizes))
    trained = run.part("training", lambda: speed.train_head(target, sizes))
    drafter = None if trained is None else trained[0]
    run.part("graphs equal eager", lambda: checks.check_graphs(target, drafter, sizes))
    if drafter is not None:
        run.part("speculation", lambda: speed.measure_speculation(target, drafter, sizes))


def _build(build: Callable[..., Any], sizes: Any, device: Any) -> tuple[Any, dict[str, Any]]:
    target = build(sizes, device)
    parameters = sum(p.numel() for p in target.model.parameters())
    told = {"name": target.spec.name, "parameters": parameters, "dtype": target.spec.dtype}
    for key in ("kernels", "attention", "fast_refusal", "refusal", "rows_bitwise_equal"):
        if key in target.report:
            told[key] = target.report[key]
    return target, told


def _conditions(device: Any, *, is_smoke: bool) -> dict[str, Any]:
    import torch

    from draftlab.runs.provenance import describe_code, describe_machine, describe_versions

    told: dict[str, Any] = {
        "is_smoke": is_smoke,
        "versions": describe_versions(),
        "machine": describe_machine(),
        "code": describe_code(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        told["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return told


def _write(folder: Path, found: dict[str, Any]) -> None:
    from draftlab.files import write_atomic

    write_atomic(folder / "bench_gpu.json", json.dumps(found, indent=1, default=str) + "\n")
    write_atomic(folder / "bench_gpu.md", render(found))


def render(found: dict[str, Any]) -> str:
    """Write the figures as a table: part, figure, value."""
    conditions = found.get("conditions", {})
    lines = ["# bench gpu", ""]
    if conditions.get("is_smoke"):
        lines += ["A smoke run on a processor: no figure below says anything about a GPU.", ""]
    gpu = conditions.get("gpu", {}).get("name", "no GPU")
    versions = conditions.get("versions", {})
    named = ", ".join(f"{name} {versions.get(name)}" for name in ("torch", "transformers"))
    lines += [f"{gpu}; {named}", "", "| part | figure | value |", "|---|---|---|"]
    for part, figures in found.items():
        if part != "conditions":
            lines += [f"| {part} | {_told(n)} | {_told(v)} |" for n, v in _flat(figures).items()]
    return "\n".join(lines) + "\n"


def _flat(figures: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}, ")
        else:
            flat[before + name] = value
    return flat


def _told(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_told, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"bench gpu: {error}")
