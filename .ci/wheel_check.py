"""Checks an installed hf_lowmem: that it has its compiled core, or none, and that a step gives the right bits.

python wheel_check.py native    the core is there, and every instruction set of this machine equals plain torch
python wheel_check.py torch     it is not, a step runs all the same, and exactly one warning says so
"""

from __future__ import annotations

import os
import sys
import warnings

import torch

import hf_lowmem
from hf_lowmem import LowBitAdamW
from hf_lowmem.kernels import native


def trained(isa: str | None) -> list[torch.Tensor]:
    """Three steps of two parameters on one instruction set; the weights after them."""
    os.environ.pop("HF_LOWMEM_ISA", None)
    if isa is not None:
        os.environ["HF_LOWMEM_ISA"] = isa
    source = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(5000, generator=source).to(torch.bfloat16)),
        torch.nn.Parameter(torch.randn(70, 100, generator=source)),
    ]
    optimizer = LowBitAdamW(params, lr=1e-2)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=source).to(p.dtype)
        optimizer.step()
    return [p.detach() for p in params]


def main(wanted: str) -> None:
    print(f"hf_lowmem {hf_lowmem.__version__} from {os.path.dirname(hf_lowmem.__file__)}; engines: {native.isas()}")
    if native.available() != (wanted == "native"):
        raise SystemExit(f"wanted the {wanted} engine, but native.available() is {native.available()}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        default = trained(None)
        trained(None)
    about_core = [str(w.message) for w in caught if "compiled core" in str(w.message)]
    if len(about_core) != (wanted == "torch"):
        raise SystemExit(f"wanted {int(wanted == 'torch')} warnings about the core, got {about_core}")
    for isa in native.isas():
        if not all(map(torch.equal, trained(isa), default)):
            raise SystemExit(f"{isa} differs from {native.isas()[0]}")
    print(f"ok: {', '.join(native.isas())} give the same bits")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "native")
