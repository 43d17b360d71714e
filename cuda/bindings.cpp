// Schemas of all ops, and their bindings on the host. Threads share the elements of all pieces of
// a call evenly, whatever the sizes of the pieces.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "arguments.h"

namespace lightning_zero {
namespace {

constexpr std::int64_t kThreadNumel = 32768;  // below it, a second thread costs more than it gains
constexpr std::int64_t kStripColumns = 512;

// Calls `work(piece, begin, end)` for parts of all pieces that together are their elements.
template <typename Work>
void for_all_elements(const std::vector<AdamPiece>& pieces, const Work& work) {
  std::vector<std::int64_t> ends;
  std::int64_t numel = 0;
  for (const AdamPiece& piece : pieces) ends.push_back(numel += piece.numel);
  at::parallel_for(0, numel, kThreadNumel, [&](std::int64_t begin, std::int64_t end) {
    auto i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++i) {
      const std::int64_t piece_begin = ends[i] - pieces[i].numel;
      const std::int64_t piece_end = std::min(end, ends[i]);
      if (begin < piece_end) work(pieces[i], begin - piece_begin, piece_end - piece_begin);
      begin = std::max(begin, piece_end);
    }
  });
}

void adam_step(at::TensorList masters, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               at::TensorList grads, at::ArrayRef<double> steps, double lr, double beta1,
               double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
               double grad_scale, at::TensorList copies, at::TensorList undo) {
  auto pieces = pieces_of(masters, exp_avgs, exp_avg_sqs, copies, undo);
  take_gradients(pieces, grads, steps,
                 {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, grad_scale});
  const AdamFormats formats{format_of(grads), format_of(copies)};
  for_all_elements(pieces, [&](const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
    adam_step_host(piece, formats, begin, end);
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
  for_all_elements(pieces, [&](const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
    adam_columns_host(piece, columns, formats, begin, end);
  });
}

void adam_undo(at::TensorList masters, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               at::TensorList undo, at::TensorList copies) {
  TORCH_CHECK(undo.size() == masters.size(), "one undo record for each master");
  const auto pieces = pieces_of(masters, exp_avgs, exp_avg_sqs, copies, undo);
  const AdamFormats formats{Format::kFloat32, format_of(copies)};
  for_all_elements(pieces, [&](const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
    adam_undo_host(piece, formats, begin, end);
  });
}

void quantize(const at::Tensor& values, std::int64_t bits, std::int64_t block_numel,
              const at::Tensor& packed, const at::Tensor& scales) {
  const auto blocks = blocks_of_tensors(values, packed, scales, bits, block_numel);
  at::parallel_for(0, scales.numel(), blocks_of(kThreadNumel, block_numel),
                   [&](std::int64_t begin, std::int64_t end) { quantize_host(blocks, begin, end); });
}

void dequantize(const at::Tensor& packed, const at::Tensor& scales, std::int64_t bits,
                std::int64_t block_numel, const at::Tensor& values) {
  const auto blocks = blocks_of_tensors(values, packed, scales, bits, block_numel);
  at::parallel_for(0, scales.numel(), blocks_of(kThreadNumel, block_numel),
                   [&](std::int64_t begin, std::int64_t end) { dequantize_host(blocks, begin, end); });
}

void sum_of_squares(at::TensorList tensors, const at::Tensor& total) {
  struct Part {
    const void* values;
    Format format;
    std::int64_t begin, end;
  };
  std::vector<Part> parts;
  for (const at::Tensor& tensor : tensors) {
    const std::int64_t numel = tensor.numel();
    const void* const values = address_of(tensor, numel, total.device());
    for (std::int64_t begin = 0; begin < numel; begin += kPartNumel) {
      parts.push_back({values, format_of(tensor), begin, std::min(numel, begin + kPartNumel)});
    }
  }
  std::vector<double> sums(parts.size());
  at::parallel_for(0, static_cast<std::int64_t>(parts.size()), 1,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const Part& part = parts[i];
                       sums[i] =
                           sum_of_squares_host(part.values, part.format, part.begin, part.end);
                     }
                   });
  double& found = *total_of(total, total.device());
  found = 0.0;
  for (const double sum : sums) found += sum;
}

void column_squares(const at::Tensor& tensor, const at::Tensor& sums) {
  const Matrix matrix = matrix_of(tensor);
  TORCH_CHECK(sums.scalar_type() == at::kFloat, "sums of columns are fp32");
  auto* const found = static_cast<float*>(contiguous_address(sums, matrix.columns, sums.device()));
  const std::int64_t parts = blocks_of(matrix.rows, kPartRows);
  const std::int64_t strips = blocks_of(matrix.columns, kStripColumns);
  std::vector<double> of_parts(parts * matrix.columns);
  at::parallel_for(0, parts * strips, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t part = i / strips;
      const std::int64_t first = i % strips * kStripColumns;
      const std::int64_t last = std::min(matrix.columns, first + kStripColumns);
      column_squares_host(matrix, part, first, last, of_parts.data() + part * matrix.columns);
    }
  });
  for (std::int64_t column = 0; column < matrix.columns; ++column) {
    double sum = 0.0;
    for (std::int64_t part = 0; part < parts; ++part) {
      sum += of_parts[part * matrix.columns + column];
    }
    found[column] = static_cast<float>(sum);
  }
}

