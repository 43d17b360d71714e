// Schemas of all ops, and their bindings on the host. Threads share the elements of all pieces of
// a call evenly, whatever the sizes of the pieces.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "pieces.h"

namespace lightning_zero {
namespace {

constexpr std::int64_t kThreadNumel = 32768;  // below it, a second thread costs more than it gains

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

void adam_undo(at::TensorList masters, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               at::TensorList undo, at::TensorList copies) {
  TORCH_CHECK(undo.size() == masters.size(), "one undo record for each master");
  const auto pieces = pieces_of(masters, exp_avgs, exp_avg_sqs, copies, undo);
  const AdamFormats formats{Format::kFloat32, format_of(copies)};
  for_all_elements(pieces, [&](const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
    adam_undo_host(piece, formats, begin, end);
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
      "adam_step_undo_(Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor[] undo, Tensor(d!)[] copies) -> ()");
}

TORCH_LIBRARY_IMPL(lightning_zero, CPU, library) {
  library.impl("adam_step_", lightning_zero::adam_step);
  library.impl("adam_step_undo_", lightning_zero::adam_undo);
}
