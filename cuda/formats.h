// Values of 16 bits to fp32 and back: by integers and without branches, so that loops of them are
// vectorised on every machine and give the same bits on host and device.
#pragma once

#include "shared.h"

namespace lightning_zero {

LZ_SHARED float from_bfloat16(std::uint16_t stored) {
  return float_of(static_cast<std::uint32_t>(stored) << 16);
}

// To the nearest, ties to even; a NaN stays a NaN.
LZ_SHARED std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(value != value ? 0x7fc0u : rounded);
}

LZ_SHARED float from_float16(std::uint16_t stored) {
  constexpr std::uint32_t kExponentDistance = (127u - 15u) << 23;
  const std::uint32_t sign = (static_cast<std::uint32_t>(stored) & 0x8000u) << 16;
  const std::uint32_t magnitude = (static_cast<std::uint32_t>(stored) & 0x7fffu) << 13;
  const std::uint32_t normal = magnitude + kExponentDistance;
  const std::uint32_t not_finite = normal + kExponentDistance;
  // A denormal has no leading one: it is added to one of the same exponent, and taken off again.
  constexpr std::uint32_t kOneOfDenormals = 113u << 23;
  const std::uint32_t denormal =
      bits_of(float_of(magnitude + kOneOfDenormals) - float_of(kOneOfDenormals));
  const std::uint32_t finite = magnitude < (1u << 23) ? denormal : normal;
  return float_of(sign | (magnitude >= (31u << 23) ? not_finite : finite));
}

// To the nearest, ties to even; beyond 65504 infinite, a NaN stays a NaN.
LZ_SHARED std::uint16_t to_float16(float value) {
  constexpr std::uint32_t kExponentDistance = (127u - 15u) << 23;
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - kExponentDistance + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of 0.5 weighs what the last bit of a denormal does: the sum rounds as it must.
  const std::uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  const std::uint32_t not_finite = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // 65520 lies halfway between the largest value and infinity, and goes to the latter.
  return static_cast<std::uint16_t>(sign | (magnitude >= bits_of(65520.0f) ? not_finite : finite));
}

template <Format>
struct StoredType {
  using type = std::uint16_t;
};

template <>
struct StoredType<Format::kFloat32> {
  using type = float;
};

// What one value of a format takes in memory.
template <Format kFormat>
using Stored = typename StoredType<kFormat>::type;

template <Format kFormat>
LZ_SHARED float widened(Stored<kFormat> stored) {
  if constexpr (kFormat == Format::kBFloat16) {
    return from_bfloat16(stored);
  } else if constexpr (kFormat == Format::kFloat16) {
    return from_float16(stored);
  } else {
    return stored;
  }
}

template <Format kFormat>
LZ_SHARED Stored<kFormat> narrowed(float value) {
  if constexpr (kFormat == Format::kBFloat16) {
    return to_bfloat16(value);
  } else if constexpr (kFormat == Format::kFloat16) {
    return to_float16(value);
  } else {
    return value;
  }
}

}  // namespace lightning_zero
