// Bindings of the ops on a CUDA device: current stream of the tensors' device, one launch a piece.
// The schemas stand in bindings.cpp, whose library is loaded first.
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "arguments.h"

namespace lightning_zero {
namespace {

// Launches on a device, on its current stream; an error of a launch is raised here.
template <typename Launch>
void on_device_of(const at::Tensor& tensor, const Launch& launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  launch(static_cast<void*>(c10::cuda::getCurrentCUDAStream().stream()));
  C10_CUDA_CHECK(cudaGetLastError());
}

at::Tensor room_for(std::int64_t numel, const at::Tensor& beside) {
  return at::empty({numel}, beside.options().dtype(at::kDouble));
}

void adam_step(at::TensorList masters, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               at::TensorList grads, at::ArrayRef<double> steps, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
               double grad_scale, at::TensorList copies, at::TensorList undo) {
  auto pieces = pieces_of(masters, exp_avgs, exp_avg_sqs, copies, undo);
  take_gradients(pieces, grads, steps,
                 {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_scale});
  const AdamFormats formats{format_of(grads), format_of(copies)};
  on_device_of(masters[0], [&](void* stream) {
    for (const AdamPiece& piece : pieces) adam_step_device(piece, formats, stream);
  });
}

void adam_columns_step(const at::Tensor& master, const at::Tensor& exp_avg,
                       const at::Tensor& exp_avg_sq, const at::Tensor& grad,
                       const at::Tensor& step_sizes, const at::Tensor& bias_roots,
                       std::int64_t first_column, double lr, double beta1, double beta2, double eps,
                       double weight_decay, bool decoupled, bool maximize, double grad_scale,
                       at::TensorList copy) {
  auto pieces = pieces_of({master}, {exp_avg}, {exp_avg_sq}, copy, {});
  take_gradients(pieces, {grad}, {1.0},
                 {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_scale});
  const AdamColumns columns = columns_of(step_sizes, bias_roots, first_column, master.device());
  const AdamFormats formats{format_of(grad), format_of(copy)};
  on_device_of(master, [&](void* stream) {
    adam_columns_device(pieces[0], columns, formats, stream);
  });
}

void adam_undo(at::TensorList masters, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               at::TensorList undo, at::TensorList copies) {
  TORCH_CHECK(undo.size() == masters.size(), "one undo record for each master");
  const auto pieces = pieces_of(masters, exp_avgs, exp_avg_sqs, copies, undo);
  const AdamFormats formats{Format::kFloat32, format_of(copies)};
  on_device_of(masters[0], [&](void* stream) {
    for (const AdamPiece& piece : pieces) adam_undo_device(piece, formats, stream);
  });
}

void quantize(const at::Tensor& values, std::int64_t bits, std::int64_t block_numel,
              const at::Tensor& packed, const at::Tensor& scales) {
  const auto blocks = blocks_of_tensors(values, packed, scales, bits, block_numel);
  on_device_of(values, [&](void* stream) { quantize_device(blocks, stream); });
}

void dequantize(const at::Tensor& packed, const at::Tensor& scales, std::int64_t bits,
                std::int64_t block_numel, const at::Tensor& values) {
  const auto blocks = blocks_of_tensors(values, packed, scales, bits, block_numel);
  on_device_of(values, [&](void* stream) { dequantize_device(blocks, stream); });
}

void sum_of_squares(at::TensorList tensors, const at::Tensor& total) {
  total_of(total, total.device());
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += blocks_of(tensor.numel(), kPartNumel);
  const at::Tensor parts = room_for(count, total);
  on_device_of(total, [&](void* stream) {
    auto* part = static_cast<double*>(parts.data_ptr());
    for (const at::Tensor& tensor : tensors) {
      const void* const values = address_of(tensor, tensor.numel(), total.device());
      sum_of_squares_device(values, format_of(tensor), tensor.numel(), part, stream);
      part += blocks_of(tensor.numel(), kPartNumel);
    }
  });
  total.copy_(at::sum(parts));
}

void column_squares(const at::Tensor& tensor, const at::Tensor& sums) {
  const Matrix matrix = matrix_of(tensor);
  TORCH_CHECK(sums.scalar_type() == at::kFloat, "sums of columns are fp32");
  auto* const found =
      static_cast<float*>(contiguous_address(sums, matrix.columns, tensor.device()));
  const at::Tensor parts = room_for(blocks_of(matrix.rows, kPartRows) * matrix.columns, tensor);
  on_device_of(tensor, [&](void* stream) {
    column_squares_device(matrix, static_cast<double*>(parts.data_ptr()), found, stream);
  });
}

void gather_columns(const at::Tensor& matrix, const at::Tensor& indices, const at::Tensor& packed) {
  const auto selection = selection_of(matrix, indices, packed);
  on_device_of(matrix, [&](void* stream) { gather_columns_device(selection, stream); });
}

void scatter_columns(const at::Tensor& matrix, const at::Tensor& indices,
                     const at::Tensor& packed) {
  const auto selection = selection_of(matrix, indices, packed);
  on_device_of(matrix, [&](void* stream) { scatter_columns_device(selection, stream); });
}

}  // namespace
}  // namespace lightning_zero

TORCH_LIBRARY_IMPL(lightning_zero, CUDA, library) {
  library.impl("adam_step_", lightning_zero::adam_step);
  library.impl("adam_columns_step_", lightning_zero::adam_columns_step);
  library.impl("adam_step_undo_", lightning_zero::adam_undo);
  library.impl("quantize_blocks_", lightning_zero::quantize);
  library.impl("dequantize_blocks_", lightning_zero::dequantize);
  library.impl("sum_of_squares_", lightning_zero::sum_of_squares);
  library.impl("column_squares_", lightning_zero::column_squares);
  library.impl("gather_columns_", lightning_zero::gather_columns);
  library.impl("scatter_columns_", lightning_zero::scatter_columns);
}
