"""A flash-attention kernel in the fast door, on a stand-in that does what the real ones document.

The real kernels need a CUDA device; what is proven here is all that lies around them.
"""

import importlib
import logging
import sys
from types import ModuleType

import pytest
import torch
from fast_families import FAST_FAMILIES, MIXED_WINDOWS

from draftlab.cli.bench_gpu_target import StaticAnswers, settings_of
from draftlab.decoding.decoder import Decoder
from draftlab.errors import UnsupportedTarget
from draftlab.targets import flash_chain
from draftlab.targets.fast import FastDoor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.flash_chain import (
    FLASH_2,
    FLASH_3,
    FlashChain,
    check_flash_chain,
    find_flash_chains,
    packages_for,
)
from draftlab.targets.load import choose_kernels
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

MISTAKES = [
    "a slot short",
    "aligned at the top left",
    "other rows",
    "a wide window",
    "heads in another order",
    "raises",
]


class StandIn:
    """`flash_attn_with_kvcache` in plain torch; can be wrong on purpose.

    Counts calls by width, and whether rows were named.
    """

    def __init__(self, mistake=None, gives_tuple=False):
        self.mistake, self.gives_tuple, self.calls = mistake, gives_tuple, []

    def __call__(
        self,
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        *,
        cache_seqlens,
        cache_batch_idx=None,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
    ):
        assert k is None
        assert v is None
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
        assert cache_seqlens.dtype == torch.int32
        if self.mistake == "raises":
            raise NotImplementedError("no kernel image is available")
        self.calls.append((q.shape[1], cache_batch_idx is not None))
        if cache_batch_idx is None:
            assert k_cache.shape[0] == q.shape[0]
        else:
            assert cache_batch_idx.dtype == torch.int32
            rows = cache_batch_idx.long()
            if self.mistake == "other rows":
                rows = torch.arange(len(rows))
            k_cache, v_cache = k_cache[rows], v_cache[rows]
        width, slots = q.shape[1], k_cache.shape[1]
        assert int(cache_seqlens.max()) <= slots
        ends = cache_seqlens.long().view(-1, 1, 1) - int(self.mistake == "a slot short")
        slot, column = torch.arange(slots), torch.arange(width).view(1, -1, 1)
        here = column + (0 if self.mistake == "aligned at the top left" else ends - width)
        seen = slot < ends
        if causal:
            seen = seen & (slot <= here)
        left, right = window_size
        if left >= 0:
            seen = seen & (slot >= here - left - int(self.mistake == "a wide window"))
        if right >= 0:
            seen = seen & (slot <= here + right)
        groups = q.shape[2] // k_cache.shape[2]
        keys, values = (cache.repeat_interleave(groups, 2) for cache in (k_cache, v_cache))
        if self.mistake == "heads in another order":
            keys, values = (c.repeat(1, 1, groups, 1) for c in (k_cache, v_cache))
        scores = torch.einsum("rthd,rshd->rhts", q, keys) * softmax_scale
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        probs = scores.softmax(-1).nan_to_num(0.0)  # a column that sees nothing gives zeros
        out = torch.einsum("rhts,rshd->rthd", probs, values)
        return (out, scores.logsumexp(-1)) if self.gives_tuple else out


@pytest.fixture
def install(monkeypatch):
    """Put a kernel where a package would have it, and let it be looked for on this device.

    To be used after a target is built: transformers, too, asks for such packages.
    """

    def put(kernel, package=FLASH_2, version="2.8.3"):
        module = ModuleType(package.module)
        module.flash_attn_with_kvcache = kernel
        if version is not None:
            module.__version__ = version
        monkeypatch.setitem(sys.modules, package.module, module)
        monkeypatch.setattr(flash_chain, "packages_for", lambda *asked: (package,))
        return kernel

    return put


def ids_of(rows, width, seed):
    return torch.randint(0, 250, (rows, width), generator=torch.Generator().manual_seed(seed))


