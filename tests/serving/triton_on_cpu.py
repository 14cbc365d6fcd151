"""Let vLLM's second model runner run on a CPU, its kernels in Triton's interpreter. Import it before vLLM.

Triton compiles for no CPU, so vLLM would go on without it and with its first runner, which knows no
DSpark. Here a CPU stands among Triton's devices that nothing is compiled for: interpreted kernels
are plain Python, right and slow.
"""

import os
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

from triton.backends import backends

backends.clear()
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
