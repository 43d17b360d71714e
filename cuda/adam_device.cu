// Adam on a CUDA device: the elements of one piece by one launch.
#include "adam.h"
#include "formats.h"
#include "launch.cuh"

namespace lightning_zero {
namespace {

template <Format kGrad, Format kCopy>
__global__ void step_kernel(const AdamPiece piece) {
  const auto* const grad = static_cast<const Stored<kGrad>*>(piece.grad);
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  for (std::int64_t i = first_of_thread(); i < piece.numel; i += stride_of_grid()) {
    float master = piece.master[i];
    float exp_avg = piece.exp_avg[i];
    float exp_avg_sq = piece.exp_avg_sq[i];
    if (piece.undo != nullptr) {
      piece.undo[i] = master;
      piece.undo[piece.numel + i] = exp_avg;
      piece.undo[2 * piece.numel + i] = exp_avg_sq;
    }
    adam_element(piece.coefficients, widened<kGrad>(grad[i]), master, exp_avg, exp_avg_sq);
    piece.master[i] = master;
    piece.exp_avg[i] = exp_avg;
    piece.exp_avg_sq[i] = exp_avg_sq;
    if constexpr (kCopy != Format::kNone) copy[i] = narrowed<kCopy>(master);
  }
}

template <Format kGrad, Format kCopy>
__global__ void columns_kernel(const AdamPiece piece, const AdamColumns columns) {
  const auto* const grad = static_cast<const Stored<kGrad>*>(piece.grad);
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  for (std::int64_t i = first_of_thread(); i < piece.numel; i += stride_of_grid()) {
    const std::int64_t column = (columns.first + i) % columns.columns;
    adam_element(piece.coefficients, columns.steps[column], columns.bias_roots[column],
                 widened<kGrad>(grad[i]), piece.master[i], piece.exp_avg[i], piece.exp_avg_sq[i]);
    if constexpr (kCopy != Format::kNone) copy[i] = narrowed<kCopy>(piece.master[i]);
  }
}

template <Format kCopy>
__global__ void undo_kernel(const AdamPiece piece) {
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  for (std::int64_t i = first_of_thread(); i < piece.numel; i += stride_of_grid()) {
    const float master = piece.undo[i];
    piece.master[i] = master;
    piece.exp_avg[i] = piece.undo[piece.numel + i];
    piece.exp_avg_sq[i] = piece.undo[2 * piece.numel + i];
    if constexpr (kCopy != Format::kNone) copy[i] = narrowed<kCopy>(master);
  }
}

template <Format kGrad>
void launch_step(const AdamPiece& piece, Format copy, cudaStream_t stream) {
  const unsigned int grid = grid_of(piece.numel);
  switch (copy) {
    case Format::kFloat32:
      step_kernel<kGrad, Format::kFloat32><<<grid, kThreads, 0, stream>>>(piece);
      break;
    case Format::kBFloat16:
      step_kernel<kGrad, Format::kBFloat16><<<grid, kThreads, 0, stream>>>(piece);
      break;
    case Format::kFloat16:
      step_kernel<kGrad, Format::kFloat16><<<grid, kThreads, 0, stream>>>(piece);
      break;
    case Format::kNone:
      step_kernel<kGrad, Format::kNone><<<grid, kThreads, 0, stream>>>(piece);
      break;
  }
}

template <Format kGrad>
void launch_columns(const AdamPiece& piece, const AdamColumns& columns, Format copy,
                    cudaStream_t stream) {
  const unsigned int grid = grid_of(piece.numel);
  switch (copy) {
    case Format::kFloat32:
      columns_kernel<kGrad, Format::kFloat32><<<grid, kThreads, 0, stream>>>(piece, columns);
      break;
    case Format::kBFloat16:
      columns_kernel<kGrad, Format::kBFloat16><<<grid, kThreads, 0, stream>>>(piece, columns);
      break;
    case Format::kFloat16:
      columns_kernel<kGrad, Format::kFloat16><<<grid, kThreads, 0, stream>>>(piece, columns);
      break;
    case Format::kNone:
      columns_kernel<kGrad, Format::kNone><<<grid, kThreads, 0, stream>>>(piece, columns);
      break;
  }
}

}  // namespace

void adam_columns_device(const AdamPiece& piece, const AdamColumns& columns, AdamFormats formats,
                         void* stream) {
  if (piece.numel == 0) return;
  switch (formats.grad) {
    case Format::kBFloat16:
      return launch_columns<Format::kBFloat16>(piece, columns, formats.copy, stream_of(stream));
    case Format::kFloat16:
      return launch_columns<Format::kFloat16>(piece, columns, formats.copy, stream_of(stream));
    default:
      return launch_columns<Format::kFloat32>(piece, columns, formats.copy, stream_of(stream));
  }
}

void adam_step_device(const AdamPiece& piece, AdamFormats formats, void* stream) {
  if (piece.numel == 0) return;
  switch (formats.grad) {
    case Format::kBFloat16:
      return launch_step<Format::kBFloat16>(piece, formats.copy, stream_of(stream));
    case Format::kFloat16:
      return launch_step<Format::kFloat16>(piece, formats.copy, stream_of(stream));
    default:
      return launch_step<Format::kFloat32>(piece, formats.copy, stream_of(stream));
  }
}

void adam_undo_device(const AdamPiece& piece, AdamFormats formats, void* stream) {
  if (piece.numel == 0) return;
  const unsigned int grid = grid_of(piece.numel);
  const cudaStream_t on = stream_of(stream);
  switch (formats.copy) {
    case Format::kFloat32:
      undo_kernel<Format::kFloat32><<<grid, kThreads, 0, on>>>(piece);
      break;
    case Format::kBFloat16:
      undo_kernel<Format::kBFloat16><<<grid, kThreads, 0, on>>>(piece);
      break;
    case Format::kFloat16:
      undo_kernel<Format::kFloat16><<<grid, kThreads, 0, on>>>(piece);
      break;
    case Format::kNone:
      undo_kernel<Format::kNone><<<grid, kThreads, 0, on>>>(piece);
      break;
  }
}

}  // namespace lightning_zero
