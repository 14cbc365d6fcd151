"""An installed flash-attention kernel for steps without a tree: chains, single tokens, chunks.

FlashAttention-2 (`flash_attn`) and -3 (`flash_attn_interface`, on Hopper) read each row's keys
where they lie, up to a length of its own: no mask is made, nothing is gathered, and the host waits
for nothing, so a CUDA graph can hold it. Neither is a requirement of draftlab, and nothing is
looked for outside CUDA. Written from their documented interface; what is found is used only where
it agrees with plain attention and with the reference at load. Read find_flash_chains, then
FlashChain.over.
"""

import importlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from draftlab.errors import UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.cache import KVBuffers
from draftlab.targets.step import Step

log = logging.getLogger(__name__)

_DTYPES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_HEAD_MULTIPLE = 8  # other widths are refused, or padded by copying the whole memory every call
_OLDEST_CAPABILITY, _HOPPER = 8, 9


@dataclass(frozen=True, slots=True)
class Package:
    """A generation of the kernel.

    Attributes:
        module: what is imported.
        distribution: what is installed.
    """

    module: str
    distribution: str


FLASH_2 = Package("flash_attn", "flash-attn")
FLASH_3 = Package("flash_attn_interface", "flash-attn-3")


@dataclass(frozen=True, slots=True)
class FlashChain:
    """A kernel that was found.

    Attributes:
        name: package and version, for reports.
        kernel: `flash_attn_with_kvcache`.
    """

    name: str
    kernel: Callable[..., Any]

    def over(self, kv: KVBuffers, step: Step, *, is_prefix: bool) -> "ChainPass":
        """Prepare what all layers of one pass share.

        Args:
            kv: memory, where each layer's new keys and values are written before it attends.
            step: without `ancestors` and `segments`.
            is_prefix: `step.rows` is 0..R-1 in order.
        """
        lengths = (step.base + step.ids.shape[1]).to(torch.int32)
        rows = None if is_prefix else step.rows.to(torch.int32)
        return ChainPass(self.kernel, kv, step.live, lengths, rows)


@dataclass(frozen=True, slots=True)
class ChainPass:
    """The kernel over the rows of one step.

    Attributes:
        kernel: of `FlashChain`.
        kv: memory.
        live: slots from 0 that any row may look at.
        lengths: slots of each row that are filled, the new ones included, as int32.
        rows: slots of the rows, as int32; None when they are 0..R-1 in order.
    """

    kernel: Callable[..., Any]
    kv: KVBuffers
    live: int
    lengths: Int[Tensor, " R"]
    rows: Int[Tensor, " R"] | None

    def __call__(
        self,
        layer: int,
        query: Float[Tensor, "R T Hq Dh"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "R T Hq Dh"]:
        """Let column t of a row see its slots up to base + t.

        Args:
            layer: which decoder layer.
            query: heads in the model's order: head h uses key head h // G.
            scale: multiplies the scores.
            window: tokens a column sees, itself included, or None.
        """
        both = self.kv.data[layer].narrow(2, 0, self.live)
        if self.rows is None:
            both = both.narrow(1, 0, query.shape[0])
        keys, values = both.unbind(0)
        out = self.kernel(
            query,
            keys,
            values,
            cache_seqlens=self.lengths,
            cache_batch_idx=self.rows,
            softmax_scale=scale,
            causal=True,  # aligned at the last column and the last filled slot
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        # some versions give the log-sum-exp along, asked for or not
        return out[0] if isinstance(out, tuple) else out


def find_flash_chains(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> Iterator[FlashChain]:
    """Look for installed kernels that could serve, best first.

    Args:
        device: of the target.
        dtype: of its weights and memory.
        head_dim: width of a head.
    """
    for package in packages_for(device, dtype, head_dim):
        try:
            module = importlib.import_module(package.module)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # built for another torch or CUDA: raises any of a dozen
            log.warning("%s is installed, but cannot be imported: %s", package.module, error)
            continue
        kernel = getattr(module, "flash_attn_with_kvcache", None)
        if kernel is not None:
            yield FlashChain(f"{package.distribution} {_version(module, package)}", kernel)


def packages_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Package, ...]:
    """Name the generations made for such work, best first."""
    if device.type != "cuda" or dtype not in _DTYPES:
        return ()
    if head_dim > _WIDEST_HEAD or head_dim % _HEAD_MULTIPLE:
        return ()
    capability, _ = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return ()
    return (FLASH_3, FLASH_2) if capability == _HOPPER else (FLASH_2,)


def check_flash_chain(
    chain: FlashChain,
    *,
    heads: int,
    kv_shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    tolerance: float,
) -> None:
    """Compare a kernel with plain attention on random numbers, with and without a window.

    A target's own window is mostly longer than the texts its doors are compared on. Here it is
    short, and rows are ragged and out of order.

    Args:
        chain: what was found.
        heads: of a query.
        kv_shape: key heads and head width.
        dtype: of the target.
        device: of the target.
        tolerance: largest difference allowed, as a share of the largest value.

    Raises:
        UnsupportedTarget: it gives other numbers.
    """
    kv_heads, width = kv_shape
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Float[Tensor, "..."]:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    scale = width**-0.5
    rows, base = torch.tensor([[2, 0], [300, 9]], device=device)
    with torch.inference_mode():
        kv = KVBuffers(
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=width,
            slots=3,
            capacity=320,  # long enough for a kernel that cuts long rows into parts
            dtype=dtype,
            device=device,
        )
        kv.data.copy_(random(*kv.data.shape))
        # named rows are gathered by index, rows in order are read in place; single tokens take
        # ways of their own
        for named, columns in itertools.product((rows, None), (3, 1)):
            chosen = torch.arange(2, device=device) if named is None else named
            ids = torch.zeros(2, columns, dtype=torch.int64, device=device)
            step = Step(chosen, ids, base, 304)
            query = random(2, columns, heads, width)
            keys, values = kv.read(0, chosen, step.live, is_prefix=False)
            attend_by_kernel = chain.over(kv, step, is_prefix=named is None)
            for window in (None, 5):
                mask = tile_mask(step.visible(window), heads // kv_heads)
                expected = attend(query.transpose(1, 2), keys, values, mask, scale=scale)
                found = attend_by_kernel(0, query, scale=scale, window=window)
                gap = float((found - expected).abs().max() / expected.abs().max())
                if not gap <= tolerance:
                    raise UnsupportedTarget(
                        f"{chain.name} with window {window} attends otherwise than plain "
                        f"attention: relative difference {gap:.3g}, expected at most {tolerance}"
                    )


def _version(module: Any, package: Package) -> str:
    try:
        return getattr(module, "__version__", None) or metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return "(version unknown)"
