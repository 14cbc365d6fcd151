"""Times of `draftlab bench gpu`: copy, passes, plain decoding, one head trained and decoded.

Every function gives plain data for the JSON. A call is timed as a CUDA graph where there is CUDA,
so that launches do not count, and eagerly elsewhere.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml

from draftlab.cli.bench_gpu_target import Sizes, StaticAnswers, prompts_of, settings_of
from draftlab.data.batch import TokenBatch
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation
from draftlab.decoding.static_round import DraftsStatically
from draftlab.decoding.timing import DeviceClock
from draftlab.drafters.base import DraftBudget, Drafter, Observation, drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.cache import KVBuffers
from draftlab.targets.step import Step
from draftlab.targets.target import Target

NUM_DRAFT_TOKENS = 4
_PROMPT_TOKENS = 24


def measure_copy(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Time a copy of a large buffer; bytes read and written both count."""
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    seconds = time_call(lambda: goal.copy_(source), device, sizes.repeats, captures=False)
    return {"bytes_per_s": 2 * sizes.copy_bytes / seconds}


def measure_curve(target: Target, sizes: Sizes) -> dict[str, Any]:
    """Time passes by width and batch, launched one by one and as graphs."""
    found: dict[str, Any] = {"context": sizes.context, "widths": list(sizes.widths)}
    for rows in sizes.batches:
        for captures in (False, True):
            key = f"batch {rows} {'graph' if captures else 'eager'}"
            found[key] = [
                _time_pass(target, sizes, rows, width, captures=captures) for width in sizes.widths
            ]
    return found


def measure_plain(target: Target, sizes: Sizes, copy: dict[str, Any]) -> dict[str, Any]:
    """Decode without drafts, and tell what share of the copy bandwidth its reads use."""
    spec, prompts = target.spec, prompts_of(1, length=_PROMPT_TOKENS, seed=1)
    heads, width = target.kv_shape or (0, 0)
    embedding = spec.vocab_size * spec.hidden_size
    parameters = sum(p.numel() for p in target.model.parameters()) - embedding
    middle = _PROMPT_TOKENS + sizes.tokens / 2
    cache = 2 * spec.num_layers * heads * width * middle
    per_token = (parameters + cache) * target.dtype.itemsize
    found: dict[str, Any] = {"bytes_per_token": per_token}
    for name, decoder in (
        ("eager", Decoder(target, None, settings_of(graphs="off"))),
        ("graph", StaticAnswers(target, None, settings_of())),
    ):
        rate = _rate(_decode(decoder, prompts, sizes.tokens))
        found[name] = {
            "tokens_per_s": rate,
            "share_of_copy_bandwidth": rate * per_token / copy["bytes_per_s"],
        }
    return found


def train_head(target: Target, sizes: Sizes) -> tuple[Drafter, dict[str, Any]]:
    """Train an EAGLE-3 head on the target's answers to random prompts."""
    asked = prompts_of(sizes.answers, length=_PROMPT_TOKENS, seed=2)
    answers = Decoder(target, None, settings_of(graphs="off")).generate(
        asked, max_new_tokens=sizes.answer_tokens, batch_size=min(32, sizes.answers)
    )
    lines = torch.tensor([[*a.prompt_ids, *a.output_ids] for a in answers])
    counts = torch.bincount(lines.flatten(), minlength=target.spec.vocab_size)
    data = yaml.safe_load((conf_dir() / "drafter" / "eagle3.yaml").read_text(encoding="utf-8"))
    data |= {"num_draft_tokens": NUM_DRAFT_TOKENS, "draft_vocab_size": sizes.draft_vocab}
    settings = parse_settings(drafter_class("eagle3").settings_class, data)
    drafter = build_drafter(settings, target.view, counts)
    drafter.train()
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=5e-4)
    losses = []
    for step in range(sizes.train_steps):
        chosen = lines[torch.arange(step * 8, step * 8 + 8) % len(lines)]
        batch = _batch(chosen, target.device)
        features = target.read_features(batch, drafter.needs)
        loss = drafter(batch, features, Noise(0)).total / len(chosen)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    first, last = float(losses[0]), float(torch.stack(losses[-5:]).mean())
    drafter.to(target.dtype).eval()
    return drafter, {"steps": sizes.train_steps, "first_loss": first, "last_loss": last}


