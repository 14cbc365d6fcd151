import pytest
import torch

from draftlab.targets.step import Step
from draftlab.targets.tiny import TINY_FAMILIES, tiny_target


@pytest.fixture(scope="session")
def targets():
    """One tiny float64 target a family, built when first asked for."""
    built = {}

    def get(family):
        if family not in built:
            built[family] = tiny_target(family)
        return built[family]

    return get


@pytest.fixture(params=TINY_FAMILIES)
def target(request, targets):
    return targets(request.param)


@pytest.fixture
def tolerance(target):
    """Routers and sinks round in float32 whatever the dtype; dense models do not notice."""
    return 1e-6 if target.config["model_type"] in ("qwen3_moe", "gpt_oss") else 1e-9


@pytest.fixture
def random_ids():
    def make(*shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 261, shape, generator=generator)

    return make


@pytest.fixture
def run_chain():
    """Feed each row `width` tokens from its own base; give the pass's output."""

    def run(target, kv, texts, base, width, **keywords):
        ids = torch.zeros(len(texts), width, dtype=torch.long)
        for row, (text, first) in enumerate(zip(texts, base, strict=True)):
            piece = text[first : first + width]
            ids[row, : len(piece)] = piece
        step = Step(torch.arange(len(texts)), ids, torch.tensor(base), max(base) + width)
        return target.run(kv, step, **keywords)

    return run


@pytest.fixture
def whole_logits():
    """Logits of each text alone, by transformers without any of our attention or memory."""

    def compute(target, texts):
        if target.report["has_sinks"]:
            target.reference.plain_attention = "eager"
        return [target.forward_plainly(text.unsqueeze(0)).logits[0].clone() for text in texts]

    return compute
