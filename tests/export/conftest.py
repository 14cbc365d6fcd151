import pytest
import torch
import yaml

from draftlab.drafters.base import DraftBudget, Observation, drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.export.settings import ExportSettings
from draftlab.sampling import Sampling
from draftlab.settings.locate import conf_dir
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

PROMPT = [3, 17, 99, 42, 250, 8, 61]


@pytest.fixture(scope="session")
def target():
    return tiny_target(dtype=torch.float32)


@pytest.fixture(scope="session")
def build(target):
    """A drafter with random weights everywhere, norms included, so that every one matters."""

    def make(kind, on=target, **keys):
        data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text())
        settings = drafter_class(kind).settings_class(**{**data, **keys})
        counts = torch.arange(on.spec.vocab_size).flip(0)
        drafter = build_drafter(settings, on.view, counts, seed=1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in drafter.parameters():
                noise = torch.rand(parameter.shape, generator=generator).to(parameter)
                parameter.add_(0.4 * (noise - 0.4))
        return drafter.eval()

    return make


@pytest.fixture
def settings():
    def make(form="vllm", **keys):
        defaults = yaml.safe_load((conf_dir() / "export" / f"{form}.yaml").read_text())
        return ExportSettings(**{**defaults, **keys})

    return make


@pytest.fixture(scope="session")
def drafted():
    """What a drafter proposes after a prompt: features [T ...], next ids, tokens, log-probabilities."""

    def run(target, drafter, depth=3):
        ids = torch.tensor([PROMPT])
        length = len(PROMPT) - 1
        kv = target.open_kv(1, 64)
        rows = torch.tensor([0])
        step = Step(rows=rows, ids=ids[:, :-1], base=torch.tensor([0]), live=length)
        seen = target.run(kv, step, request=drafter.needs).features
        state = drafter.open(1, 64, kv)
        budget = DraftBudget(rows, depth, Sampling(temperature=1.0))
        seen_ids = Observation(
            rows, ids[:, :-1], torch.tensor([length]), ids[:, 1:], seen.taps, seen.final
        )
        with torch.inference_mode():
            drafter.observe(state, seen_ids)
            tree = drafter.propose(state, budget, torch.full((1, depth), 0.4))
        return (
            seen,
            ids[0, 1:],
            tree.tokens[0],
            tree.law_probs[0].log().clamp_min(-80),
            tree.law_ids,
        )

    return run
