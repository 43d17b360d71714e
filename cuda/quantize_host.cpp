// Quantised blocks on the host. A block is read twice, the second time from a cache.
#include "quantize.h"

#include <algorithm>

#include "formats.h"

namespace lightning_zero {
namespace {

template <Format kFormat>
std::uint32_t largest_magnitude(const Stored<kFormat>* __restrict values, std::int64_t numel) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    largest = std::max(largest, magnitude_bits(widened<kFormat>(values[i])));
  }
  return largest;
}

template <Format kFormat>
void quantize_block(const Stored<kFormat>* __restrict values, std::uint8_t* __restrict packed,
                    std::int64_t numel, BlockScale scale, int bits) {
  if (bits == 8) {
    for (std::int64_t i = 0; i < numel; ++i) {
      packed[i] = static_cast<std::uint8_t>(quantized(widened<kFormat>(values[i]), scale));
    }
    return;
  }
  for (std::int64_t i = 0; i < numel / 2; ++i) {
    packed[i] = packed_pair(quantized(widened<kFormat>(values[2 * i]), scale),
                            quantized(widened<kFormat>(values[2 * i + 1]), scale));
  }
  if (numel % 2 != 0) {
    packed[numel / 2] = packed_pair(quantized(widened<kFormat>(values[numel - 1]), scale), 0);
  }
}

template <Format kFormat>
void dequantize_block(const std::uint8_t* __restrict packed, Stored<kFormat>* __restrict values,
                      std::int64_t numel, float scale, int bits) {
  if (bits == 8) {
    for (std::int64_t i = 0; i < numel; ++i) {
      values[i] = narrowed<kFormat>(dequantized(static_cast<std::int8_t>(packed[i]), scale));
    }
    return;
  }
  for (std::int64_t i = 0; i < numel / 2; ++i) {
    values[2 * i] = narrowed<kFormat>(dequantized(unpacked(packed[i], false), scale));
    values[2 * i + 1] = narrowed<kFormat>(dequantized(unpacked(packed[i], true), scale));
  }
  if (numel % 2 != 0) {
    values[numel - 1] = narrowed<kFormat>(dequantized(unpacked(packed[numel / 2], false), scale));
  }
}

template <Format kFormat>
void quantize_of(const QuantizedBlocks& b, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t at = i * b.block_numel;
    const std::int64_t numel = std::min(b.block_numel, b.numel - at);
    const auto* const values = static_cast<const Stored<kFormat>*>(b.values) + at;
    const BlockScale scale = block_scale(largest_magnitude<kFormat>(values, numel), b.bits);
    b.scales[i] = scale.scale;
    quantize_block<kFormat>(values, b.packed + at * b.bits / 8, numel, scale, b.bits);
  }
}

template <Format kFormat>
void dequantize_of(const QuantizedBlocks& b, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t at = i * b.block_numel;
    const std::int64_t numel = std::min(b.block_numel, b.numel - at);
    auto* const values = static_cast<Stored<kFormat>*>(b.values) + at;
    dequantize_block<kFormat>(b.packed + at * b.bits / 8, values, numel, b.scales[i], b.bits);
  }
}

}  // namespace

void quantize_host(const QuantizedBlocks& blocks, std::int64_t begin, std::int64_t end) {
  if (blocks.format == Format::kFloat32) quantize_of<Format::kFloat32>(blocks, begin, end);
  if (blocks.format == Format::kBFloat16) quantize_of<Format::kBFloat16>(blocks, begin, end);
  if (blocks.format == Format::kFloat16) quantize_of<Format::kFloat16>(blocks, begin, end);
}

void dequantize_host(const QuantizedBlocks& blocks, std::int64_t begin, std::int64_t end) {
  if (blocks.format == Format::kFloat32) dequantize_of<Format::kFloat32>(blocks, begin, end);
  if (blocks.format == Format::kBFloat16) dequantize_of<Format::kBFloat16>(blocks, begin, end);
  if (blocks.format == Format::kFloat16) dequantize_of<Format::kFloat16>(blocks, begin, end);
}

}  // namespace lightning_zero
