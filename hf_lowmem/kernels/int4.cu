// int4's product on tensor cores, with its bits: compiled at run time, by NVRTC, for the GPU that is there.
//
// No header is included: NVRTC brings none of CUDA's, and not every machine has them. Nothing may be contracted into a
// fused operation: fp32 is multiplied and added by __fmul_rn and __fadd_rn alone. Integer sums are exact in any order.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// A block computes a tile of 128 rows and 128 columns, 64 bytes (128 codes) of depth at a time; each of its eight warps
// 64 rows and 32 columns of it. Operands pass through STAGES buffers in shared memory, 48 KB in all.
#define ROWS 128
#define COLUMNS 128
#define BYTES 64
#define STAGES 3
#define THREADS 256
#define BUFFER (ROWS * BYTES)

#if __CUDA_ARCH__ >= 800
#define COPIES_ALONE 1  // from global to shared memory, beside the program
#else
#define COPIES_ALONE 0
#endif

// Where 16 bytes of a row lie in a buffer: so that eight rows read at once are in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
  return row * BYTES + ((chunk ^ (row >> 1 & 3)) << 4);
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// Four matrices of 8 rows of 16 bytes; each thread says where one row begins.
__device__ __forceinline__ void load_matrices(u32 (&out)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// 16 rows and 8 columns more of a sum, 64 codes deep.
__device__ __forceinline__ void multiply(int (&sum)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
#if COPIES_ALONE
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
#else  // Turing's instruction has 8 rows, and 32 codes of depth
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      asm volatile("mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+r"(sum[2 * half]), "+r"(sum[2 * half + 1])
                   : "r"(a[2 * part + half]), "r"(part ? b_high : b_low));
    }
  }
#endif
}

// One operand's part of a buffer: which 16 bytes this thread fetches of it, twice.
struct Source {
  const u8* rows[2];
  bool there[2];
  u32 places[2];
};

__device__ __forceinline__ Source source(const u8* codes, i64 first, int count, int row_bytes) {
  Source found;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 row = threadIdx.x / 4 + 64 * i;
    found.there[i] = first + row < count;
    found.rows[i] = codes + (found.there[i] ? first + row : 0) * row_bytes;
    found.places[i] = place(row, threadIdx.x % 4);
  }
  return found;
}

#if COPIES_ALONE
__device__ __forceinline__ void copy(u8* buffer, const Source& from, i64 base, int start, int row_bytes) {
  int at = start + (threadIdx.x % 4) * 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool there = from.there[i] && at < row_bytes;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(buffer + from.places[i])),
                 "l"(from.rows[i] + base + (there ? at : 0)), "r"(there ? 16 : 0)
                 : "memory");
  }
}
#else
__device__ __forceinline__ void read(uint4 (&held)[2], const Source& from, i64 base, int start, int row_bytes) {
  int at = start + (threadIdx.x % 4) * 16;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool there = from.there[i] && at < row_bytes;
    held[i] = there ? *(const uint4*)(from.rows[i] + base + at) : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void write(u8* buffer, const Source& from, const uint4 (&held)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) *(uint4*)(buffer + from.places[i]) = held[i];
}
#endif

