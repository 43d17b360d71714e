// Sums of squares on a CUDA device, in an order that does not depend on how threads are scheduled.
#include "formats.h"
#include "launch.cuh"
#include "sums.h"

namespace lightning_zero {
namespace {

// The sum of what all threads of a group hold, as a tree of halves; known to the first thread.
__device__ double sum_of_group(double mine) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

// One group of threads for a part.
template <Format kFormat>
__global__ void squares_kernel(const void* stored, std::int64_t numel, double* parts) {
  const auto* const values = static_cast<const Stored<kFormat>*>(stored);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kPartNumel;
  const std::int64_t end = begin + kPartNumel < numel ? begin + kPartNumel : numel;
  double sum = 0.0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    sum += square(widened<kFormat>(values[i]));
  }
  sum = sum_of_group(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One thread for a column of a part: neighbours read neighbours.
template <Format kFormat>
__global__ void columns_kernel(const Matrix matrix, double* parts) {
  const std::int64_t column = first_of_thread();
  if (column >= matrix.columns) return;
  const auto* const values = static_cast<const Stored<kFormat>*>(matrix.values);
  const std::int64_t part = blockIdx.y;
  const std::int64_t end = (part + 1) * kPartRows;
  double sum = 0.0;
  for (std::int64_t row = part * kPartRows; row < (end < matrix.rows ? end : matrix.rows); ++row) {
    sum += square(widened<kFormat>(values[row * matrix.columns + column]));
  }
  parts[part * matrix.columns + column] = sum;
}

__global__ void parts_kernel(const double* parts, std::int64_t count, std::int64_t columns,
                             float* sums) {
  const std::int64_t column = first_of_thread();
  if (column >= columns) return;
  double sum = 0.0;
  for (std::int64_t part = 0; part < count; ++part) sum += parts[part * columns + column];
  sums[column] = static_cast<float>(sum);
}

}  // namespace

void sum_of_squares_device(const void* values, Format format, std::int64_t numel, double* parts,
                           void* stream) {
  if (numel == 0) return;
  const auto grid = static_cast<unsigned int>(blocks_of(numel, kPartNumel));
  const cudaStream_t on = stream_of(stream);
  if (format == Format::kFloat32) {
    squares_kernel<Format::kFloat32><<<grid, kThreads, 0, on>>>(values, numel, parts);
  } else if (format == Format::kBFloat16) {
    squares_kernel<Format::kBFloat16><<<grid, kThreads, 0, on>>>(values, numel, parts);
  } else {
    squares_kernel<Format::kFloat16><<<grid, kThreads, 0, on>>>(values, numel, parts);
  }
}

void column_squares_device(const Matrix& matrix, double* parts, float* sums, void* stream) {
  const std::int64_t count = blocks_of(matrix.rows, kPartRows);
  const auto width = static_cast<unsigned int>(blocks_of(matrix.columns, kThreads));
  if (width == 0) return;
  const cudaStream_t on = stream_of(stream);
  const dim3 grid(width, static_cast<unsigned int>(count));
  if (count == 0) {
    // Nothing to add up: the sums become zero below.
  } else if (matrix.format == Format::kFloat32) {
    columns_kernel<Format::kFloat32><<<grid, kThreads, 0, on>>>(matrix, parts);
  } else if (matrix.format == Format::kBFloat16) {
    columns_kernel<Format::kBFloat16><<<grid, kThreads, 0, on>>>(matrix, parts);
  } else {
    columns_kernel<Format::kFloat16><<<grid, kThreads, 0, on>>>(matrix, parts);
  }
  parts_kernel<<<width, kThreads, 0, on>>>(parts, count, matrix.columns, sums);
}

}  // namespace lightning_zero
