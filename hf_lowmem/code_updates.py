"""``CodeUpdates``: steps weights that rest in 8 bits and have no master."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import codec
from .coding import decode, recode
from .kernels import native, native_weights
from .kernels.adam import AdamTensor, adam_step, state_tensor
from .kernels.weights import FINDS_CODES, INT8, is_stand_in, shifted
from .resident import ResidentUpdates

PIECE = 1 << 25  # values that are wide at a time on a GPU
UNIT = 256  # values that a piece is a multiple of: the states' blocks
SALT = 0x3C6EF372FE94F82B  # so that the noise is other than the moments'


class CodeUpdates:
    """Weights of which only codes and scales exist. A step reads some rows, updates them in fp32 and writes them again.

    Attributes:
        codes: of each such parameter, its codes and scales, of form ``int8``, on any device.
    """

    def __init__(self) -> None:
        self.codes: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def look(self, named: Iterable[tuple[Tensor, Any, str]]) -> None:
        """Finds the codes of parameters that are stand-ins, and forgets those that are ordinary tensors again.

        Raises: ValueError for a stand-in that says nothing of its codes.
        """
        for p, _, name in named:
            if not is_stand_in(p):
                self.codes.pop(p, None)
            elif p.requires_grad and p not in self.codes:
                found = getattr(p, FINDS_CODES, lambda p: None)(p)
                if found is not None and found[0].dtype is not torch.int8:
                    raise ValueError(
                        f"{name} exists in 4 bits alone, which cannot be trained: attach the model with "
                        'weights="int8", or with master_bits=24, before it is unfrozen'
                    )
                if found is None:
                    raise ValueError(
                        f"{name} exists in few bits alone (master_bits=8), and nothing is known of these: it is not of "
                        "the model that was attached. Make the optimizer from that model's parameters, or call "
                        "optimizer.use_codes(streamer.codes())"
                    )
                self.codes[p] = found

    def __contains__(self, p: Tensor) -> bool:
        return p in self.codes

    def step(
        self,
        p: Tensor,
        group: Mapping[str, Any],
        state: dict[str, Any],
        grad: Tensor,
        how: tuple[int, float, int],
        threads: int | None,
        resident: ResidentUpdates,
        copies: tuple[Tensor, Tensor] | None = None,
    ) -> int:
        """Steps one parameter where its codes are. Returns the number of blocks left out; on a GPU, ``resident`` knows.

        Args:
            state: its moments, on the device of the codes.
            grad: flat, there too.
            how: seed, what the gradient is to be multiplied with, and number of the step.
            threads: of the CPU.
            copies: of its codes and scales, which are stepped in their stead.
        """
        codes, scale = copies or self.codes[p]
        seed, factor, number = how
        whole = state_tensor(state, group, seed, codes.view(-1), grad, factor, number)
        key = codec.tensor_key(seed ^ SALT, number, state["index"])
        if codes.device.type == "cpu" and native.core() is not None:
            return native_weights.step(whole, codes, scale, key, threads)
        return self._by_pieces(whole, codes, scale, key, resident)

    def _by_pieces(self, whole: AdamTensor, codes: Tensor, scale: Tensor, key: int, resident: ResidentUpdates) -> int:
        """The same where no one kernel does all of it; what is stepped at a time changes no bit."""
        rows, columns = codes.shape
        least = UNIT // math.gcd(columns, UNIT)
        each = max(least, PIECE // columns // least * least)
        wide = torch.empty(min(rows, each), columns, device=codes.device)
        skipped = 0
        for start in range(0, rows, each):
            stop = min(rows, start + each)
            part, its_scale, weight = codes[start:stop], scale[start:stop], wide[: stop - start]
            decode([(part, its_scale, INT8, weight)])
            values = slice(start * columns, stop * columns)
            tensor = replace(whole, grad=whole.grad[values]).part(values.start, values.stop)
            tensor.weight = weight.view(-1)
            if codes.device.type == "cpu":
                skipped += adam_step([tensor])
            else:
                resident.step_tensors([tensor])
            recode([(weight, part, its_scale, shifted(key, values.start))])
        return skipped


def take_codes(state: dict[str, Any], codes: tuple[Tensor, Tensor]) -> None:
    """Has the codes and scales of a weight be part of its state, whose tensors move to where they are.

    Args:
        state: which may hold others, that were loaded and are what a resumed run goes on from: these are written over
            those that are there.
        codes: where they are.
    """
    if state.get("codes", codes[0]) is not codes[0]:
        codes[0].copy_(state["codes"])
        codes[1].copy_(state["scale"])
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device != codes[0].device:
            state[key] = value.to(codes[0].device)
    state["codes"], state["scale"] = codes


def drop_codes(state: dict[str, Any]) -> None:
    """Of a weight that is an ordinary tensor again."""
    for name in ("codes", "scale"):
        state.pop(name, None)


def with_codes(
    state: dict[str, Any], saved: Mapping[str, Any], codes: tuple[Tensor, Tensor], name: str
) -> dict[str, Any]:
    """A loaded state with the codes that were saved in it; without any where there were none.

    The weights that a checkpoint of the model holds are what the codes say, rounded to 16 bits: near enough to see
    whether both are of one model, but scales found anew for them are others.

    Args:
        state: loaded.
        saved: what it was loaded from.
        codes: of the model as it is.
        name: how errors call the parameter.

    Raises: ValueError where what was saved is damaged, or of another weight.
    """
    found = saved.get("codes"), saved.get("scale")
    if found[0] is None or found[1] is None:
        return state
    for one, other in zip(found, codes, strict=True):
        if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype is not other.dtype:
            raise ValueError(
                f"optimizer state of {name} holds codes of its weight that are not {other.dtype}{list(other.shape)}: "
                "it belongs to another model or the file is damaged."
            )
    here = codes[0].device
    one, scale = found[0].to(here), found[1].to(here)
    apart = (one.float() * scale - codes[0].float() * codes[1]).abs() - (scale + codes[1])
    if bool((apart > 0).any()):
        raise ValueError(
            f"optimizer state of {name} holds codes of another weight than the model's: load the model's weights of "
            "the same checkpoint first."
        )
    return {**state, "codes": one.clone(), "scale": scale.clone()}
