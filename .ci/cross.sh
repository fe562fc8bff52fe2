#!/usr/bin/env bash
# What this machine cannot run by itself, as far as its tools go:
# * aarch64 through qemu: NEON and base must give the checksums of x86-64;
# * Windows through mingw: the library must build, and import from the system's own libraries alone.
# A step whose tools are missing is skipped, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
FLAGS=(-O2 -std=c++17 -ffp-contract=off -fno-math-errno -fno-trapping-math)
CORE=hf_lowmem/csrc

# compile COMPILER FOLDER FILE FLAGS...
compile() {
  local compiler=$1 folder=$2 file=$3
  shift 3
  mkdir -p "$OUT/$folder"
  $compiler "${FLAGS[@]}" "$@" -c "$file" -o "$OUT/$folder/$(basename "$file" .cpp).o"
}

# core_x86 COMPILER FOLDER
core_x86() {
  compile "$1" "$2" $CORE/dispatch.cpp
  compile "$1" "$2" $CORE/isa_base.cpp
  compile "$1" "$2" $CORE/isa_avx2.cpp -mavx2 -mfma
  compile "$1" "$2" $CORE/isa_avx512.cpp -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
}

arm() {
  local compiler=aarch64-linux-gnu-g++ file
  if ! command -v $compiler >/dev/null || ! command -v qemu-aarch64 >/dev/null || [ "$(uname -m)" != x86_64 ]; then
    echo "aarch64: skipped (needs x86-64, $compiler and qemu-aarch64)"
    return
  fi
  for file in $CORE/dispatch.cpp $CORE/isa_base.cpp $CORE/isa_neon.cpp tests/native/driver.cpp; do
    compile $compiler arm "$file" -Wall -Wextra -Werror
  done
  $compiler -static "$OUT"/arm/*.o -o "$OUT/driver_arm"
  core_x86 "${CXX:-g++}" here
  compile "${CXX:-g++}" here tests/native/driver.cpp
  ${CXX:-g++} "$OUT"/here/*.o -o "$OUT/driver_here"
  "$OUT/driver_here" >"$OUT/here.txt"
  qemu-aarch64 "$OUT/driver_arm" >"$OUT/arm.txt"
  diff "$OUT/here.txt" "$OUT/arm.txt"
  echo "aarch64: $(wc -l <"$OUT/arm.txt") checksums equal those of x86-64"
}

windows() {
  local compiler=x86_64-w64-mingw32-g++-posix imports
  if ! command -v $compiler >/dev/null; then
    echo "windows: skipped (needs $compiler)"
    return
  fi
  core_x86 $compiler windows
  $compiler -shared -static "$OUT"/windows/*.o -o "$OUT/_core.dll"
  imports=$(x86_64-w64-mingw32-objdump -p "$OUT/_core.dll" | sed -n 's/.*DLL Name: //p' | sort -u | tr '\n' ' ')
  case $imports in
    "KERNEL32.dll msvcrt.dll ") echo "windows: builds, and imports from $imports" ;;
    *)
      echo "windows: the library needs more than the system has: $imports"
      return 1
      ;;
  esac
}

arm
windows
