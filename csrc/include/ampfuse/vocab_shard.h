#pragma once

#include <cstdint>
#include <string>

namespace ampfuse {

/// The classes that this rank holds if a group of ranks divides the vocabulary. Row i of its weight
/// is class first_class + i.
struct VocabShard {
  /// Name of the process group in torch.distributed, or in c10d::register_process_group.
  std::string group;
  int64_t group_size;   ///< number of ranks in the group
  int64_t first_class;  ///< the class of the first row of this rank's weight
  int64_t num_classes;  ///< number of classes of all ranks together
};

}  // namespace ampfuse
