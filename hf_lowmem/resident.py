"""Parameters whose states stay where they are, on a GPU, and are updated there by the Triton kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .home import Mark, mark
from .kernels import native
from .kernels.adam import AdamTensor, adam_step, state_tensor
from .kernels.weights import is_stand_in
from .layer import gradient_dtype
from .state import State, new_state

Work = tuple[Tensor, Mapping[str, Any], State, int | None]
LAUNCHED = 64  # parameters that the CPU makes ready before the device begins with them


class ResidentUpdates:
    """Steps parameters on their device. Nothing waits for the device."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, Mark] = {}  # after our last write
        self._skipped: dict[tuple[torch.device, int], Tensor] = {}  # by stream

    def prepare(self, p: Tensor, state: State, wanted: int | None) -> None:
        """Brings a state to its parameter's device and makes its master fit the weight.

        A weight that somebody else has written since the last step has lost its 24-bit master: that starts at the
        weight again. Where it was written through ``.data``, of which nothing can be seen, the master is off by half of
        the weight's last place at most, as with a parameter in RAM.

        Args:
            wanted: bits of the master, 16 or 24; None for an fp32 weight.
        """
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device != p.device:
                state[name] = value.to(p.device)
        if wanted != 24:
            state.pop("extension", None)
        elif "extension" not in state:
            state["extension"] = torch.zeros(p.numel(), dtype=torch.int8, device=p.device)
        elif p in self._seen and self._seen[p] != mark(p):
            state["extension"].zero_()

    def knows(self, p: Tensor) -> bool:
        """Whether a parameter has been stepped here."""
        return p in self._seen

    def forget(self, p: Tensor) -> None:
        """Forgets what a parameter was like: it is about to be moved, or stepped elsewhere."""
        self._seen.pop(p, None)

    def step(self, work: Sequence[Work], seed: int, scale: float) -> None:
        """Steps parameters by their gradients. Before anything of a step is written, ``look``; after all, ``written``.

        Args:
            work: (parameter, its group, its state, bits of the master that it is to have, as for ``prepare``).
            seed: of the optimizer.
            scale: what gradients are to be multiplied with.
        """
        by_device: dict[torch.device, list[Work]] = {}
        for item in work:
            by_device.setdefault(item[0].device, []).append(item)
        for device, items in by_device.items():
            with torch.cuda.device(device if device.type == "cuda" else -1):
                for start in range(0, len(items), LAUNCHED):
                    self._launch(items[start : start + LAUNCHED], seed, scale)

    def look(self, work: Sequence[Work]) -> None:
        """Takes in what others have written since the last step, and brings states to where they are needed."""
        for p, _, state, wanted in work:
            if self._seen.get(p) != mark(p) or (wanted == 24) != ("extension" in state):
                self.prepare(p, state, wanted)

    def written(self, params: Iterable[Tensor]) -> None:
        """Remembers what parameters are like after the last write of a step: pieces of one tensor share its counter."""
        for p in params:
            self._seen[p] = mark(p)

    def _launch(self, work: Sequence[Work], seed: int, scale: float) -> None:
        """Steps parameters of one device. The CPU's time for each counts: an adapter has hundreds, and little to do."""
        tensors = []
        for p, group, state, _ in work:
            state["step"] = step = state["step"] + 1
            grad = p.grad
            assert grad is not None
            grad = grad if grad.is_contiguous() else grad.contiguous()
            tensors.append(state_tensor(state, group, seed, p, grad, scale, step))
        self.step_tensors(tensors)
        torch.autograd.graph.increment_version([p for p, *_ in work])

    def step_tensors(self, tensors: list[AdamTensor]) -> None:
        """Steps tensors of one device, whatever their shapes if they are contiguous, in its current stream."""
        from .kernels import triton_adam

        device = tensors[0].weight.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        skipped, known = triton_adam.adam_step(tensors), self._skipped.get((device, stream))
        self._skipped[device, stream] = skipped if known is None else known.add_(skipped)

    def step_anywhere(self, tensors: list[AdamTensor], threads: int | None) -> int:
        """The same for a "device" that may be host memory. Returns the number of blocks left out there."""
        if tensors[0].weight.device.type == "cpu":
            return native.adam_step(tensors, threads)
        self.step_tensors(tensors)
        return 0

    def skipped_blocks(self) -> int:
        """Blocks left as they were for their gradients, so far. Waits for the device."""
        for device in {device for device, _ in self._skipped if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return sum(int(skipped) for skipped in self._skipped.values())


# Of a parameter: its dtype, the bits of a moment, whether it has a 24-bit master, the dtype of its gradient.
Kind = tuple[torch.dtype, int, bool, torch.dtype]
PROBE = 2 * 1024 + 300  # values of a parameter that is tried: whole tiles, and a rest


def kinds_of(widths: Mapping[Tensor, tuple[int, int | None]]) -> frozenset[Kind]:
    """The kinds among parameters, by the bits of a moment and of the master of each, that the device can update."""
    known = ((p, bits, master) for p, (bits, master) in widths.items() if master != 32)
    return frozenset(
        (torch.float32 if is_stand_in(p) else p.dtype, bits, master == 24, gradient_dtype(p))
        for p, bits, master in known
    )


def why_not(device: torch.device, kinds: frozenset[Kind]) -> str | None:
    """Why parameters of these kinds cannot be updated on a device: what goes wrong when that is tried; None if nothing.

    Triton may be missing, or the C compiler that it calls; it may not know the GPU, or compute other bits there than
    the oracle does.
    """
    return next(filter(None, (_goes_wrong(device, kind) for kind in sorted(kinds, key=str))), None)


@functools.cache
def _goes_wrong(device: torch.device, kind: Kind) -> str | None:
    try:
        from .kernels import triton_adam

        ours, oracle = _probe(kind, device), _probe(kind, torch.device("cpu"))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            counts = [(int(triton_adam.adam_step([ours])), adam_step([oracle])) for _ in range(2)]
    except Exception as error:  # whatever it is, the states can rest in RAM instead
        return f"{type(error).__name__}: {error}"
    parts = ("weight", "m", "v", "m_scale", "v_scale", "extension")
    pairs = [(getattr(ours, name), getattr(oracle, name)) for name in parts]
    same = all(torch.equal(one.cpu(), other) for one, other in pairs if one is not None)
    if same and all(one == other for one, other in counts):
        return None
    dtype, bits, *_ = kind
    return f"it computes other bits than it should for {dtype} with {bits}-bit states: please report this"


def _probe(kind: Kind, device: torch.device) -> AdamTensor:
    """A parameter with gradients of all sizes, one of which is none."""
    dtype, bits, extended, grad_dtype = kind
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(PROBE, generator=generator).to(dtype)
    grad = (torch.randn(PROBE, generator=generator) * torch.logspace(-12, 2, PROBE)).to(grad_dtype)
    grad[700] = float("inf")
    state = new_state(PROBE, bits, 0)
    if extended:
        state["extension"] = torch.arange(PROBE).to(torch.int8)
    state = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in state.items()}
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return state_tensor(state, group, 7, weight.to(device), grad.to(device), 0.5, 3)


def state_in_ram(state: dict[str, Any]) -> dict[str, Any]:
    """A state with all its tensors in RAM, to be saved; codes of a weight without those of others beside them."""
    found = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    return {name: value.clone() if name in ("codes", "scale") else value for name, value in found.items()}
