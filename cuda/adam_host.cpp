// Adam on the host: all that a step does to a line of elements is done while the line is in the
// first-level cache, so main memory is read and written once.
#include "adam.h"

#include <algorithm>

#include "lines_host.h"

namespace lightning_zero {
namespace {

constexpr std::int64_t kAheadNumel = 1024;
constexpr std::int64_t kRecordNumel = 128;  // a few lines at once: memory takes long runs better

// Old states of some elements into the undo record, if there is one.
void record(const AdamPiece& piece, std::int64_t at, std::int64_t numel) {
  if (piece.undo == nullptr) return;
  float* row = piece.undo + at;
  for (const float* state : {piece.master, piece.exp_avg, piece.exp_avg_sq}) {
    stream(row, state + at, numel * static_cast<std::int64_t>(sizeof(float)));
    row += piece.numel;
  }
}

// Elements beside whole lines.
template <Format kGrad, Format kCopy>
void step_elements(const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
  const auto* const grad = static_cast<const Stored<kGrad>*>(piece.grad);
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  record(piece, begin, end - begin);
  for (std::int64_t i = begin; i < end; ++i) {
    adam_element(piece.coefficients, widened<kGrad>(grad[i]), piece.master[i], piece.exp_avg[i],
                 piece.exp_avg_sq[i]);
    if constexpr (kCopy != Format::kNone) copy[i] = narrowed<kCopy>(piece.master[i]);
  }
}

// Whole lines. Only of arguments, and of those only in a function that stays one, does the compiler
// believe that they do not overlap.
template <Format kGrad, Format kCopy>
__attribute__((noinline)) void step_lines(
    const AdamCoefficients coefficients, const Stored<kGrad>* __restrict grad,
    float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
    Stored<kCopy>* __restrict copy, std::int64_t numel) {
  for (std::int64_t at = 0; at < numel; at += kLineNumel) {
    fetch_ahead(master + at + kAheadNumel);
    fetch_ahead(exp_avg + at + kAheadNumel);
    fetch_ahead(exp_avg_sq + at + kAheadNumel);
    fetch_ahead(grad + at + kAheadNumel);
    alignas(64) float gradient[kLineNumel];
    widen_line<kGrad>(grad + at, gradient);
    for (std::int64_t i = at; i < at + kLineNumel; ++i) {
      adam_element(coefficients, gradient[i - at], master[i], exp_avg[i], exp_avg_sq[i]);
    }
    if constexpr (kCopy != Format::kNone) {
      alignas(64) Stored<kCopy> narrow[kLineNumel];
      narrow_line<kCopy>(master + at, narrow);
      stream(copy + at, narrow, sizeof(narrow));
    }
  }
}

template <Format kGrad, Format kCopy>
void step(const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
  const std::int64_t first = std::min(end, (begin + kLineNumel - 1) / kLineNumel * kLineNumel);
  const std::int64_t last = first + (end - first) / kLineNumel * kLineNumel;
  const auto* const grad = static_cast<const Stored<kGrad>*>(piece.grad);
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  const std::int64_t run_numel = piece.undo == nullptr ? last - first : kRecordNumel;
  step_elements<kGrad, kCopy>(piece, begin, first);
  for (std::int64_t at = first; at < last; at += run_numel) {
    const std::int64_t run_end = std::min(last, at + run_numel);
    record(piece, at, run_end - at);
    step_lines<kGrad, kCopy>(piece.coefficients, grad + at, piece.master + at, piece.exp_avg + at,
                             piece.exp_avg_sq + at, copy + at, run_end - at);
  }
  step_elements<kGrad, kCopy>(piece, last, end);
  end_streams();
}

// Split by what the coefficients are: with a choice in it, the loop is not vectorised.
template <bool kIsAverageNear, bool kHasPenalty>
__attribute__((noinline)) void step_line_of(
    AdamCoefficients coefficients, const float* __restrict steps,
    const float* __restrict bias_roots, const float* __restrict gradient, float* __restrict master,
    float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  coefficients.is_average_near = kIsAverageNear;
  if constexpr (!kHasPenalty) coefficients.penalty = 0.0f;
  for (std::int64_t i = 0; i < kLineNumel; ++i) {
    adam_element(coefficients, steps[i], bias_roots[i], gradient[i], master[i], exp_avg[i],
                 exp_avg_sq[i]);
  }
}

void step_line(const AdamCoefficients& coefficients, const float* steps, const float* bias_roots,
               const float* gradient, float* master, float* exp_avg, float* exp_avg_sq) {
  const bool has_penalty = coefficients.penalty != 0.0f;
  const auto step = coefficients.is_average_near
                        ? (has_penalty ? step_line_of<true, true> : step_line_of<true, false>)
                        : (has_penalty ? step_line_of<false, true> : step_line_of<false, false>);
  step(coefficients, steps, bias_roots, gradient, master, exp_avg, exp_avg_sq);
}

// A run of one row, of which each element has the coefficients of its column.
template <Format kGrad, Format kCopy>
__attribute__((noinline)) void step_row(
    const AdamCoefficients coefficients, const float* __restrict steps,
    const float* __restrict bias_roots, const Stored<kGrad>* __restrict grad,
    float* __restrict master, float* __restrict exp_avg, float* __restrict exp_avg_sq,
    Stored<kCopy>* __restrict copy, std::int64_t numel) {
  const std::int64_t whole = numel / kLineNumel * kLineNumel;
  for (std::int64_t at = 0; at < whole; at += kLineNumel) {
    alignas(64) float gradient[kLineNumel];
    widen_line<kGrad>(grad + at, gradient);
    step_line(coefficients, steps + at, bias_roots + at, gradient, master + at, exp_avg + at,
              exp_avg_sq + at);
    if constexpr (kCopy != Format::kNone) narrow_line<kCopy>(master + at, copy + at);
  }
  for (std::int64_t i = whole; i < numel; ++i) {
    adam_element(coefficients, steps[i], bias_roots[i], widened<kGrad>(grad[i]), master[i],
                 exp_avg[i], exp_avg_sq[i]);
    if constexpr (kCopy != Format::kNone) copy[i] = narrowed<kCopy>(master[i]);
  }
}

template <Format kGrad, Format kCopy>
void step_rows(const AdamPiece& piece, const AdamColumns& columns, std::int64_t begin,
               std::int64_t end) {
  const auto* const grad = static_cast<const Stored<kGrad>*>(piece.grad);
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t column = (columns.first + at) % columns.columns;
    const std::int64_t numel = std::min(end - at, columns.columns - column);
    step_row<kGrad, kCopy>(piece.coefficients, columns.steps + column, columns.bias_roots + column,
                           grad + at, piece.master + at, piece.exp_avg + at, piece.exp_avg_sq + at,
                           kCopy == Format::kNone ? copy : copy + at, numel);
    at += numel;
  }
}

template <Format kGrad>
void rows_of(const AdamPiece& piece, const AdamColumns& columns, Format copy, std::int64_t begin,
             std::int64_t end) {
  switch (copy) {
    case Format::kFloat32:
      return step_rows<kGrad, Format::kFloat32>(piece, columns, begin, end);
    case Format::kBFloat16:
      return step_rows<kGrad, Format::kBFloat16>(piece, columns, begin, end);
    case Format::kFloat16:
      return step_rows<kGrad, Format::kFloat16>(piece, columns, begin, end);
    case Format::kNone:
      return step_rows<kGrad, Format::kNone>(piece, columns, begin, end);
  }
}

template <Format kGrad>
void step_of(const AdamPiece& piece, Format copy, std::int64_t begin, std::int64_t end) {
  switch (copy) {
    case Format::kFloat32:
      return step<kGrad, Format::kFloat32>(piece, begin, end);
    case Format::kBFloat16:
      return step<kGrad, Format::kBFloat16>(piece, begin, end);
    case Format::kFloat16:
      return step<kGrad, Format::kFloat16>(piece, begin, end);
    case Format::kNone:
      return step<kGrad, Format::kNone>(piece, begin, end);
  }
}

template <Format kCopy>
void copy_of(const AdamPiece& piece, std::int64_t begin, std::int64_t end) {
  auto* const copy = static_cast<Stored<kCopy>*>(piece.copy);
  for (std::int64_t i = begin; i < end; ++i) copy[i] = narrowed<kCopy>(piece.undo[i]);
}

}  // namespace

