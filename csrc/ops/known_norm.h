// Norms that one pass over gradients has told already, for whoever asks for them next.
#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Remembers that this is the 2-norm of the tensors as they are now, in double. They are not kept
/// alive.
AMPFUSE_API void remember_norm(c10::ArrayRef<c10::TensorImpl*> tensors, const at::Tensor& norm);
void remember_norm(at::TensorList tensors, const at::Tensor& norm);

/// Their norm, in any order, if it is known and none has been written since or given other memory:
/// of the dtype that multi_tensor_norm gives it, and then a fresh tensor, or `as_double`, to be
/// read alone. Writing is seen by version counters, which some writes do not move: through data(),
/// by collectives of torch.distributed, by torch's own fused optimizers.
///
/// A graph that is being captured does not take it from before: at replays it would be old.
AMPFUSE_API std::optional<at::Tensor> recall_norm(c10::ArrayRef<c10::TensorImpl*> tensors,
                                                  bool as_double);
std::optional<at::Tensor> recall_norm(at::TensorList tensors, bool as_double);

/// After whatever may have written gradients unseen. Also those that other threads remember.
AMPFUSE_API void forget_norms();

}  // namespace ampfuse
