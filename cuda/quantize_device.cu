// Quantised blocks on a CUDA device: one group of threads for a block.
#include "formats.h"
#include "launch.cuh"
#include "quantize.h"

namespace lightning_zero {
namespace {

// The largest of what all threads of a group hold; known to all of them.
__device__ std::uint32_t largest_of_group(std::uint32_t mine) {
  __shared__ std::uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  atomicMax(&largest, __reduce_max_sync(0xffffffffu, mine));
  __syncthreads();
  const std::uint32_t found = largest;
  __syncthreads();  // before another block begins anew
  return found;
}

__device__ std::int64_t numel_of_block(const QuantizedBlocks& b, std::int64_t block) {
  const std::int64_t left = b.numel - block * b.block_numel;
  return left < b.block_numel ? left : b.block_numel;
}

template <Format kFormat>
__global__ void quantize_kernel(const QuantizedBlocks b, std::int64_t count) {
  for (std::int64_t block = blockIdx.x; block < count; block += gridDim.x) {
    const std::int64_t at = block * b.block_numel;
    const std::int64_t numel = numel_of_block(b, block);
    const auto* const values = static_cast<const Stored<kFormat>*>(b.values) + at;
    std::uint8_t* const packed = b.packed + at * b.bits / 8;
    std::uint32_t largest = 0;
    for (std::int64_t i = threadIdx.x; i < numel; i += blockDim.x) {
      const std::uint32_t bits = magnitude_bits(widened<kFormat>(values[i]));
      largest = bits > largest ? bits : largest;
    }
    const BlockScale scale = block_scale(largest_of_group(largest), b.bits);
    if (threadIdx.x == 0) b.scales[block] = scale.scale;
    if (b.bits == 8) {
      for (std::int64_t i = threadIdx.x; i < numel; i += blockDim.x) {
        packed[i] = static_cast<std::uint8_t>(quantized(widened<kFormat>(values[i]), scale));
      }
    } else {
      for (std::int64_t i = threadIdx.x; i < blocks_of(numel, 2); i += blockDim.x) {
        const bool is_pair = 2 * i + 1 < numel;
        const std::int32_t first = quantized(widened<kFormat>(values[2 * i]), scale);
        packed[i] = packed_pair(
            first, is_pair ? quantized(widened<kFormat>(values[2 * i + 1]), scale) : 0);
      }
    }
  }
}

template <Format kFormat>
__global__ void dequantize_kernel(const QuantizedBlocks b) {
  auto* const values = static_cast<Stored<kFormat>*>(b.values);
  for (std::int64_t i = first_of_thread(); i < b.numel; i += stride_of_grid()) {
    const std::int32_t integer = b.bits == 8 ? static_cast<std::int8_t>(b.packed[i])
                                             : unpacked(b.packed[i / 2], i % 2 != 0);
    values[i] = narrowed<kFormat>(dequantized(integer, b.scales[i / b.block_numel]));
  }
}

}  // namespace

void quantize_device(const QuantizedBlocks& blocks, void* stream) {
  const std::int64_t count = blocks_of(blocks.numel, blocks.block_numel);
  if (count == 0) return;
  const unsigned int grid = grid_of(count * kThreads);
  const cudaStream_t on = stream_of(stream);
  if (blocks.format == Format::kFloat32) {
    quantize_kernel<Format::kFloat32><<<grid, kThreads, 0, on>>>(blocks, count);
  } else if (blocks.format == Format::kBFloat16) {
    quantize_kernel<Format::kBFloat16><<<grid, kThreads, 0, on>>>(blocks, count);
  } else {
    quantize_kernel<Format::kFloat16><<<grid, kThreads, 0, on>>>(blocks, count);
  }
}

void dequantize_device(const QuantizedBlocks& blocks, void* stream) {
  if (blocks.numel == 0) return;
  const unsigned int grid = grid_of(blocks.numel);
  const cudaStream_t on = stream_of(stream);
  if (blocks.format == Format::kFloat32) {
    dequantize_kernel<Format::kFloat32><<<grid, kThreads, 0, on>>>(blocks);
  } else if (blocks.format == Format::kBFloat16) {
    dequantize_kernel<Format::kBFloat16><<<grid, kThreads, 0, on>>>(blocks);
  } else {
    dequantize_kernel<Format::kFloat16><<<grid, kThreads, 0, on>>>(blocks);
  }
}

}  // namespace lightning_zero
