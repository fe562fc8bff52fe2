"""What the tests of integer products share: a layer and its plain twin, its gradients, how far two tensors differ."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_lowmem.lowbit import quantize


def layer(kind="linear", bias=True, dtype=torch.float32, **options):
    torch.manual_seed(0)
    plain = nn.Linear(96, 80, bias=bias) if kind == "linear" else Conv1D(80, 96)
    model = nn.Sequential(plain.to(dtype))
    reference = copy.deepcopy(model)
    assert quantize(model, **options) == ["0"]
    return model, reference


def gradients(model, x, g):
    x = x.clone().requires_grad_()
    params = [p for p in model.parameters() if p.requires_grad]
    out = model(x)
    return out.detach(), dict(zip(["x", *range(len(params))], torch.autograd.grad(out, [x, *params], g), strict=True))


def error(found, exact) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())
