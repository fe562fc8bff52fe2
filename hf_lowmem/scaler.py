"""torch's GradScaler, where gradients wait in host memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler


def wait_for_scales() -> None:
    """Has GradScaler read its scale in host memory only when that has arrived there.

    It copies the scale to the device of each gradient without waiting. On a GPU the order of its stream sees to it that
    the copy is there in time; a CPU that unscales gradients in its own memory may read what was there before.
    """
    replicator: Any = getattr(grad_scaler, "_MultiDeviceReplicator", None)
    if replicator is None or hasattr(replicator.get, "__wrapped__"):
        return
    stock = replicator.get

    @functools.wraps(stock)
    def get(self: Any, device: torch.device) -> Tensor:
        there: Tensor = stock(self, device)
        if device.type == "cpu" and self.master.device.type == "cuda":
            torch.cuda.current_stream(self.master.device).synchronize()
        return there

    replicator.get = get
