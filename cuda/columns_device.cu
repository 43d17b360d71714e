// Selected columns on a CUDA device.
#include "columns.h"
#include "launch.cuh"

namespace lightning_zero {
namespace {

// An index beyond the matrix stops the kernel: to look at them first would wait for the device.
__device__ std::int64_t place_of(const ColumnSelection& s, std::int64_t i) {
  const std::int64_t index = s.indices[i % s.count];
  if (index < 0 || index >= s.columns) __trap();
  return i / s.count * s.columns + index;
}

template <typename T>
__global__ void gather_kernel(const ColumnSelection s) {
  const auto* const matrix = static_cast<const T*>(s.matrix);
  auto* const packed = static_cast<T*>(s.packed);
  for (std::int64_t i = first_of_thread(); i < s.rows * s.count; i += stride_of_grid()) {
    packed[i] = matrix[place_of(s, i)];
  }
}

template <typename T>
__global__ void scatter_kernel(const ColumnSelection s) {
  auto* const matrix = static_cast<T*>(s.matrix);
  const auto* const packed = static_cast<const T*>(s.packed);
  for (std::int64_t i = first_of_thread(); i < s.rows * s.count; i += stride_of_grid()) {
    matrix[place_of(s, i)] = packed[i];
  }
}

}  // namespace

void gather_columns_device(const ColumnSelection& s, void* stream) {
  if (s.rows * s.count == 0) return;
  const unsigned int grid = grid_of(s.rows * s.count);
  if (s.value_nbytes == 4) {
    gather_kernel<std::uint32_t><<<grid, kThreads, 0, stream_of(stream)>>>(s);
  } else {
    gather_kernel<std::uint16_t><<<grid, kThreads, 0, stream_of(stream)>>>(s);
  }
}

void scatter_columns_device(const ColumnSelection& s, void* stream) {
  if (s.rows * s.count == 0) return;
  const unsigned int grid = grid_of(s.rows * s.count);
  if (s.value_nbytes == 4) {
    scatter_kernel<std::uint32_t><<<grid, kThreads, 0, stream_of(stream)>>>(s);
  } else {
    scatter_kernel<std::uint16_t><<<grid, kThreads, 0, stream_of(stream)>>>(s);
  }
}

}  // namespace lightning_zero
