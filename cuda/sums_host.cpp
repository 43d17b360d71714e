// Sums of squares on the host.
#include "sums.h"

#include <algorithm>

#include "formats.h"

namespace lightning_zero {
namespace {

constexpr std::int64_t kLanes = 16;  // of the sum, not of the processor: it is the same everywhere

template <Format kFormat>
double squares_of(const Stored<kFormat>* __restrict values, std::int64_t numel) {
  double lanes[kLanes] = {};
  const std::int64_t whole = numel / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += square(widened<kFormat>(values[i + lane]));
    }
  }
  for (std::int64_t i = whole; i < numel; ++i) {
    lanes[i - whole] += square(widened<kFormat>(values[i]));
  }
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
}

template <Format kFormat>
void columns_of(const Matrix& matrix, std::int64_t part, std::int64_t begin, std::int64_t end,
                double* __restrict sums) {
  const std::int64_t last = std::min(matrix.rows, (part + 1) * kPartRows);
  for (std::int64_t row = part * kPartRows; row < last; ++row) {
    const auto* __restrict const values =
        static_cast<const Stored<kFormat>*>(matrix.values) + row * matrix.columns;
    for (std::int64_t i = begin; i < end; ++i) sums[i] += square(widened<kFormat>(values[i]));
  }
}

}  // namespace

double sum_of_squares_host(const void* values, Format format, std::int64_t begin,
                           std::int64_t end) {
  const auto* const stored = static_cast<const std::uint16_t*>(values) + begin;
  if (format == Format::kBFloat16) return squares_of<Format::kBFloat16>(stored, end - begin);
  if (format == Format::kFloat16) return squares_of<Format::kFloat16>(stored, end - begin);
  return squares_of<Format::kFloat32>(static_cast<const float*>(values) + begin, end - begin);
}

void column_squares_host(const Matrix& matrix, std::int64_t part, std::int64_t begin,
                         std::int64_t end, double* sums) {
  if (matrix.format == Format::kFloat32) {
    columns_of<Format::kFloat32>(matrix, part, begin, end, sums);
  } else if (matrix.format == Format::kBFloat16) {
    columns_of<Format::kBFloat16>(matrix, part, begin, end, sums);
  } else {
    columns_of<Format::kFloat16>(matrix, part, begin, end, sums);
  }
}

namespace {

constexpr std::int64_t kAheadWords = 1024;  // 8 KiB: the processor itself does not look beyond a page

// A function of its own, so that the compiler believes that the two do not overlap.
__attribute__((noinline)) void add_words(const std::uint64_t* __restrict words,
                                         std::uint64_t* __restrict sums, std::int64_t numel) {
  constexpr std::int64_t kLine = 8;
  const std::int64_t whole = numel / kLine * kLine;
  for (std::int64_t at = 0; at < whole; at += kLine) {
    __builtin_prefetch(words + at + kAheadWords, 0, 3);
    for (std::int64_t i = at; i < at + kLine; ++i) sums[i] += words[i];
  }
  for (std::int64_t i = whole; i < numel; ++i) sums[i] += words[i];
}

}  // namespace

void column_words_host(const std::int64_t* words, std::int64_t columns, std::int64_t begin,
                       std::int64_t end, std::uint64_t* sums) {
  while (begin < end) {
    const std::int64_t column = begin % columns;
    const std::int64_t numel = std::min(end - begin, columns - column);
    add_words(reinterpret_cast<const std::uint64_t*>(words) + begin, sums + column, numel);
    begin += numel;
  }
}

}  // namespace lightning_zero
