// One element of an Adam step, for host and device: the order of operations and the fused
// multiply-adds of torch's fused CPU optimizer, so that fp32 gradients give its very bits.
#pragma once

#include "shared.h"

namespace lightning_zero {

// Of one piece in one step; computed in double, rounded once.
struct AdamCoefficients {
  float grad_scale;        // negative to maximise
  float kept;              // of a weight, after decoupled decay; 1 without
  float penalty;           // of a weight, added to the gradient; 0 without
  float exp_avg_weight;    // of the new gradient; less one where that is at least a half
  float exp_avg_sq_kept;   // beta2
  float exp_avg_sq_weight; // 1 - beta2
  float step;              // lr over the bias correction of the average
  float bias_root;         // root of the bias correction of the squares
  float eps;
  bool is_average_near;    // the new average is nearer to the old one than to the gradient
};

inline AdamCoefficients adam_coefficients(double step, double lr, double beta1, double beta2,
                                          double eps, double weight_decay, bool is_decoupled,
                                          bool is_maximised, double grad_scale) {
  const double weight = 1.0 - beta1;
  const bool is_average_near = static_cast<float>(weight) < 0.5f;
  return {
      static_cast<float>(is_maximised ? -grad_scale : grad_scale),
      is_decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f,
      is_decoupled ? 0.0f : static_cast<float>(weight_decay),
      is_average_near ? static_cast<float>(weight) : static_cast<float>(weight) - 1.0f,
      static_cast<float>(beta2),
      static_cast<float>(1.0 - beta2),
      static_cast<float>(lr / (1.0 - std::pow(beta1, step))),
      static_cast<float>(std::sqrt(1.0 - std::pow(beta2, step))),
      static_cast<float>(eps),
      is_average_near,
  };
}

// `step` and `bias_root` stand for those of the coefficients, where columns have their own.
LZ_SHARED void adam_element(const AdamCoefficients& c, float step, float bias_root, float grad,
                            float& master, float& exp_avg, float& exp_avg_sq) {
  const float scaled = product(grad, c.grad_scale);
  const float kept = product(master, c.kept);
  // Without a penalty the gradient stays itself, also where a weight is infinite.
  const float gradient = c.penalty == 0.0f ? scaled : fused(kept, c.penalty, scaled);
  const float base = c.is_average_near ? exp_avg : gradient;
  exp_avg = fused(c.exp_avg_weight, sum(gradient, -exp_avg), base);
  exp_avg_sq = fused(product(c.exp_avg_sq_weight, gradient), gradient,
                     product(exp_avg_sq, c.exp_avg_sq_kept));
  const float denominator = sum(quotient(square_root(exp_avg_sq), bias_root), c.eps);
  master = sum(kept, -quotient(product(step, exp_avg), denominator));
}

LZ_SHARED void adam_element(const AdamCoefficients& c, float grad, float& master, float& exp_avg,
                            float& exp_avg_sq) {
  adam_element(c, c.step, c.bias_root, grad, master, exp_avg, exp_avg_sq);
}

}  // namespace lightning_zero
