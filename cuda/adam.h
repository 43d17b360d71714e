// What launch code hands to the Adam kernels of host and device.
#pragma once

#include "adam_math.h"

namespace lightning_zero {

// One piece: addresses of equally ordered, dense memory.
struct AdamPiece {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* copy;   // takes the new master values, if there is a format of copies
  float* undo;  // [3, numel], takes old master, average and average of squares; null for none
  std::int64_t numel;
  AdamCoefficients coefficients;
};

// Columns that have taken different numbers of steps: of each, what depends on that number.
struct AdamColumns {
  const float* steps;       // as AdamCoefficients::step
  const float* bias_roots;  // as AdamCoefficients::bias_root
  std::int64_t columns;
  std::int64_t first;  // column of the first element of the piece
};

// Of all pieces of a call; `copy` may be none.
struct AdamFormats {
  Format grad;
  Format copy;
};

// Elements [begin, end) of a piece, by the calling thread.
void adam_step_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end);

// The same, by columns.
void adam_columns_host(const AdamPiece& piece, const AdamColumns& columns, AdamFormats formats,
                       std::int64_t begin, std::int64_t end);

// Puts back what `undo` holds, and `copy` after it.
void adam_undo_host(const AdamPiece& piece, AdamFormats formats, std::int64_t begin,
                    std::int64_t end);

// All of a piece, on a CUDA stream.
void adam_step_device(const AdamPiece& piece, AdamFormats formats, void* stream);
void adam_columns_device(const AdamPiece& piece, const AdamColumns& columns, AdamFormats formats,
                         void* stream);
void adam_undo_device(const AdamPiece& piece, AdamFormats formats, void* stream);

}  // namespace lightning_zero
