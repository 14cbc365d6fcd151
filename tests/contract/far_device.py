"""A second device that is not there: tensors of it hold ordinary memory, say another device, and
refuse to meet tensors of the first one, as two real devices do.

Under `FarDevice()` whatever is made on FAR, or computed from what is there, is a `FarTensor`. Only
`to`, `cpu` and `copy_` cross, by a copy. A tensor without dimensions may come from the processor, as CUDA
allows it. Nothing of a device's own kernels is shown by this: only who meets whom.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

FAR = torch.device("xpu", 1)
_HOST = torch.device("cpu")
_OF_THE_OBJECT = {"__get__", "__set__", "requires_grad_", "backward", "grad"}
_MAY_MIX = (torch.Tensor.copy_, torch._has_compatible_shallow_copy_type)


class FarTensor(torch.Tensor):
    """Memory of the processor that says it is elsewhere."""

    @property
    def device(self):
        return FAR


class Mixed(RuntimeError):
    """Tensors of two devices met."""


class FarDevice(TorchFunctionMode):
    """While it holds, FAR is a device like any other; counts what crosses to it and from it."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings = 0
        self.is_strict = True  # False for a backward pass: its gradients have no type of Python's

    def __enter__(self):
        # else a module keeps its parameter objects, and with them their type
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.as_subclass):
            return self._cross(func, args, kwargs)
        is_made_far = kwargs.get("device") is not None and torch.device(kwargs["device"]) == FAR
        if is_made_far:
            kwargs["device"] = _HOST
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        is_far = [isinstance(x, FarTensor) for x in given]
        are_apart = any(is_far) and not all(
            far or x.ndim == 0 for x, far in zip(given, is_far, strict=True)
        )
        if are_apart and self.is_strict and func not in _MAY_MIX:
            name = getattr(func, "__name__", str(func))
            raise Mixed(f"{name} of {[f'{tuple(x.shape)} {x.device}' for x in given]}")
        if getattr(func, "__name__", "") in _OF_THE_OBJECT:  # an alias has other flags
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
            return tree_map(lambda x: _wrap(x) if any(is_far) else x, out)
        near = {id(x): _plain(x) for x in given}
        args, kwargs = tree_map(lambda x: near.get(id(x), x), (args, kwargs))
        out = func(*args, **kwargs)
        owners = {id(near[id(x)]): x for x in given}
        wants = any(is_far) or is_made_far
        return tree_map(lambda x: owners.get(id(x), _wrap(x) if wants else x), out)

    def _cross(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensor, rest = args[0], list(args[1:])
        if func is torch.Tensor.as_subclass:
            return func(*args, **kwargs)
        there = _HOST if func is torch.Tensor.cpu else None
        for place, value in [*enumerate(rest), *kwargs.items()]:
            if isinstance(value, torch.Tensor):
                there, dtype = value.device, value.dtype
                rest, kwargs = [dtype], {}
                break
            if isinstance(value, str | torch.device):
                there = torch.device(value)
                (rest if isinstance(place, int) else kwargs)[place] = _HOST
        is_far = isinstance(tensor, FarTensor)
        moved = func(_plain(tensor), *rest, **kwargs)
        goes_far = is_far if there is None else there == FAR
        if goes_far == is_far and moved is _plain_of(tensor, moved):
            return tensor
        if goes_far != is_far:
            self.crossings += 1
            if moved.data_ptr() == tensor.data_ptr():
                moved = moved.clone()
        return _wrap(moved) if goes_far else moved


def _plain(x: Any) -> Any:
    return x.as_subclass(torch.Tensor) if isinstance(x, FarTensor) else x


def _plain_of(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor | None:
    """Give `moved` itself when nothing was done to the tensor."""
    same = moved.data_ptr() == tensor.data_ptr() and moved.dtype == tensor.dtype
    return moved if same and moved.shape == tensor.shape else None


def _wrap(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and not isinstance(x, FarTensor):
        return x.as_subclass(FarTensor)
    return x
