// Norms that one pass over gradients has told already, for whoever asks for them next.
#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Remembers that this is the 2-norm of the tensors as they are now. They are not kept alive.
AMPFUSE_API void remember_norm(c10::ArrayRef<c10::TensorImpl*> tensors, const at::Tensor& norm);
void remember_norm(at::TensorList tensors, const at::Tensor& norm);

/// Their norm, if it is known and none has been written since: by its version counter, which
/// writing through `data` and by collectives of torch.distributed does not move.
///
/// A graph that is being captured does not take it from before: at replays it would be old.
AMPFUSE_API std::optional<at::Tensor> recall_norm(c10::ArrayRef<c10::TensorImpl*> tensors);
std::optional<at::Tensor> recall_norm(at::TensorList tensors);

}  // namespace ampfuse