def story():
    """Steps over one memory of 4 slots, each with whether it is a tree."""
    two, three = torch.tensor([3, 1]), torch.tensor([0, 1, 2])
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) > 0
    tree = {"depths": torch.tensor([[0, 1, 1]]).expand(3, -1), "ancestors": sees.expand(3, -1, -1)}
    return [
        (Step(torch.arange(4), ids_of(4, 11, 1), torch.zeros(4, dtype=torch.long), 11), False),
        (Step(three, ids_of(3, 5, 2), torch.tensor([11, 4, 8]), 16, is_prefix=True), False),
        (Step(three, ids_of(3, 3, 3), torch.tensor([12, 9, 10]), 20, **tree), True),
        (Step(three, ids_of(3, 4, 4), torch.tensor([14, 10, 13]), 32), False),
        (Step(two, ids_of(2, 6, 5), torch.tensor([9, 15]), 24), False),
        (Step(two, ids_of(2, 1, 6), torch.tensor([15, 21]), 24), False),
        (Step(torch.tensor([2]), ids_of(1, 1, 7), torch.tensor([17]), 18), False),
        (Step(torch.tensor([0]), ids_of(1, 1, 8), torch.tensor([18]), 19), False),
    ]


def tell(target, door):
    """Run the story; give what each step gave, and the memory at the end."""
    request = FeatureRequest(tuple(range(1, target.spec.num_layers + 1)), wants_final=True)
    kv = target.open_kv(4, 40)
    given = []
    with torch.inference_mode():
        for step, _ in story():
            out = door.forward(kv, step, request, True)
            given += [out.logits.clone(), out.features.taps.clone(), out.features.final.clone()]
    return [*given, kv.data.clone()]


def doors_of(family, sizes, kernel):
    target = tiny_target(family, **sizes)
    doors = []
    for chain in (None, FlashChain("stand-in", kernel)):
        with torch.inference_mode():
            door = FastDoor(target.model, target.config, target.report["windows"])
        door.chain = chain
        doors.append(door)
    return target, *doors


