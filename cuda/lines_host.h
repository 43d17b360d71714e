// Lines of values on the host: short runs that stay in registers and the first-level cache, which
// the compiler vectorises, and stores that pass the caches by.
#pragma once

#include "formats.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace lightning_zero {

constexpr std::int64_t kLineNumel = 32;  // 64 bytes of 16-bit values

template <Format kFormat>
inline void widen_line(const Stored<kFormat>* __restrict from, float* __restrict to) {
#if defined(__F16C__)
  if constexpr (kFormat == Format::kFloat16) {
    for (std::int64_t i = 0; i < kLineNumel; i += 8) {
      const auto stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(stored));
    }
    return;
  }
#endif
  for (std::int64_t i = 0; i < kLineNumel; ++i) to[i] = widened<kFormat>(from[i]);
}

template <Format kFormat>
inline void narrow_line(const float* __restrict from, Stored<kFormat>* __restrict to) {
#if defined(__F16C__)
  if constexpr (kFormat == Format::kFloat16) {
    for (std::int64_t i = 0; i < kLineNumel; i += 8) {
      const auto stored = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), stored);
    }
    return;
  }
#endif
  for (std::int64_t i = 0; i < kLineNumel; ++i) to[i] = narrowed<kFormat>(from[i]);
}

// Copies to memory that is not read soon: without reading it first, and without evicting what is.
inline void stream(void* to, const void* from, std::int64_t nbytes) {
#if defined(__AVX__)
  constexpr std::int64_t kStoreNbytes = 32;
  if (reinterpret_cast<std::uintptr_t>(to) % kStoreNbytes == 0 && nbytes % kStoreNbytes == 0) {
    for (std::int64_t i = 0; i < nbytes; i += kStoreNbytes) {
      const auto* source = reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i);
      auto* target = reinterpret_cast<__m256i*>(static_cast<char*>(to) + i);
      _mm256_stream_si256(target, _mm256_loadu_si256(source));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<std::size_t>(nbytes));
}

// Makes what was streamed visible to other threads before anything that follows.
inline void end_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Asks for a line that is needed some lines later, into the second-level cache: the first-level one
// has not enough ways for the streams of a step twice.
template <typename T>
inline void fetch_ahead(const T* from) {
  constexpr std::int64_t kCacheLineNbytes = 64;
  for (std::int64_t i = 0; i < kLineNumel; i += kCacheLineNbytes / sizeof(T)) {
    __builtin_prefetch(from + i, 0, 2);
  }
}

}  // namespace lightning_zero
