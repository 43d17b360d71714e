// Tensors as addresses, checked: what the bindings of host and device have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "adam.h"

namespace lightning_zero {

inline Format format_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Format::kFloat32;
    case at::kBFloat16:
      return Format::kBFloat16;
    case at::kHalf:
      return Format::kFloat16;
    default:
      TORCH_CHECK(false, "lightning_zero ops take fp32, bf16 and fp16, not ", tensor.scalar_type());
  }
}

// Address of a tensor whose elements lie without gaps; the order of its axes does not matter.
inline void* address_of(const at::Tensor& tensor, std::int64_t numel, const at::Device& device) {
  TORCH_CHECK(tensor.device() == device, "all tensors of a call lie on one device, found ",
              tensor.device(), " and ", device);
  TORCH_CHECK(tensor.numel() == numel, "tensors of a piece have ", numel, " and ", tensor.numel(),
              " elements");
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "a piece is one run of memory without gaps");
  return tensor.data_ptr();
}

inline float* floats_of(const at::Tensor& tensor, std::int64_t numel, const at::Device& device) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "states of Adam are fp32, not ",
              tensor.scalar_type());
  return static_cast<float*>(address_of(tensor, numel, device));
}

// Format of a list of tensors, the same for all of them; none of an empty list.
inline Format format_of(at::TensorList tensors) {
  const Format format = tensors.empty() ? Format::kNone : format_of(tensors[0]);
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(format_of(tensor) == format, "gradients, and copies, have one dtype in a call");
  }
  return format;
}

// Pieces of an Adam step or of its undoing, without gradients and coefficients.
inline std::vector<AdamPiece> pieces_of(at::TensorList masters, at::TensorList exp_avgs,
                                        at::TensorList exp_avg_sqs, at::TensorList copies,
                                        at::TensorList undo) {
  const std::size_t count = masters.size();
  TORCH_CHECK(exp_avgs.size() == count && exp_avg_sqs.size() == count, "one state for each master");
  TORCH_CHECK(copies.empty() || copies.size() == count, "one copy for each master, or none");
  TORCH_CHECK(undo.empty() || undo.size() == count, "one undo record for each master, or none");
  std::vector<AdamPiece> pieces(count);
  for (std::size_t i = 0; i < count; ++i) {
    const at::Device device = masters[0].device();
    AdamPiece& piece = pieces[i];
    piece.numel = masters[i].numel();
    piece.master = floats_of(masters[i], piece.numel, device);
    piece.exp_avg = floats_of(exp_avgs[i], piece.numel, device);
    piece.exp_avg_sq = floats_of(exp_avg_sqs[i], piece.numel, device);
    if (!copies.empty()) piece.copy = address_of(copies[i], piece.numel, device);
    if (!undo.empty()) piece.undo = floats_of(undo[i], 3 * piece.numel, device);
  }
  return pieces;
}

// What an Adam step does beside its tensors; the bindings of all ops take it in this order.
struct AdamSettings {
  double lr, beta1, beta2, eps, weight_decay;
  bool is_decoupled, is_maximised;
  double grad_scale;
};

inline void take_gradients(std::vector<AdamPiece>& pieces, at::TensorList grads,
                           at::ArrayRef<double> steps, const AdamSettings& settings) {
  TORCH_CHECK(grads.size() == pieces.size() && steps.size() == pieces.size(),
              "one gradient and one step for each master");
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    pieces[i].grad = address_of(grads[i], pieces[i].numel, grads[0].device());
    pieces[i].coefficients = adam_coefficients(
        steps[i], settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay,
        settings.is_decoupled, settings.is_maximised, settings.grad_scale);
  }
}

}  // namespace lightning_zero
