"""Full fine-tuning of large language models on one consumer GPU, behind the Hugging Face Trainer's own flags.

Importing this package touches no GPU and imports neither torch nor transformers. It sees to it that transformers knows
``optim="cpu_adam4bit"``, ``"cpu_adam8bit"`` and ``"cpu_adam32bit"`` (``registration.py`` says how; with
``HF_LOWMEM_REGISTER=0`` in the environment it leaves transformers alone).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .registration import register

if TYPE_CHECKING:
    from .attachment import attach as attach
    from .attachment import detach as detach
    from .config import LowMemConfig as LowMemConfig
    from .export import save_quantized as save_quantized
    from .factory import create_optimizer as create_optimizer
    from .loading import load as load
    from .lowbit import dequantize as dequantize
    from .lowbit import quantize as quantize
    from .optim import LowBitAdamW as LowBitAdamW
    from .plan import DoesNotFit as DoesNotFit
    from .plan import Plan as Plan
    from .trainer import LowMemMixin as LowMemMixin
    from .trainer import LowMemTrainer as LowMemTrainer

__version__ = "0.1.0"
_HOMES = {
    "DoesNotFit": "plan",
    "LowBitAdamW": "optim",
    "LowMemConfig": "config",
    "LowMemMixin": "trainer",
    "LowMemTrainer": "trainer",
    "Plan": "plan",
    "attach": "attachment",
    "create_optimizer": "factory",
    "dequantize": "lowbit",
    "detach": "attachment",
    "load": "loading",
    "quantize": "lowbit",
    "save_quantized": "export",
}
__all__ = [  # noqa: PLE0604 - the names of _HOMES exist, by __getattr__
    "__version__",
    "register",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hf_lowmem' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("HF_LOWMEM_REGISTER", "1") != "0":
    register()
