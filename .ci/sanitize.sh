#!/usr/bin/env bash
# Builds the core and tests/native/driver.cpp with the address and undefined-behaviour sanitizers and runs them over
# every instruction set of this machine. Exits with 1 on a finding. $CXX names the compiler.
set -euo pipefail
cd "$(dirname "$0")/.."

CXX=${CXX:-$(command -v clang++ || command -v g++ || command -v c++)}
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
# Unoptimized: what is force-inlined makes functions so large that optimizing instrumented code takes minutes.
FLAGS=(-O0 -g -std=c++17 -ffp-contract=off -fno-omit-frame-pointer)
FLAGS+=(-fsanitize=address,undefined -fno-sanitize-recover=all)

compile() { # FILE FLAGS...
  local file=$1
  shift
  $CXX "${FLAGS[@]}" "$@" -c "$file" -o "$OUT/$(basename "$file" .cpp).o"
}

compile tests/native/driver.cpp
compile hf_lowmem/csrc/dispatch.cpp
compile hf_lowmem/csrc/isa_base.cpp
case $(uname -m) in
  x86_64)
    compile hf_lowmem/csrc/isa_avx2.cpp -mavx2 -mfma
    compile hf_lowmem/csrc/isa_avx512.cpp -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
    ;;
  aarch64 | arm64) compile hf_lowmem/csrc/isa_neon.cpp ;;
esac
$CXX "${FLAGS[@]}" "$OUT"/*.o -o "$OUT/driver"
if ! "$OUT/driver" >"$OUT/lines"; then
  grep -B1 '^ ' "$OUT/lines" | head -20
  exit 1
fi
echo "$(wc -l <"$OUT/lines") cases without a finding ($CXX)"
