// How kernels are launched: one thread for an element, in a loop over what a full device can hold.
#pragma once

#include <cuda_runtime.h>

#include "shared.h"

namespace lightning_zero {

constexpr int kThreads = 256;

// Blocks for a loop that strides by the whole grid; enough for any device, and few for a short loop.
inline unsigned int grid_of(std::int64_t numel) {
  constexpr std::int64_t kMost = 4096;
  const std::int64_t wanted = blocks_of(numel, kThreads);
  return static_cast<unsigned int>(wanted < kMost ? (wanted > 0 ? wanted : 1) : kMost);
}

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

__device__ __forceinline__ std::int64_t first_of_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ std::int64_t stride_of_grid() {
  return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

}  // namespace lightning_zero
