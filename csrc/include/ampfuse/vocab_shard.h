#pragma once

#include <cstdint>
#include <string>

namespace ampfuse {

/// The classes that this process has, of those that a group of processes shares out: whose logits
/// are hidden · weightᵀ of the weight's rows that are here.
struct VocabShard {
  /// Of processes: the name under which torch.distributed, or c10d::register_process_group, has it.
  std::string group;
  int64_t group_size;
  int64_t first_class;
  /// Of the whole group.
  int64_t num_classes;
};

}  // namespace ampfuse