// The product of two buffers, added to a warp's sums.
__device__ __forceinline__ void add_products(int (&sums)[4][4][4], const u8* a, const u8* b, u32 warp_row,
                                             u32 warp_column) {
  u32 lane = threadIdx.x % 32, a_base = shared_address(a), b_base = shared_address(b);
#pragma unroll
  for (u32 step = 0; step < BYTES / 32; step++) {
    u32 left[4][4], right[2][4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      load_matrices(left[i], a_base + place(warp_row + 16 * i + lane % 16, 2 * step + lane / 16));
    }
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      load_matrices(right[j], b_base + place(warp_column + 16 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        multiply(sums[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

// In 16 bits, rounded to nearest, ties to even. Written out: Turing has no instruction for it.
__device__ __forceinline__ u16 as_bfloat16(float x) {
  u32 bits = __float_as_uint(x);
  return x != x ? (u16)0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ u16 as_float16(float x) {
  u16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float loaded(const void* x, i64 at, int kind) {
  if (kind == 0) return ((const float*)x)[at];
  u16 bits = ((const u16*)x)[at];
  if (kind == 1) return __uint_as_float((u32)bits << 16);
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

__device__ __forceinline__ void stored(void* out, i64 at, float value, int kind) {
  if (kind == 0) {
    ((float*)out)[at] = value;
  } else {
    ((u16*)out)[at] = kind == 1 ? as_bfloat16(value) : as_float16(value);
  }
}

// Args:
//   a: [digits, m, row_bytes], two codes a byte, the first in the lower half; a value is the sum of its digits, of
//   which
//      each counts 16 times the next one. Rows begin at multiples of 16 bytes.
//   b: [n, row_bytes].
//   a_scale, b_scale, bias: fp32, or null.
//   out: [m, n], of kind 0 (fp32), 1 (bf16), 2 (fp16).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    int4_product(const u8* __restrict__ a, const u8* __restrict__ b, const float* __restrict__ a_scale,
                 const float* __restrict__ b_scale, const float* __restrict__ bias, void* __restrict__ out, int m,
                 int n, int row_bytes, int digits, int kind) {
  __shared__ __align__(128) u8 buffers[STAGES * 2 * BUFFER];

  // Neighbouring blocks share rows and columns in the cache, eight tiles high.
  u32 high = ((u32)m + ROWS - 1) / ROWS, wide = ((u32)n + COLUMNS - 1) / COLUMNS;
  u32 first = blockIdx.x / (8 * wide) * 8, within = blockIdx.x % (8 * wide);
  u32 size = high - first < 8 ? high - first : 8;
  i64 row = (i64)(first + within % size) * ROWS, column = (i64)(within / size) * COLUMNS;

  Source left = source(a, row, m, row_bytes), right = source(b, column, n, row_bytes);
  i64 digit_bytes = (i64)m * row_bytes;
  int steps = (row_bytes + BYTES - 1) / BYTES, all = digits * steps;
  u32 warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
  int sums[4][4][4] = {};

#if COPIES_ALONE
#define FETCH(number)                                                                  \
  {                                                                                    \
    int next = (number);                                                               \
    if (next < all) {                                                                  \
      u8* buffer = buffers + next % STAGES * 2 * BUFFER;                               \
      copy(buffer, left, next / steps * digit_bytes, next % steps * BYTES, row_bytes); \
      copy(buffer + BUFFER, right, 0, next % steps * BYTES, row_bytes);                \
    }                                                                                  \
    asm volatile("cp.async.commit_group;" ::: "memory");                               \
  }
  for (int i = 0; i < STAGES - 1; i++) FETCH(i)
  for (int now = 0; now < all; now++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // what others have fetched is there, and nobody reads any more what is overwritten next
    FETCH(now + STAGES - 1)
#else
  uint4 held[2][2];
  read(held[0], left, 0, 0, row_bytes);
  read(held[1], right, 0, 0, row_bytes);
  for (int now = 0; now < all; now++) {
    u8* mine = buffers + now % 2 * 2 * BUFFER;
    write(mine, left, held[0]);
    write(mine + BUFFER, right, held[1]);
    __syncthreads();
    if (now + 1 < all) {
      int next = now + 1;
      read(held[0], left, next / steps * digit_bytes, next % steps * BYTES, row_bytes);
      read(held[1], right, 0, next % steps * BYTES, row_bytes);
    }
#endif
    if (now && now % steps == 0) {  // the next digit
#pragma unroll
      for (int i = 0; i < 64; i++) sums[i / 16][i / 4 % 4][i % 4] *= 16;
    }
    const u8* buffer = buffers + now % (COPIES_ALONE ? STAGES : 2) * 2 * BUFFER;
    add_products(sums, buffer, buffer + BUFFER, warp_row, warp_column);
  }

  u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      i64 y = row + warp_row + 16 * i + 8 * half + lane / 4;
      if (y >= m) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
          i64 x = column + warp_column + 8 * j + lane % 4 * 2 + k;
          if (x >= n) continue;
          float value = __int2float_rn(sums[i][j][2 * half + k]);
          if (a_scale) value = __fmul_rn(value, a_scale[y]);
          if (b_scale) value = __fmul_rn(value, b_scale[x]);
          if (bias) value = __fadd_rn(value, bias[x]);
          stored(out, y * n + x, value, kind);
        }
      }
    }
  }
}

// -- rotation -------------------------------------------------------------------------------------------------------
// The Walsh-Hadamard transform of every `number` values of a row that lie `stride` apart, by all threads of a block.
__device__ __forceinline__ void butterflies(float* row, int columns, int number, int stride) {
  for (int distance = stride; distance < number * stride; distance *= 2) {
    for (int pair = threadIdx.x; pair < columns / 2; pair += THREADS) {
      int at = pair / distance * 2 * distance + pair % distance;
      float one = row[at], other = row[at + distance];
      row[at] = __fadd_rn(one, other);
      row[at + distance] = __fsub_rn(one, other);
    }
    __syncthreads();
  }
}

// The largest of a value over a block, 0 or more. A NaN is none: whoever calls this looks for them.
__device__ __forceinline__ float largest(float value, float* held) {
  for (int lanes = 16; lanes; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, lanes));
  __syncthreads();
  if (threadIdx.x % 32 == 0) held[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++) value = fmaxf(value, held[i]);
  return value;
}

// Args:
//   x: [rows, columns], of a kind.
//   codes: [rows, row_bytes].
//   scale: [rows].
//   neighbours, pieces: of the rotation.
//   root: what its sums are to be divided by.
extern "C" __global__ void __launch_bounds__(THREADS)
    int4_rotated_rows(const void* __restrict__ x, u8* __restrict__ codes, float* __restrict__ scale, int columns,
                      int row_bytes, int neighbours, int pieces, int root, int kind) {
  extern __shared__ float row[];
  __shared__ float held[THREADS / 32];
  i64 number = blockIdx.x;
  for (int i = threadIdx.x; i < columns; i += THREADS) row[i] = loaded(x, number * columns + i, kind);
  __syncthreads();
  butterflies(row, columns, neighbours, 1);
  butterflies(row, columns, pieces, columns / pieces);

  float up = 0, down = 0, bad = 0;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float value = row[i];
    up = fmaxf(up, value);
    down = fmaxf(down, -value);
    if (!(fabsf(value) < __int_as_float(0x7f800000))) bad = 1;
  }
  up = largest(up, held);
  down = largest(down, held);
  bad = largest(bad, held);

  const float unit_up = (float)(1 / 7.49), unit_down = (float)(1 / 8.49);
  float unit = down > up ? fmaxf(__fmul_rn(up, unit_up), __fmul_rn(down, unit_down))
                         : -fmaxf(__fmul_rn(down, unit_up), __fmul_rn(up, unit_down));
  if (fmaxf(up, down) < 0x1p-100f) unit = 0;
  bool usable = unit != 0 && bad == 0;
  float inverse = usable ? __fdiv_rn(1, unit) : 0;
  for (int i = threadIdx.x; i < row_bytes; i += THREADS) {
    u32 both = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int at = 2 * i + half;
      int code = usable && at < columns ? __float2int_rn(__fmul_rn(row[at], inverse)) : 0;
      both |= (u32)(code & 15) << 4 * half;
    }
    codes[number * row_bytes + i] = (u8)both;
  }
  if (threadIdx.x == 0) scale[number] = bad != 0 ? __int_as_float(0x7fffffff) : __fdiv_rn(unit, (float)root);
}

// Undoes a rotation; of one kind, [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    int4_rotated_back(const void* __restrict__ x, void* __restrict__ out, int columns, int neighbours, int pieces,
                      int root, int kind) {
  extern __shared__ float row[];
  i64 first = (i64)blockIdx.x * columns;
  for (int i = threadIdx.x; i < columns; i += THREADS) row[i] = loaded(x, first + i, kind);
  __syncthreads();
  butterflies(row, columns, pieces, columns / pieces);
  butterflies(row, columns, neighbours, 1);
  for (int i = threadIdx.x; i < columns; i += THREADS) stored(out, first + i, __fdiv_rn(row[i], (float)root), kind);
}
