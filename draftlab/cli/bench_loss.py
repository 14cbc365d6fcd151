"""`draftlab bench loss`: peak memory, time and error of the chunked loss beside the plain one.

Every measurement is a fresh process (`python -m draftlab.cli.bench_loss JSON`), so that its peak
is its own. Read `run`, then `_measure`.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftlab.cli.words import read_options
from draftlab.errors import ConfigError, DraftlabError

_DEFAULTS = {
    "rows": "8192",
    "vocab": "151936",
    "draft_vocab": "32000,full",
    "width": "256",
    "depths": "1",
    "objectives": "forward_kl,lk_hybrid",
    "plain_rows": "512",
    "error_rows": "512",
    "error_vocab": "16000",
    "dtype": "float32",
    "device": "cpu",
    "threads": "0",
}
_WIDTH = 110  # of the table where there is no terminal
_JUDGED_EVERY = 8  # with a reduced vocabulary, as drafters do in training


@dataclass(frozen=True, slots=True)
class LossCase:
    """One measurement: sizes, objective and form."""

    form: str
    objective: str
    rows: int
    vocab: int
    draft_vocab: int
    width: int
    depths: int
    dtype: str
    device: str
    threads: int


def run(args: Sequence[str]) -> int:
    """Measure case by case and print the table."""
    from rich.console import Console
    from rich.table import Table

    from draftlab.cli.progress import Ticker
    from draftlab.objectives.named import OBJECTIVES, objective
    from draftlab.runs.provenance import describe_machine, describe_versions

    options = read_options(args, _DEFAULTS)
    sizes = {key: _count(options, key) for key in ("rows", "vocab", "width", "depths")}
    plain_rows, error_rows, error_vocab = (
        _count(options, key) for key in ("plain_rows", "error_rows", "error_vocab")
    )
    vocabularies = _vocabularies(options["draft_vocab"], sizes["vocab"])
    chosen = options["objectives"]
    names = list(OBJECTIVES) if chosen == "all" else chosen.split(",")
    for name in names:
        objective(name)
    rest = _machine(options)

    def case(form: str, name: str, draft: int, **changes: int) -> dict[str, Any]:
        made = LossCase(form, name, draft_vocab=draft, **(sizes | changes), **rest)
        result = _in_a_process(made)
        ticker.advance(1)
        return result

    table = Table(
        "objective",
        "draft\nvocabulary",
        "extra\npeak MB",
        f"plain,\n{plain_rows} rows",
        "µs a\nprediction",
        "\nplain",
        "loss\nerror",
        "gradient\nerror",
    )
    with Ticker("loss", len(names) * len(vocabularies) * 3) as ticker:
        for draft in vocabularies:
            share = draft / sizes["vocab"]
            for name in names:
                ours = case("chunked", name, draft)
                plain = case("plain", name, draft, rows=plain_rows)
                small = round(share * error_vocab)
                error = case("error", name, small, rows=error_rows, vocab=error_vocab)
                table.add_row(
                    name,
                    "full" if draft == sizes["vocab"] else f"{draft:,}",
                    f"{ours['extra_bytes'] / 1e6:.0f}",
                    f"{plain['extra_bytes'] / 1e6:.0f}",
                    f"{1e6 * ours['seconds'] / sizes['rows'] / sizes['depths']:.0f}",
                    f"{1e6 * plain['seconds'] / plain_rows / sizes['depths']:.0f}",
                    f"{error['loss']:.1e}",
                    f"{error['gradient']:.1e}",
                )
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
    machine = describe_machine()
    for line in (
        f"{sizes['rows']} predictions x {sizes['depths']} depths, V={sizes['vocab']}, "
        f"D={sizes['width']}, {rest['dtype']}, forward and backward, all parameters trained",
        "extra peak: " + _how(rest["device"]) + ", less inputs, parameters and their gradients",
        f"errors: relative, against the plain form in float32 at {error_rows} rows, "
        f"V={error_vocab}; gradient: norm of the difference, the worst of all inputs",
        f"{machine['cpu']}, {rest['threads'] or machine['torch_threads']} threads, "
        f"torch {describe_versions()['torch']}",
    ):
        print(line)
    return 0


def _count(options: dict[str, str], key: str) -> int:
    text = options[key]
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text!r}: expected a number of at least 1")
    return int(text)


def _vocabularies(text: str, vocab: int) -> list[int]:
    sizes = []
    for word in text.split(","):
        if word != "full" and not (word.isdigit() and 0 < int(word) <= vocab):
            raise ConfigError(f"draft_vocab={text!r}: expected numbers of 1..{vocab}, or full")
        sizes.append(vocab if word == "full" else int(word))
    return sizes


def _machine(options: dict[str, str]) -> dict[str, Any]:
    dtype, device, threads = options["dtype"], options["device"], options["threads"]
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={dtype!r}: expected float32 or bfloat16")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: expected cpu or cuda")
    if not threads.isdigit():
        raise ConfigError(f"threads={threads!r}: expected a number, 0 for torch's choice")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device=cuda: torch sees no GPU here; pass device=cpu")
    return {"dtype": dtype, "device": device, "threads": int(threads)}


def _how(device: str) -> str:
    if device == "cuda":
        return "torch's peak of allocated GPU memory"
    return "highest resident memory of a fresh process"


def _in_a_process(case: LossCase) -> dict[str, Any]:
    words = [sys.executable, "-m", "draftlab.cli.bench_loss", json.dumps(asdict(case))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DraftlabError(
            f"measuring {case.form} {case.objective} at {case.rows} rows failed: {last[0]}; with "
            "too little memory choose fewer rows or plain_rows"
        )
    return json.loads(done.stdout)


def _measure(case: LossCase) -> dict[str, float]:
    """Run one case in this process."""
    import torch

    torch.manual_seed(0)
    if case.threads:
        torch.set_num_threads(case.threads)
    problem = _problem(case)
    if case.form == "error":
        return _error(case, problem)
    form = _chunked if case.form == "chunked" else _plain
    tiny = replace(case, rows=4, vocab=64, draft_vocab=32)
    form(tiny, _problem(tiny)).backward()  # libraries load what they load
    before = _resident_bytes(case.device)
    began = time.perf_counter()
    form(case, problem).backward()
    seconds = _after(case.device, began)
    gradients = sum(t.grad.nbytes for t in problem.values() if t is not None and t.requires_grad)
    return {"extra_bytes": _peak_bytes(case.device) - before - gradients, "seconds": seconds}


def _problem(case: LossCase) -> dict[str, Any]:
    """Make states and heads of a problem, all in memory already."""
    import torch

    dtype, device = getattr(torch, case.dtype), torch.device(case.device)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(0, scale)

    ids = None
    if case.draft_vocab < case.vocab:
        ids = torch.linspace(0, case.vocab - 1, case.draft_vocab, device=device).long()
    scale = 4 * case.width**-0.5  # logits of a standard deviation of 4: laws with a clear favourite
    target = normal(case.vocab, case.width, scale=scale)
    return {
        "hidden": normal(case.depths, case.rows, case.width).requires_grad_(),
        "head": normal(case.draft_vocab, case.width, scale=scale).requires_grad_(),
        "final": normal(case.rows, case.width),
        "target": target,
        "kept": None if ids is None else target[ids],
        "ids": ids,
        "labels": torch.randint(0, case.vocab, (case.rows,), device=device),
        "weights": torch.rand(case.depths, case.rows, device=device) / case.rows,
    }


def _chunked(case: LossCase, problem: dict[str, Any]) -> Any:
    import torch

    from draftlab.objectives.chunked import chunked_scores
    from draftlab.objectives.named import objective

    rows = torch.arange(case.rows, device=problem["labels"].device)
    return chunked_scores(
        objective(case.objective),
        problem["hidden"],
        [problem["head"]],
        target_final=problem["final"],
        target_head=lambda final: final @ problem["target"].T,
        labels=problem["labels"],
        weights=problem["weights"],
        vocab_ids=problem["ids"],
        kept_head=problem["kept"],
        judged=rows % _JUDGED_EVERY == 0,
    ).total


def _plain(case: LossCase, problem: dict[str, Any]) -> Any:
    from draftlab.objectives.named import objective
    from draftlab.objectives.rows import score_rows

    teacher = problem["final"] @ problem["target"].T
    total = 0.0
    for hidden, weight in zip(problem["hidden"], problem["weights"], strict=True):
        draft = hidden @ problem["head"].T
        chosen = objective(case.objective)
        scores = score_rows(chosen, teacher, draft, problem["labels"], problem["ids"])
        total = total + (scores.loss * weight).sum()
    return total


def _error(case: LossCase, problem: dict[str, Any]) -> dict[str, float]:
    """Compare loss and gradients of the same numbers with those of the plain form in float32."""
    import torch

    exact: dict[str, Any] = {
        name: t.detach().float() if t is not None and t.is_floating_point() else t
        for name, t in problem.items()
    }
    for name in ("hidden", "head"):
        exact[name].requires_grad_()
    ours, plain = _chunked(case, problem), _plain(case, exact)
    ours.backward()
    plain.backward()
    worst = max(
        float(torch.dist(problem[name].grad.float(), exact[name].grad) / exact[name].grad.norm())
        for name in ("hidden", "head")
    )
    return {"loss": abs(float(ours / plain) - 1), "gradient": worst}


def _resident_bytes(device: str) -> int:
    """Read what is in memory now; no peak of this process was higher."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    pages = Path("/proc/self/statm")
    if pages.is_file():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    return _peak_bytes(device)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _after(device: str, began: float) -> float:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(_measure(LossCase(**json.loads(sys.argv[1])))))
