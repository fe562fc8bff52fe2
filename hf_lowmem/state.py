"""The optimizer state of one parameter: making it, checking it, and reading one written at another width.

A state is a dict of plain tensors and numbers, flat, in host RAM::

    step       int    steps done
    index      int    number of the parameter, part of the key of its random bits
    bits       int    4, 8 or 32
    m, v       codes ``uint8[codec.nbytes(n)]``, or ``float32[n]`` with 32 bits
    m_scale, v_scale   ``float32[blocks]``, with 4 and 8 bits
    extension  ``int8[n]``, with a 24-bit master of a 16-bit weight
    master     ``float32[n]``, with a 32-bit master of a 16-bit weight
    codes, scale  ``int8[rows, columns]``, ``float32[rows, 1]``: the weight itself, where it exists in 8 bits alone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import codec

State = dict[str, Any]


def new_state(n: int, bits: int, index: int, device: str = "cpu") -> State:
    """The state before the first step of a parameter of ``n`` values, without its master."""
    state: State = {"step": 0, "index": index, "bits": bits}
    if bits == 32:
        state["m"], state["v"] = torch.zeros(n, device=device), torch.zeros(n, device=device)
        return state
    form, blocks = codec.STATES[bits], codec.STATES[bits].blocks(n)
    state["m"] = torch.full((form.nbytes(n),), form.zero, dtype=torch.uint8, device=device)
    state["v"] = torch.zeros(form.nbytes(n), dtype=torch.uint8, device=device)
    state["m_scale"], state["v_scale"] = torch.zeros(blocks, device=device), torch.zeros(blocks, device=device)
    return state


def shape_of(n: int, bits: int, master: int | None) -> State:
    """What a state will hold, without data.

    Args:
        n: values of the parameter.
        bits: of a moment.
        master: bits of the master of a 16-bit weight; None for a weight that is its own.
    """
    state = new_state(n, bits, 0, "meta")
    if master == 24:
        state["extension"] = torch.empty(n, dtype=torch.int8, device="meta")
    elif master == 32:
        state["master"] = torch.empty(n, device="meta")
    return state


def moments(state: Mapping[str, Any], n: int) -> tuple[Tensor, Tensor]:
    """Both moments of a state as ``float32[n]``."""
    if state["bits"] == 32:
        return state["m"], state["v"]
    form = codec.STATES[state["bits"]]
    m = form.decode_m(state["m"], n) * (state["m_scale"] / codec.LEVELS)[:, None]
    root = form.decode_root(state["v"], n) * (state["v_scale"] / form.top)[:, None]
    return m.flatten()[:n], (root * root).flatten()[:n]


def load_state(
    saved: Mapping[str, Any], n: int, bits: int, master: int | None, index: int, name: str, copy: bool = True
) -> State:
    """A state of our own, in new memory, from one that was saved, by us or by torch.optim.AdamW.

    Args:
        n: values of the parameter.
        bits: width wanted, 4, 8 or 32.
        master: bits of the master wanted for a 16-bit weight, 16, 24 or 32; None for an fp32 weight.
        index: number of the parameter, for a state that has none.
        name: how errors call the parameter.
        copy: whether tensors that are as they should be are copied, or else those that were saved are taken.

    Raises:
        ValueError: the state is damaged, is none of AdamW's, or holds more bits than are wanted.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"optimizer state of {name} is a {type(saved).__name__}, not a dict.")
    source = _from_torch(saved, index, name) if "exp_avg" in saved else dict(saved)
    missing = {"step", "bits", "m", "v"} - source.keys()
    if missing:
        raise ValueError(
            f"optimizer state of {name} lacks {', '.join(sorted(missing))}: it was not written by LowBitAdamW or "
            "torch.optim.AdamW. To start with a fresh optimizer, load the weights alone."
        )
    _check(source, n, name)
    if source["bits"] > bits:
        raise ValueError(
            f"optimizer state of {name} was saved with {source['bits']} bits and {bits} are asked for: converting down "
            f'loses information. Resume with state_bits={source["bits"]} (optim="cpu_adam{source["bits"]}bit"), or '
            "load the weights alone to start with a fresh optimizer."
        )
    state = _widen(source, n, bits, copy)
    state["index"] = int(source.get("index", index))
    _load_master(source, state, master, name, copy)
    return state


def _from_torch(saved: Mapping[str, Any], index: int, name: str) -> State:
    other = saved.keys() - {"step", "exp_avg", "exp_avg_sq"}
    if other or not {"step", "exp_avg_sq"} <= saved.keys():
        raise ValueError(
            f"optimizer state of {name} holds {', '.join(sorted(map(str, saved)))}: AdamW without amsgrad has step, "
            "exp_avg and exp_avg_sq. Train on with the optimizer that wrote it, or load the weights alone."
        )
    m, v = (saved[key].detach().float().cpu().flatten() for key in ("exp_avg", "exp_avg_sq"))
    return {"step": int(saved["step"]), "index": index, "bits": 32, "m": m, "v": v}


