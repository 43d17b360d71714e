// Symmetric integers of a block with one scale, for host and device.
#pragma once

#include "shared.h"

namespace lightning_zero {

// The largest integer of a width: the scale's is the largest magnitude of the block.
LZ_SHARED float largest_integer(int bits) { return bits == 8 ? 127.0f : 7.0f; }

// Magnitudes compare as integers do, and one that is not finite is above all others: a maximum of
// these bits finds it, in any order.
LZ_SHARED std::uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7fffffffu; }

struct BlockScale {
  float scale;    // of one step of the integers
  float inverse;  // its reciprocal; 0 in a block of zeros
  bool is_finite;
};

// A block whose largest magnitude is below 2^-118 counts as zeros: its reciprocal would be infinite.
LZ_SHARED BlockScale block_scale(std::uint32_t largest_bits, int bits) {
  const float largest = float_of(largest_bits);
  const bool is_finite = largest_bits < 0x7f800000u;
  if (largest_bits < (9u << 23)) return {0.0f, 0.0f, true};
  return {quotient(largest, largest_integer(bits)), quotient(largest_integer(bits), largest),
          is_finite};
}

// To the nearest, ties to even: of so large a number the last bit is one. In a block that is not
// finite everything is one step, so that all of it is read back as what the scale is.
LZ_SHARED std::int32_t quantized(float value, BlockScale scale) {
  constexpr std::uint32_t kLargeBits = 0x4b400000u;  // 1.5 * 2^23
  const std::uint32_t rounded = bits_of(sum(product(value, scale.inverse), float_of(kLargeBits)));
  return scale.is_finite ? static_cast<std::int32_t>(rounded - kLargeBits) : 1;
}

// Two integers of 4 bits in a byte, the first one in the lower half.
LZ_SHARED std::uint8_t packed_pair(std::int32_t first, std::int32_t second) {
  return static_cast<std::uint8_t>((first & 15) | ((second & 15) << 4));
}

LZ_SHARED std::int32_t unpacked(std::uint8_t pair, bool is_second) {
  const std::int32_t half = is_second ? pair >> 4 : pair & 15;
  return (half ^ 8) - 8;
}

LZ_SHARED float dequantized(std::int32_t integer, float scale) {
  return product(static_cast<float>(integer), scale);
}

}  // namespace lightning_zero
