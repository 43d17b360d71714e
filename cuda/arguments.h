// Tensors of the ops beside Adam's as what kernels take, checked: for the bindings of host and
// device.
#pragma once

#include "columns.h"
#include "pieces.h"
#include "quantize.h"
#include "sums.h"

namespace lightning_zero {

inline void* contiguous_address(const at::Tensor& tensor, std::int64_t numel,
                                const at::Device& device) {
  TORCH_CHECK(tensor.is_contiguous(), "this tensor must be contiguous");
  return address_of(tensor, numel, device);
}

inline QuantizedBlocks blocks_of_tensors(const at::Tensor& values, const at::Tensor& packed,
                                         const at::Tensor& scales, std::int64_t bits,
                                         std::int64_t block_numel) {
  TORCH_CHECK(bits == 8 || bits == 4, "integers have 8 or 4 bits, not ", bits);
  TORCH_CHECK(block_numel > 0 && block_numel % 2 == 0, "blocks have an even numel, not ",
              block_numel);
  const at::ScalarType packed_type = bits == 8 ? at::kChar : at::kByte;
  TORCH_CHECK(packed.scalar_type() == packed_type && scales.scalar_type() == at::kFloat,
              "8 bits are packed as int8, 4 bits as uint8, scales are fp32");
  const std::int64_t numel = values.numel();
  const at::Device device = values.device();
  void* const integers = contiguous_address(packed, bits == 8 ? numel : (numel + 1) / 2, device);
  return {address_of(values, numel, device),
          format_of(values),
          static_cast<std::uint8_t*>(integers),
          static_cast<float*>(contiguous_address(scales, blocks_of(numel, block_numel), device)),
          numel,
          block_numel,
          static_cast<int>(bits)};
}

inline Matrix matrix_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.dim() == 2, "a matrix has 2 axes, not ", tensor.dim());
  return {contiguous_address(tensor, tensor.numel(), tensor.device()), format_of(tensor),
          tensor.size(0), tensor.size(1)};
}

inline ColumnSelection selection_of(const at::Tensor& tensor, const at::Tensor& indices,
                                    const at::Tensor& packed) {
  const Matrix matrix = matrix_of(tensor);
  const std::int64_t count = indices.numel();
  TORCH_CHECK(indices.scalar_type() == at::kLong, "indices of columns are int64");
  TORCH_CHECK(packed.scalar_type() == tensor.scalar_type(), "packed columns have another dtype");
  return {matrix.values,
          contiguous_address(packed, matrix.rows * count, tensor.device()),
          static_cast<const std::int64_t*>(contiguous_address(indices, count, tensor.device())),
          matrix.rows,
          matrix.columns,
          count,
          static_cast<int>(tensor.element_size())};
}

inline double* total_of(const at::Tensor& total, const at::Device& device) {
  TORCH_CHECK(total.scalar_type() == at::kDouble, "a sum of squares is fp64");
  return static_cast<double*>(contiguous_address(total, 1, device));
}

// Coefficients of the columns of a piece, checked.
inline AdamColumns columns_of(const at::Tensor& steps, const at::Tensor& bias_roots,
                              std::int64_t first, const at::Device& device) {
  const std::int64_t columns = steps.numel();
  TORCH_CHECK(columns > 0 && first >= 0 && first < columns, "there is no column ", first, " of ",
              columns);
  return {floats_of(steps, columns, device), floats_of(bias_roots, columns, device), columns,
          first};
}

}  // namespace lightning_zero
