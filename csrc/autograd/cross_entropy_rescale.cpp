#include "cross_entropy_rescale.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/graph_task.h>

#include "../ops/cross_entropy.h"
#include "once_differentiable.h"

namespace ampfuse {

at::Tensor rescaled(const at::Tensor& saved, const at::Tensor& baked_scale,
                    const at::Tensor& grad_output) {
  if (!saved.defined() || saved.sym_numel() == 0) return saved;
  // Do not overwrite the saved gradient if it serves several upstream gradients (vmap), nor in a
  // compiled backward, which would copy it first.
  if (is_batched(grad_output) || is_traced_or_subclass(grad_output)) {
    const at::Tensor ratio = grad_output.to(at::kDouble) / baked_scale;
    return (saved.to(loss_dtype(saved)) * ratio).to(saved.scalar_type());
  }
  const bool is_vector = saved.dim() == 1;
  const at::Tensor rows = is_vector ? saved.unsqueeze(0) : saved;
  // Copy it if another backward needs it, or if a saved-tensor hook returned it with other strides.
  const bool is_kept =
      torch::autograd::get_current_graph_task_keep_graph() || !can_be_overwritten(rows);
  const at::Tensor grad = is_kept ? rows.clone(at::MemoryFormat::Contiguous) : rows.detach();
  cross_entropy_rescale_(grad, baked_scale, grad_output);
  return is_vector ? grad.squeeze(0) : grad;
}

}  // namespace ampfuse
