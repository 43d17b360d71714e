// What launch code hands to the quantising kernels of host and device.
#pragma once

#include "quantize_math.h"

namespace lightning_zero {

struct QuantizedBlocks {
  void* values;           // in `format`
  Format format;
  std::uint8_t* packed;   // integers of `bits`: [numel] of 8, or [ceil(numel / 2)] of 4
  float* scales;          // [blocks]
  std::int64_t numel;
  std::int64_t block_numel;  // even
  int bits;                  // 8 or 4
};

// Blocks [begin, end), by the calling thread.
void quantize_host(const QuantizedBlocks& blocks, std::int64_t begin, std::int64_t end);
void dequantize_host(const QuantizedBlocks& blocks, std::int64_t begin, std::int64_t end);

// All blocks, on a CUDA stream.
void quantize_device(const QuantizedBlocks& blocks, void* stream);
void dequantize_device(const QuantizedBlocks& blocks, void* stream);

}  // namespace lightning_zero