void column_words(const at::Tensor& words, const at::Tensor& sums) {
  TORCH_CHECK(words.scalar_type() == at::kLong && sums.scalar_type() == at::kLong,
              "words are added up as int64");
  const std::int64_t numel = words.numel();
  const std::int64_t columns = sums.numel();
  TORCH_CHECK(columns > 0, "there is no column to add up");
  const auto* const from =
      static_cast<const std::int64_t*>(contiguous_address(words, numel, words.device()));
  auto* const found =
      static_cast<std::uint64_t*>(contiguous_address(sums, columns, words.device()));
  std::fill_n(found, columns, 0);
  std::mutex adding;
  at::parallel_for(0, numel, kThreadNumel, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint64_t> own(columns);
    column_words_host(from, columns, begin, end, own.data());
    const std::lock_guard<std::mutex> lock(adding);
    for (std::int64_t i = 0; i < columns; ++i) found[i] += own[i];
  });
}

ColumnSelection checked_selection(const at::Tensor& matrix, const at::Tensor& indices,
                                  const at::Tensor& packed) {
  const ColumnSelection selection = selection_of(matrix, indices, packed);
  for (std::int64_t i = 0; i < selection.count; ++i) {
    const std::int64_t index = selection.indices[i];
    TORCH_CHECK_INDEX(index >= 0 && index < selection.columns, "there is no column ", index,
                      " in a matrix of ", selection.columns);
  }
  return selection;
}

void gather_columns(const at::Tensor& matrix, const at::Tensor& indices, const at::Tensor& packed) {
  const auto selection = checked_selection(matrix, indices, packed);
  const std::int64_t rows = blocks_of(kThreadNumel, std::max<std::int64_t>(1, selection.count));
  at::parallel_for(0, selection.rows, rows, [&](std::int64_t begin, std::int64_t end) {
    gather_columns_host(selection, begin, end);
  });
}

void scatter_columns(const at::Tensor& matrix, const at::Tensor& indices,
                     const at::Tensor& packed) {
  const auto selection = checked_selection(matrix, indices, packed);
  const std::int64_t rows = blocks_of(kThreadNumel, std::max<std::int64_t>(1, selection.count));
  at::parallel_for(0, selection.rows, rows, [&](std::int64_t begin, std::int64_t end) {
    scatter_columns_host(selection, begin, end);
  });
}

}  // namespace
}  // namespace lightning_zero

TORCH_LIBRARY(lightning_zero, library) {
  library.def(
      "adam_step_(Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor[] grads, float[] steps, float lr, float beta1, float beta2, float eps, "
      "float weight_decay, bool decoupled, bool maximize, float grad_scale, "
      "Tensor(d!)[] copies, Tensor(e!)[] undo) -> ()");
  library.def(
      "adam_columns_step_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor grad, Tensor step_sizes, Tensor bias_roots, int first_column, float lr, float beta1, "
      "float beta2, float eps, float weight_decay, bool decoupled, bool maximize, "
      "float grad_scale, Tensor(d!)[] copy) -> ()");
  library.def(
      "adam_step_undo_(Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor[] undo, Tensor(d!)[] copies) -> ()");
  library.def(
      "quantize_blocks_(Tensor values, int bits, int block_numel, Tensor(a!) packed, "
      "Tensor(b!) scales) -> ()");
  library.def(
      "dequantize_blocks_(Tensor packed, Tensor scales, int bits, int block_numel, "
      "Tensor(a!) values) -> ()");
  library.def("sum_of_squares_(Tensor[] tensors, Tensor(a!) total) -> ()");
  library.def("column_squares_(Tensor matrix, Tensor(a!) sums) -> ()");
  library.def("column_words_(Tensor words, Tensor(a!) sums) -> ()");
  library.def("gather_columns_(Tensor matrix, Tensor indices, Tensor(a!) packed) -> ()");
  library.def("scatter_columns_(Tensor(a!) matrix, Tensor indices, Tensor packed) -> ()");
}

TORCH_LIBRARY_IMPL(lightning_zero, CPU, library) {
  library.impl("adam_step_", lightning_zero::adam_step);
  library.impl("adam_columns_step_", lightning_zero::adam_columns_step);
  library.impl("adam_step_undo_", lightning_zero::adam_undo);
  library.impl("quantize_blocks_", lightning_zero::quantize);
  library.impl("dequantize_blocks_", lightning_zero::dequantize);
  library.impl("sum_of_squares_", lightning_zero::sum_of_squares);
  library.impl("column_squares_", lightning_zero::column_squares);
  library.impl("column_words_", lightning_zero::column_words);
  library.impl("gather_columns_", lightning_zero::gather_columns);
  library.impl("scatter_columns_", lightning_zero::scatter_columns);
}