void adam_step_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end) {
  switch (formats.grad) {
    case Format::kBFloat16:
      return step_of<Format::kBFloat16>(piece, formats.copy, begin, end);
    case Format::kFloat16:
      return step_of<Format::kFloat16>(piece, formats.copy, begin, end);
    default:
      return step_of<Format::kFloat32>(piece, formats.copy, begin, end);
  }
}

void adam_columns_host(const AdamPiece& piece, const AdamColumns& columns, AdamFormats formats,
                       std::int64_t begin, std::int64_t end) {
  switch (formats.grad) {
    case Format::kBFloat16:
      return rows_of<Format::kBFloat16>(piece, columns, formats.copy, begin, end);
    case Format::kFloat16:
      return rows_of<Format::kFloat16>(piece, columns, formats.copy, begin, end);
    default:
      return rows_of<Format::kFloat32>(piece, columns, formats.copy, begin, end);
  }
}

void adam_undo_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end) {
  const float* row = piece.undo;
  for (float* state : {piece.master, piece.exp_avg, piece.exp_avg_sq}) {
    std::copy(row + begin, row + end, state + begin);
    row += piece.numel;
  }
  if (formats.copy == Format::kFloat32) copy_of<Format::kFloat32>(piece, begin, end);
  if (formats.copy == Format::kBFloat16) copy_of<Format::kBFloat16>(piece, begin, end);
  if (formats.copy == Format::kFloat16) copy_of<Format::kFloat16>(piece, begin, end);
}

}  // namespace lightning_zero