def _check(source: State, n: int, name: str) -> None:
    bits = source["bits"]
    if bits == 32:
        expected = {"m": (n, torch.float32), "v": (n, torch.float32)}
    elif bits in codec.STATES:
        form = codec.STATES[bits]
        expected = {key: (form.nbytes(n), torch.uint8) for key in ("m", "v")}
        expected |= {key: (form.blocks(n), torch.float32) for key in ("m_scale", "v_scale")}
    else:
        raise ValueError(f"optimizer state of {name} says {bits} bits; 4, 8 and 32 exist.")
    for key, dtype in (("extension", torch.int8), ("master", torch.float32)):
        if key in source:
            expected[key] = (n, dtype)
    for key in ("step", "index"):
        number = source.get(key, 0)
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
            raise ValueError(f"optimizer state of {name}: {key} is {number!r}, not a whole number of 0 or more.")
    for key, (length, dtype) in expected.items():
        value = source.get(key)
        if not isinstance(value, Tensor) or value.dtype is not dtype or value.numel() != length:
            found = f"{value.dtype}[{value.numel()}]" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"optimizer state of {name}, which has {n} values: {key} is {found}, not {dtype}[{length}]. "
                "It belongs to another model or the file is damaged."
            )
    for key in ("m_scale", "v_scale", *(("m", "v", "master") if bits == 32 else ("master",))):
        value = source.get(key)
        if isinstance(value, Tensor) and not bool(value.isfinite().all()):
            raise ValueError(f"optimizer state of {name}: {key} holds values that are not finite. The file is damaged.")
    for key in ("m_scale", "v_scale", *(("v",) if bits == 32 else ())):
        if key in source and source[key].numel() and bool((source[key] < 0).any()):
            raise ValueError(f"optimizer state of {name}: {key} holds values below zero. The file is damaged.")


def _widen(source: State, n: int, bits: int, copy: bool) -> State:
    state: State = {"step": int(source["step"]), "bits": bits}
    if source["bits"] == bits:
        keys = ("m", "v") if bits == 32 else ("m", "v", "m_scale", "v_scale")
        state |= {key: _flat(source[key], copy) for key in keys}
        return state
    m, v = moments(source, n)
    if bits == 32:
        return state | {"m": m.contiguous(), "v": v.contiguous()}
    form = codec.STATES[bits]
    m, root = codec.as_blocks(m, form.block), codec.as_blocks(v.sqrt(), form.block)
    nearest = torch.full(m.shape, codec.TO_NEAREST, dtype=torch.int32)
    state["m"], state["m_scale"] = form.encode_m(m, nearest, n)
    state["v"], state["v_scale"] = form.encode_root(root, nearest, n)
    return state


def _flat(x: Tensor, copy: bool) -> Tensor:
    flat = x.detach().cpu().flatten()
    return flat.clone() if copy else flat


def _load_master(source: State, state: State, wanted: int | None, name: str, copy: bool) -> None:
    """Takes the master over; a 24-bit one grows to 32 bits at the next step, when its weight is at hand."""
    saved = 32 if "master" in source else 24 if "extension" in source else 8 if "codes" in source else 16
    if wanted is None:
        if saved > 16:
            raise ValueError(
                f"optimizer state of {name} holds the {saved}-bit master of a 16-bit weight, but the weight is fp32 "
                "now. Load the model in the dtype that it was trained in."
            )
        return
    if saved > wanted:
        raise ValueError(
            f"optimizer state of {name} was saved with a {saved}-bit master and master_bits={wanted} is asked for: "
            f"converting down loses information. Resume with master_bits={saved}, or load the weights alone "
            "to start with a fresh optimizer."
        )
    key = {32: "master", 24: "extension"}.get(saved)
    if key:
        state[key] = _flat(source[key], copy)


def held(states: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, int]:
    """What the states of parameters hold: number of ``parameters``, bytes of their ``states`` and ``master``."""
    total = {"parameters": 0, "states": 0, "master": 0}
    for p, state in states.items():
        if state:
            moments, master = nbytes(state)
            total["parameters"] += p.numel()
            total["states"] += moments
            total["master"] += master
    return total


def nbytes(state: Mapping[str, Any]) -> tuple[int, int]:
    """(bytes of the two moments with their scales, bytes of the master)."""
    size = {key: value.nbytes for key, value in state.items() if isinstance(value, Tensor)}
    master = size.pop("extension", 0) + size.pop("master", 0)
    for name in ("codes", "scale"):  # the weight itself
        size.pop(name, None)
    return sum(size.values()), master
