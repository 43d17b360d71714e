// What host and device compilers need to read one header: see README.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LZ_SHARED __host__ __device__ __forceinline__
#else
#define LZ_SHARED inline __attribute__((always_inline))
#endif

namespace lightning_zero {

// How many blocks of some numel cover others; the last one may be short.
LZ_SHARED std::int64_t blocks_of(std::int64_t numel, std::int64_t block_numel) {
  return (numel + block_numel - 1) / block_numel;
}

// How a value is stored.
enum class Format : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kNone = 3 };

// Products that are added are written out as `fused` or not at all: the compilers are told not to
// fuse (or split) anything by themselves, so both sides round alike.
LZ_SHARED float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

LZ_SHARED float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

LZ_SHARED float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

LZ_SHARED float square_root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

LZ_SHARED float sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

LZ_SHARED std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

LZ_SHARED float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace lightning_zero