def measure_speculation(target: Target, drafter: Drafter, sizes: Sizes) -> dict[str, Any]:
    """Decode with the head, and compare with what its parts cost alone."""
    found: dict[str, Any] = {}
    for rows in sizes.batches:
        prompts = prompts_of(rows, length=_PROMPT_TOKENS, seed=3)
        plain = _decode(StaticAnswers(target, None, settings_of()), prompts, sizes.tokens)
        drafted = _decode(StaticAnswers(target, drafter, settings_of()), prompts, sizes.tokens)
        steps = [step for answer in drafted for step in answer.steps]
        tau = sum(step.num_emitted for step in steps) / len(steps)
        one = _time_pass(target, sizes, rows, 1, captures=True)
        wide = _time_pass(target, sizes, rows, NUM_DRAFT_TOKENS + 1, captures=True)
        draft = _time_draft(target, drafter, sizes, rows)
        predicted, measured = tau * one / (draft + wide), _rate(drafted) / _rate(plain)
        same = sum(a.output_ids == b.output_ids for a, b in zip(drafted, plain, strict=True))
        found[f"batch {rows}"] = {
            "tokens_per_s_plain": _rate(plain),
            "tokens_per_s": _rate(drafted),
            "tau": tau,
            "draft_over_plain": draft / one,
            "verify_over_plain": wide / one,
            "predicted_speedup": predicted,
            "measured_speedup": measured,
            "measured_over_predicted": measured / predicted,
            "num_identical": same,
            "num_answers": rows,
        }
    return found


def time_call(
    call: Callable[[], object], device: torch.device, repeats: int, *, captures: bool
) -> float:
    """Give the median seconds of a call, after two that are not timed."""
    clock = DeviceClock(device)
    with torch.inference_mode():
        if captures and device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
                call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            call = graph.replay
        spent = []
        for turn in range(2 + repeats):
            began = clock.read()
            call()
            seconds = clock.read() - began
            if turn > 1:
                spent.append(seconds)
    return statistics.median(spent)


def _time_pass(target: Target, sizes: Sizes, rows: int, width: int, *, captures: bool) -> float:
    with torch.inference_mode():
        kv = target.open_kv(rows, 2 * sizes.context + width)
        step = _step(target, rows, width, sizes.context, 2 * sizes.context)
    return time_call(lambda: target.run(kv, step), target.device, sizes.repeats, captures=captures)


def _time_draft(target: Target, drafter: Drafter, sizes: Sizes, rows: int) -> float:
    """Time a proposal and an observation of full width, as rounds have them."""
    assert isinstance(drafter, DraftsStatically)
    static, width, live = drafter.static_rounds(), NUM_DRAFT_TOKENS + 1, 2 * sizes.context
    with torch.inference_mode():
        kv: KVBuffers = target.open_kv(rows, live + width)
        state = drafter.open(rows, live + width, kv)
        step = _step(target, rows, width, sizes.context, live)
        features = target.run(kv, step, request=drafter.needs).features
        seen = Observation(
            rows=step.rows,
            ids=step.ids,
            lengths=torch.zeros_like(step.base),
            next_ids=step.ids,
            taps=features.taps,
            final=features.final,
        )
        budget = DraftBudget(step.rows, NUM_DRAFT_TOKENS, GREEDY)
        numbers = torch.zeros(rows, NUM_DRAFT_TOKENS, dtype=torch.float64, device=target.device)

    def call() -> None:
        static.propose(state, budget, numbers, live=live)
        static.observe(state, seen, live=live)

    return time_call(call, target.device, sizes.repeats, captures=True)


def _step(target: Target, rows: int, width: int, base: int, live: int) -> Step:
    device = target.device
    return Step(
        rows=torch.arange(rows, device=device),
        ids=torch.ones(rows, width, dtype=torch.int64, device=device),
        base=torch.full((rows,), base, dtype=torch.int64, device=device),
        live=live,
        is_prefix=True,
    )


def _decode(decoder: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Generation]:
    """Decode twice, all prompts at once; the first time captures and warms up."""
    decoder.generate(prompts, max_new_tokens=tokens, batch_size=len(prompts))
    return decoder.generate(prompts, max_new_tokens=tokens, batch_size=len(prompts))


def _rate(answers: Sequence[Generation]) -> float:
    """Give tokens a second of answers that were decoded together, first tokens left out."""
    tokens = sum(len(answer.output_ids) - 1 for answer in answers)
    return tokens / max(answer.decode_s for answer in answers)


def _batch(lines: torch.Tensor, device: torch.device) -> TokenBatch:
    rows, length = lines.shape
    order = torch.arange(length).expand(rows, -1)
    return TokenBatch(
        lines,
        order >= _PROMPT_TOKENS,
        order,
        torch.zeros_like(lines),
        torch.arange(rows).unsqueeze(1).expand(-1, length),
    ).to(device)