@pytest.mark.parametrize("gives_tuple", [False, True])
@pytest.mark.parametrize("case", FAST_FAMILIES)
def test_the_fast_door_gives_the_same_numbers_through_the_kernel(case, gives_tuple):
    target, plain, flash = doors_of(*FAST_FAMILIES[case], StandIn(gives_tuple=gives_tuple))
    through_kernel = tell(target, flash)
    for expected, found in zip(tell(target, plain), through_kernel, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for expected, found in zip(tell(target, target.reference), through_kernel, strict=True):
        # transformers takes norms and angles in float32 whatever the weights are
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("mistake", MISTAKES[:-1])
def test_the_story_tells_a_wrong_kernel_from_a_right_one(mistake):
    target, plain, flash = doors_of("mistral", {"num_hidden_layers": 1}, StandIn(mistake))
    pairs = zip(tell(target, plain), tell(target, flash), strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs) > 0.01


def test_every_layer_of_every_step_but_trees_goes_through_the_kernel():
    kernel = StandIn()
    target, _, flash = doors_of("mistral", {}, kernel)
    tell(target, flash)
    of_chains = [step for step, is_tree in story() if not is_tree]
    layers = target.spec.num_layers
    assert [width for width, _ in kernel.calls] == [
        step.ids.shape[1] for step in of_chains for _ in range(layers)
    ]


def test_rows_in_order_are_not_named_and_others_are():
    kernel = StandIn()
    target, _, flash = doors_of("llama", {"num_hidden_layers": 1}, kernel)
    tell(target, flash)
    assert [names for _, names in kernel.calls] == [False, False, False, True, True, True, False]


def test_no_mask_is_made_for_a_chain(monkeypatch):
    target, plain, flash = doors_of("llama", {"num_hidden_layers": 1}, StandIn())
    made = []
    visible = Step.visible
    monkeypatch.setattr(
        Step, "visible", lambda step, window: made.append(step) or visible(step, window)
    )
    tell(target, flash)
    assert len(made) == 1
    assert made[0].ancestors is not None
    tell(target, plain)
    assert len(made) > 2


def test_packed_rows_do_not_go_through_the_kernel():
    kernel = StandIn()
    target, plain, flash = doors_of("mistral", {"num_hidden_layers": 1}, kernel)
    zeros = torch.zeros(2, dtype=torch.long)
    samples = torch.tensor([[0] * 7 + [1] * 5, [0] * 10 + [-1] * 2])
    places = torch.tensor([[*range(7), *range(5)], [*range(10), 0, 0]])
    step = Step(torch.arange(2), ids_of(2, 12, 1), zeros, 12, places, segments=samples)
    with torch.inference_mode():
        logits = [
            door.forward(target.open_kv(2, 12), step, FeatureRequest(), True).logits
            for door in (plain, flash)
        ]
    assert kernel.calls == []
    assert torch.equal(*logits)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_columns_that_count_are_the_same_when_dummies_lie_past_the_table(family):
    target, plain, flash = doors_of(family, {}, StandIn())
    rows, base = torch.tensor([0, 1]), torch.tensor([18, 12])
    prompt = Step(rows, ids_of(2, 20, 1), torch.zeros(2, dtype=torch.long), 20)
    chain = Step(rows, ids_of(2, 6, 2), base, 24).within(21)
    assert chain.depths.tolist() == [[0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]]
    found = []
    for door in (plain, flash):
        kv = target.open_kv(2, 40)
        with torch.inference_mode():
            door.forward(kv, prompt, FeatureRequest(), False)
            found.append(door.forward(kv, chain, FeatureRequest(), True).logits)
    counts = torch.arange(6) <= (20 - base).unsqueeze(1)
    torch.testing.assert_close(found[1][counts], found[0][counts], rtol=0, atol=1e-10)


def test_some_layers_alone_go_through_the_kernel():
    kernel = StandIn()
    target, plain, flash = doors_of("qwen3", MIXED_WINDOWS, kernel)
    hidden = []
    for door in (plain, flash):
        kv = target.open_kv(4, 40)
        with torch.inference_mode():
            door.forward(kv, story()[0][0], FeatureRequest(), False)
            kernel.calls.clear()
            hidden.append(door.run_layers(kv, story()[1][0], (0, 3)))
    assert len(kernel.calls) == 2
    torch.testing.assert_close(hidden[1], hidden[0], rtol=0, atol=1e-10)


def test_rounds_on_the_device_alone_go_through_the_kernel():
    """With empty slots and rows that are done: the stand-in refuses lengths past memory."""
    target = tiny_target("qwen3", **MIXED_WINDOWS)
    choose_kernels(target, "fast")
    settings = settings_of()
    prompts, limits = [[1, 2, 3], [7] * 20, [9], [4] * 11], [30, 3, 12, 9]
    expected = Decoder(target, None, settings).generate(prompts, max_new_tokens=limits)

    assert isinstance(target.door, FastDoor)
    kernel = StandIn()
    target.door.chain = FlashChain("stand-in", kernel)
    rounds = StaticAnswers(target, None, settings, captures=False)
    found = rounds.generate(prompts, max_new_tokens=limits, batch_size=3)
    assert [answer.output_ids for answer in found] == [answer.output_ids for answer in expected]
    assert (1, False) in kernel.calls


def test_a_kernel_that_agrees_is_taken_at_load(install):
    target = tiny_target("llama")
    kernel = install(StandIn())
    choose_kernels(target, "auto")
    assert target.report["kernels"] == "fast"
    assert target.report["attention"] == "flash-attn 2.8.3"
    assert target.report["rows_bitwise_equal"] is False
    kernel.calls.clear()
    kv = target.open_kv(1, 16)
    target.run(kv, Step(torch.tensor([0]), ids_of(1, 4, 0), torch.tensor([0]), 4))
    assert len(kernel.calls) == target.spec.num_layers


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kernels", ["auto", "fast"])
def test_a_kernel_that_differs_is_left_with_a_warning(install, caplog, mistake, kernels):
    target = tiny_target("mistral", num_hidden_layers=2)
    install(StandIn(mistake))
    with caplog.at_level(logging.WARNING, "draftlab.targets.load"):
        choose_kernels(target, kernels)
    assert "flash-attn 2.8.3 is installed, but not used" in caplog.text
    reason = "no kernel image" if mistake == "raises" else "attends otherwise"
    assert reason in caplog.text
    assert target.report["kernels"] == "fast"
    assert target.report["attention"] == "sdpa"
    for expected, found in zip(
        tell(target, target.reference), tell(target, target.door), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_the_doors_are_compared_through_the_kernel(install, caplog):
    """A kernel that errs only on what its own check does not do: a whole prompt of 8 tokens."""

    class OnPrompts(StandIn):
        def __call__(self, q, *others, **named):
            out = super().__call__(q, *others, **named)
            return out * 0.5 if q.shape[1] == 8 else out

    target = tiny_target("llama", num_hidden_layers=2)
    install(OnPrompts())
    choose_kernels(target, "auto")
    assert target.report["attention"] == "sdpa"
    assert "the fast kernels give other" in caplog.text


@pytest.mark.parametrize("mistake", [None, *MISTAKES[:-1]])
def test_the_check_tells_right_from_wrong_in_half_precision_too(mistake):
    def check():
        check_flash_chain(
            FlashChain("stand-in", StandIn(mistake)),
            heads=4,
            kv_shape=(2, 16),
            dtype=torch.bfloat16,
            device=CPU,
            tolerance=0.06,
        )

    if mistake is None:
        check()
    else:
        with pytest.raises(UnsupportedTarget, match=r"stand-in with window .* attends otherwise"):
            check()


def test_a_kernel_that_gives_no_numbers_is_refused():
    def broken(q, *others, **named):
        return torch.full_like(q, torch.nan)

    with pytest.raises(UnsupportedTarget, match="relative difference nan"):
        check_flash_chain(
            FlashChain("broken", broken),
            heads=2,
            kv_shape=(2, 16),
            dtype=torch.float64,
            device=CPU,
            tolerance=1e-6,
        )


def test_nothing_is_looked_for_on_the_processor(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert not list(find_flash_chains(CPU, torch.bfloat16, 64))


def test_the_processor_attends_through_torch():
    target = tiny_target("llama", num_hidden_layers=1)
    choose_kernels(target, "auto")
    assert target.report["attention"] == "sdpa"


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "expected"),
    [
        ((9, 0), torch.bfloat16, 128, (FLASH_3, FLASH_2)),
        ((8, 6), torch.float16, 256, (FLASH_2,)),
        ((10, 0), torch.bfloat16, 64, (FLASH_2,)),
        ((7, 5), torch.float16, 64, ()),
        ((9, 0), torch.float32, 64, ()),
        ((9, 0), torch.bfloat16, 264, ()),
        ((9, 0), torch.bfloat16, 100, ()),
    ],
)
def test_packages_are_those_made_for_the_device_and_the_numbers(
    monkeypatch, capability, dtype, head_dim, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert packages_for(CUDA, dtype, head_dim) == expected


@pytest.mark.parametrize("error", [ModuleNotFoundError, OSError, RuntimeError, AttributeError])
def test_a_package_that_cannot_be_imported_is_no_kernel(monkeypatch, caplog, error):
    def fail(name):
        raise error(f"{name}: undefined symbol")

    monkeypatch.setattr(flash_chain, "packages_for", lambda *asked: (FLASH_3, FLASH_2))
    monkeypatch.setattr(importlib, "import_module", fail)
    with caplog.at_level(logging.WARNING):
        assert not list(find_flash_chains(CUDA, torch.bfloat16, 64))
    # nobody is told of what is not there; a broken one is named
    assert ("flash_attn is installed, but" in caplog.text) == (error is not ModuleNotFoundError)


def test_a_package_of_that_name_without_the_function_is_no_kernel(install):
    """Such as what only FlashAttention-4 leaves of the name `flash_attn`."""
    install(StandIn())
    del sys.modules["flash_attn"].flash_attn_with_kvcache
    assert not list(find_flash_chains(CUDA, torch.bfloat16, 64))


def test_the_next_package_is_tried_where_the_first_is_absent(install, monkeypatch):
    kernel = install(StandIn())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(flash_chain, "packages_for", lambda *asked: (FLASH_3, FLASH_2))
    found = list(find_flash_chains(CUDA, torch.bfloat16, 64))
    assert found == [FlashChain("flash-attn 2.8.3", kernel)]


def test_the_next_package_is_taken_where_the_first_differs(install, monkeypatch, caplog):
    target = tiny_target("mistral", num_hidden_layers=2)
    install(StandIn("a wide window"), FLASH_3, version="3.0")
    install(StandIn())
    monkeypatch.setattr(flash_chain, "packages_for", lambda *asked: (FLASH_3, FLASH_2))
    choose_kernels(target, "auto")
    assert "flash-attn-3 3.0 is installed, but not used" in caplog.text
    assert target.report["attention"] == "flash-attn 2.8.3"


def test_a_package_without_a_version_says_so(install):
    install(StandIn(), FLASH_3, version=None)
    (found,) = find_flash_chains(CUDA, torch.bfloat16, 64)
    assert found.name == "flash-attn-3 (version unknown)"
