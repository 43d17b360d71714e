// Adam on the host. Pieces are walked in blocks that stay in the first-level cache: gradients are
// widened, stepped and narrowed by three plain loops, which the compiler vectorises, while main
// memory is read and written once.
#include <algorithm>

#include "adam.h"
#include "formats.h"

namespace lightning_zero {
namespace {

constexpr std::int64_t kBlockNumel = 512;

template <float (*convert)(std::uint16_t)>
void widen(const std::uint16_t* __restrict from, float* __restrict to, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) to[i] = convert(from[i]);
}

template <std::uint16_t (*convert)(float)>
void narrow(const float* __restrict from, std::uint16_t* __restrict to, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) to[i] = convert(from[i]);
}

// The gradients of a block in fp32: where they are, or widened into `room`.
const float* widened(const void* grad, Format format, std::int64_t begin, std::int64_t numel,
                     float* room) {
  if (format == Format::kFloat32) return static_cast<const float*>(grad) + begin;
  const auto* stored = static_cast<const std::uint16_t*>(grad) + begin;
  if (format == Format::kBFloat16) {
    widen<from_bfloat16>(stored, room, numel);
  } else {
    widen<from_float16>(stored, room, numel);
  }
  return room;
}

void write_copy(const float* master, void* copy, Format format, std::int64_t begin,
                std::int64_t numel) {
  if (copy == nullptr) return;
  if (format == Format::kFloat32) {
    std::copy_n(master, numel, static_cast<float*>(copy) + begin);
  } else if (format == Format::kBFloat16) {
    narrow<to_bfloat16>(master, static_cast<std::uint16_t*>(copy) + begin, numel);
  } else {
    narrow<to_float16>(master, static_cast<std::uint16_t*>(copy) + begin, numel);
  }
}

void step_block(const AdamCoefficients& coefficients, const float* __restrict grad,
                float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
                std::int64_t numel) {
  const AdamCoefficients c = coefficients;
  for (std::int64_t i = 0; i < numel; ++i) {
    adam_element(c, grad[i], master[i], exp_avg[i], exp_avg_sq[i]);
  }
}

}  // namespace

void adam_step_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end) {
  alignas(64) float room[kBlockNumel];
  for (std::int64_t at = begin; at < end; at += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, end - at);
    float* const master = piece.master + at;
    float* const exp_avg = piece.exp_avg + at;
    float* const exp_avg_sq = piece.exp_avg_sq + at;
    if (piece.undo != nullptr) {
      std::copy_n(master, numel, piece.undo + at);
      std::copy_n(exp_avg, numel, piece.undo + piece.numel + at);
      std::copy_n(exp_avg_sq, numel, piece.undo + 2 * piece.numel + at);
    }
    const float* const grad = widened(piece.grad, formats.grad, at, numel, room);
    step_block(piece.coefficients, grad, master, exp_avg, exp_avg_sq, numel);
    write_copy(master, piece.copy, formats.copy, at, numel);
  }
}

void adam_undo_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end) {
  for (std::int64_t at = begin; at < end; at += kBlockNumel) {
    const std::int64_t numel = std::min(kBlockNumel, end - at);
    std::copy_n(piece.undo + at, numel, piece.master + at);
    std::copy_n(piece.undo + piece.numel + at, numel, piece.exp_avg + at);
    std::copy_n(piece.undo + 2 * piece.numel + at, numel, piece.exp_avg_sq + at);
    write_copy(piece.master + at, piece.copy, formats.copy, at, numel);
  }
}

}  // namespace lightning_zero
