"""The Triton kernels compile for GPUs that are not here: their interpreter takes more than their compiler does."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_lowmem.kernels import triton_int8, triton_rows, triton_weights

FLOATS = {"scale_ptr": "*fp32", "column_scale_ptr": "*fp32", "row_scale_ptr": "*fp32", "turned_scale_ptr": "*fp32"}
FLOATS |= {"scales_ptr": "*fp32", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
INTS = dict.fromkeys(("row_tops_ptr", "column_tops_ptr", "by_row_ptr", "by_column_ptr", "ends_ptr"), "*i32")
BYTES = {"codes_ptr": "*i8", "lying_ptr": "*i8", "standing_ptr": "*i8", "a_ptr": "*i8", "b_ptr": "*i8"}
TYPES = {**FLOATS, **INTS, **BYTES, "x_ptr": "*bf16", "out_ptr": "*bf16", "bias_ptr": "*bf16", "groups_ptr": "*i64"}


def compiled(kernel, capability, warps, stages, constants, **types):
    fn = getattr(kernel, "fn", kernel) if not hasattr(kernel, "arg_names") or hasattr(kernel, "configs") else kernel
    signature = {}
    for name in fn.arg_names:
        signature[name] = "constexpr" if name in constants else {**TYPES, **types}.get(name, "i32")
    ones = {name: 1 for name in fn.arg_names if name in ("column_stride", "a_column", "b_column")}
    signature |= dict.fromkeys(ones, "constexpr")
    values = {(fn.arg_names.index(name),): value for name, value in {**constants, **ones}.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=values)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return built.asm["ptx"], built.metadata.shared


scale = {"SMALLEST": 2.0**-100, "UNIT": 0.0078}
tiles = {"ROWS": 64, "COLUMNS": 128}
for capability in (86, 90):
    room = {86: 99, 90: 227}[capability] * 1024
    for stochastic in (False, True):
        how = {"SCALED": stochastic, "STOCHASTIC": stochastic}
        compiled(triton_rows._whole_rows, capability, 4, 3, {**how, "GROUPED": stochastic, **scale, "BLOCK": 4096})
        both = {"BY_ROW": True, "BY_COLUMN": stochastic, "FROM_TOPS": stochastic, "LYING": stochastic, "STANDING": True}
        compiled(triton_rows._codes_of_tiles, capability, 4, 3, {**how, **both, **scale, **tiles})
    compiled(triton_rows._tops, capability, 4, 3, {"SCALED": True, "BY_ROW": True, "BY_COLUMN": True, **tiles})
    for pieces in (1, 4, 16, 64):
        compiled(triton_rows._rotated_rows, capability, 2, 3, {"PIECES": pieces, "ROOT": 0.125, **scale, "BLOCK": 64})
    given = {"A_SCALED": True, "B_SCALED": True, "BIAS": True}
    for rows, columns, depth, warps, stages in triton_int8.TILES[:2]:
        shape = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
        ptx, shared = compiled(triton_int8._product, capability, warps, stages, {**given, **shape})
        assert "s32.s8.s8" in ptx, "no integer products"
    assert shared <= room, (capability, shared)
    rows, columns, depth, warps, stages = triton_int8.GROUPED if capability == 90 else triton_int8.GROUPED_IN_LESS
    shape = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUPS": 128}
    shape |= {"A_SCALED": True, "B_SCALED": True}
    ptx, shared = compiled(triton_int8._grouped, capability, warps, stages, shape)
    assert "s32.s8.s8" in ptx, "no integer products"
    assert shared <= room, (capability, shared)
words = {"scale_ptr": "*i16", "codes_ptr": "*u8"}
groups = {"HALF": 16, "GROUPS": 128}
compiled(triton_weights._encode_groups, 86, 4, 3, {"SMALLEST": 2.0**-100, **groups}, **words)
compiled(triton_weights._decode_groups, 86, 4, 3, groups, **words, out_ptr="*i16")
compiled(triton_weights._decode_rows, 86, 4, 3, {"ROWS": 1, "COLUMNS": 4096}, out_ptr="*fp16")
again = {"AGAIN": True, "FITS": False, "LEVELS": 127.0, "ROOM": 1.0625, **scale, "BLOCK": 4096}
compiled(triton_weights._encode_rows, 86, 4, 3, again, x_ptr="*fp32")
rows, columns, depth, warps, stages = triton_int8.COPIED
kinds = {"a_tiles": f"tensordesc<i8[{rows},{depth}]>", "b_tiles": f"tensordesc<i8[{columns},{depth}]>"}
kinds |= {"out_tiles": f"tensordesc<bf16[{rows},{columns}]>"}
shape = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
ptx, shared = compiled(triton_int8._copied, 90, warps, stages, {**given, **shape}, **kinds)
assert "wgmma" in ptx and "cp.async.bulk.tensor" in ptx
assert shared <= 113 * 1024, "two programs share a multiprocessor"
print("all compile")
"""


def test_for_gpus_that_are_not_here(tiny, tmp_path) -> None:
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    assert tiny.python(SCRIPT, **env).stdout == "all compile\n"
