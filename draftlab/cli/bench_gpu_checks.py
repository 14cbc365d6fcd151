"""Exactness on the device, for `draftlab bench gpu`: graphs, fixed shapes, the sampler.

Every check gives plain data with `passed`. Each statistical one has a negative control that must
fail, or it proves nothing. Read check_sampler.
"""

import math
from typing import Any

import torch

from draftlab.cli.bench_gpu_target import Sizes, StaticAnswers, prompts_of, settings_of
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.verify import verify_speculative
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import DraftTree, chain_parents
from draftlab.randomness import Purpose, uniforms
from draftlab.sampling import Sampling, draw, process
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.step import Step
from draftlab.targets.target import Target

_WORDS = 64  # of the sampler's vocabulary: narrow, so that every bin is full
_LIMIT = 6.0  # standard deviations; a right sampler passes it but once in 10^9
_WIDTH = 5
_OTHER_SEED = 11
_TREE = {"kind": "dynamic", "num_nodes": 12, "top_k": 4, "depth": 3}


def check_graphs(target: Target, drafter: Drafter | None, sizes: Sizes) -> dict[str, Any]:
    """Compare answers of captured rounds with those of the same rounds launched one by one.

    They must be equal in any dtype. Ordinary rounds look at other lengths, which may round
    otherwise: there identity is asked in float64, and told elsewhere.
    """
    prompts = prompts_of(6, length=9, seed=4)
    found: dict[str, Any] = {"passed": True}
    arms: dict[str, tuple[Drafter | None, dict[str, Any] | None]] = {"plain": (None, None)}
    if drafter is not None:
        arms[drafter.kind] = (drafter, None)
        arms[f"{drafter.kind}, tree"] = (drafter, _TREE)
    for name, (chosen, tree) in arms.items():
        for temperature in (0.0, 0.8):
            rule = "auto" if temperature == 0 or chosen is None else "sampled_verify"
            settings = settings_of(temperature=temperature, rule=rule, tree=tree, graphs="off")
            captured, launched, ordinary = (
                decoder.generate(prompts, max_new_tokens=sizes.tokens, batch_size=3)
                for decoder in (
                    StaticAnswers(target, chosen, settings),
                    StaticAnswers(target, chosen, settings, captures=False),
                    Decoder(target, chosen, settings),
                )
            )
            for what, others, is_asked in (
                ("one by one", launched, True),
                ("ordinary", ordinary, target.dtype is torch.float64),
            ):
                pairs = zip(captured, others, strict=True)
                same = sum(a.output_ids == b.output_ids for a, b in pairs)
                key = f"{name}, temperature {temperature}, equal to {what}"
                found[key] = f"{same} of {len(prompts)}"
                found["passed"] &= same == len(prompts) or not is_asked
    return found


def check_fixed_shape(target: Target, sizes: Sizes) -> dict[str, Any]:
    """Compare a wide pass, row by row, with passes as wide whose first token alone is real.

    Where all rows are equal bit for bit, greedy speculation is plain decoding to the token, in any
    dtype, with no tolerance.
    """
    (text,) = prompts_of(1, length=sizes.positions + 2 * _WIDTH, seed=5)
    live = 2 * len(text)
    device = target.device
    ids = torch.tensor([text], device=device)
    row = torch.zeros(1, dtype=torch.int64, device=device)
    equal, same_choice, count = 0, 0, 0
    with torch.inference_mode():
        kv = target.open_kv(1, live)

        def logits(at: int, tokens: Int[Tensor, "1 T"]) -> Float[Tensor, "T V"]:
            base = torch.full_like(row, at)
            out = target.run(kv, Step(row, tokens, base, live, is_prefix=True)).logits
            assert out is not None
            return out[0]

        for start in range(0, sizes.positions, _WIDTH):
            wide = logits(start, ids[:, start : start + _WIDTH]).clone()
            for column in range(_WIDTH):
                lone = torch.zeros_like(ids[:, :_WIDTH])
                lone[:, 0] = ids[:, start + column]
                narrow = logits(start + column, lone)[0]
                equal += int(torch.equal(narrow, wide[column]))
                same_choice += int(narrow.argmax() == wide[column].argmax())
                count += 1
    return {"rows": count, "bitwise_equal": equal, "same_argmax": same_choice}


def check_sampler(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Test drawn tokens, and tokens that speculation lets out, against their law on the device.

    Chi-square in standard deviations from its mean. Each test is made again with a law, or a told
    draft law, that is a little wrong: that one must be found out.
    """
    with torch.inference_mode():
        logits = 2 * _numbers(1, _WORDS, device).sum(0)
        p = process(logits, Sampling(0.8))
        row = torch.arange(sizes.draws, device=device)
        drawn = draw(p, uniforms(_OTHER_SEED, row, Purpose.SAMPLE))
        wrong = process(logits, Sampling(0.9))
        honest, lying = (_speculate(p, sizes.draws, device, lies=lies) for lies in (False, True))
        found = {
            "draws": sizes.draws,
            "draw": _deviations(drawn, p),
            "draw, control": _deviations(drawn, wrong),
            "speculation": _deviations(honest, p),
            "speculation, control": _deviations(lying, p),
        }
    is_right = all(abs(found[name]) < _LIMIT for name in ("draw", "speculation"))
    is_awake = all(found[f"{name}, control"] > _LIMIT for name in ("draw", "speculation"))
    return {**found, "limit": _LIMIT, "passed": is_right and is_awake}


def _numbers(seed: int, count: int, device: torch.device) -> Float[Tensor, "4 N"]:
    return uniforms(
        seed,
        torch.arange(4, device=device).unsqueeze(1),
        torch.arange(count, device=device),
        Purpose.NOISE,
    )


def _speculate(
    p: Float[Tensor, " V"], rows: int, device: torch.device, *, lies: bool
) -> Int[Tensor, " R"]:
    """Draft one token from another law, verify it, and give the token that comes out."""
    q = process(2 * _numbers(2, p.shape[0], device).sum(0), Sampling(1.0)).expand(rows, -1)
    row = torch.arange(rows, device=device)
    tokens = draw(q, uniforms(_OTHER_SEED, row, Purpose.DRAFT)).unsqueeze(1)
    told = q**1.5 / (q**1.5).sum(-1, keepdim=True) if lies else q
    tree = DraftTree(
        tokens=tokens,
        parents=chain_parents(rows, 1, device),
        num_nodes=torch.ones_like(row),
        law_probs=told.unsqueeze(1),
        law_ids=None,
    )
    verdict = verify_speculative(
        tree,
        p.expand(rows, 2, -1),
        accept_uniforms=uniforms(_OTHER_SEED, row.unsqueeze(1), Purpose.ACCEPT),
        next_uniforms=uniforms(_OTHER_SEED, row, Purpose.RESAMPLE),
    )
    return torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)


def _deviations(drawn: Int[Tensor, " N"], law: Float[Tensor, " V"]) -> float:
    expected = law.double() * len(drawn)
    seen = torch.bincount(drawn, minlength=len(law)).double()
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(law) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)
