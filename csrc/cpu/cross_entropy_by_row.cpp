// Threads share the rows. If there are fewer rows than threads, the threads share the blocks of one
// row at a time. In both cases the partial sums of a row are joined in the order of its blocks, so
// that the result does not depend on the number of threads.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <cmath>

#include "cross_entropy_passes.h"

namespace ampfuse {

namespace {

using RowPartial = math::RowPartial<double>;

// Calls visit(block) for each block, on several threads or on this one.
template <typename Visit>
void each_block(int64_t blocks, bool in_parallel, const Visit& visit) {
  const auto visit_range = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) visit(block);
  };
  in_parallel ? at::parallel_for(0, blocks, 1, visit_range) : visit_range(0, blocks);
}

// Calls visit(row, in_parallel, memory) for each row, with `scratch` bytes of memory. `in_parallel`
// is true if several threads share the blocks of the row. It is false if `is_narrowed`:
// the narrower gradient of a block overwrites logits of earlier blocks, so blocks must be processed
// in order.
template <typename Visit>
void each_row(const CpuRows& rows, bool is_narrowed, int64_t scratch, const Visit& visit) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  if (rows.count() < at::get_num_threads() && rows.blocks() > 1 && !is_narrowed) {
    const c10::DataPtr memory = allocator->allocate(scratch);
    for (int64_t row = 0; row < rows.count(); ++row) visit(row, true, memory.get());
    return;
  }
  at::parallel_for(0, rows.count(), worth_a_thread(rows.classes()),
                   [&](int64_t begin, int64_t end) {
                     const c10::DataPtr memory = allocator->allocate(scratch);
                     for (int64_t row = begin; row < end; ++row) visit(row, false, memory.get());
                   });
}

// Returns the class of the row's largest logit, the first one if several are equal. A NaN is larger
// than all numbers, as in torch.
int64_t argmax_of(const CpuRows& rows, int64_t row) {
  const auto argmax_of_block = AMPFUSE_CHOOSE(row_argmax);
  int64_t argmax = 0;
  for (int64_t block = 0; block < rows.blocks(); ++block) {
    const int64_t candidate = block * kClassBlock + argmax_of_block(rows.logits(row, block));
    const double x = rows.logit(row, candidate);
    const double best = rows.logit(row, argmax);
    if (x > best || (std::isnan(x) && !std::isnan(best))) argmax = candidate;
  }
  return argmax;
}

void put_loss(const ForwardResults& results, int64_t row, double loss) {
  if (results.is_per_row) {
    results.row_losses.put(row, loss);
  } else {
    results.losses[row] = loss;
  }
}

// Memory for one row: the RowPartials of its blocks, then its exponentials.
class RowScratch {
 public:
  RowScratch(const CpuRows& rows, void* memory)
      : rows_(rows),
        partials_(static_cast<RowPartial*>(memory)),
        exponentials_(static_cast<char*>(memory) + rows.partials_bytes()) {}

  static int64_t bytes(const CpuRows& rows) {
    return rows.partials_bytes() + rows.exponentials_bytes(rows.blocks());
  }

  RowPartial& partial(int64_t block) const { return partials_[block]; }
  void* exponentials(int64_t block) const {
    return exponentials_ + rows_.exponentials_bytes(block);
  }

 private:
  const CpuRows& rows_;
  RowPartial* partials_;
  char* exponentials_;
};

// Returns the RowPartial of the whole row. Leaves those of its blocks, and their exponentials, in
// `scratch`.
RowPartial partial_of_row(const CpuRows& rows, int64_t row, bool in_parallel, bool with_metrics,
                          const RowScratch& scratch) {
  const auto partial = AMPFUSE_CHOOSE(row_partial);
  each_block(rows.blocks(), in_parallel, [&](int64_t block) {
    scratch.partial(block) = partial(rows.logits(row, block), rows.masses(row, block), with_metrics,
                                     scratch.exponentials(block));
  });
  RowPartial whole;
  for (int64_t block = 0; block < rows.blocks(); ++block) {
    whole = math::join(whole, scratch.partial(block));
  }
  return whole;
}

void forward_row(const CpuRows& rows, const ForwardResults& results, double scale, int64_t row,
                 bool in_parallel, const RowScratch& scratch) {
  const bool is_ignored = rows.is_ignored(row);
  if (is_ignored) {
    put_loss(results, row, 0);
    if (results.statistics != nullptr) results.statistics[row] = {};
  }
  // Call this after the metrics are computed: the zeros may overwrite the logits.
  const auto put_zeros = [&] {
    if (results.grad.is_wanted()) results.grad.zero(row);
  };
  if (is_ignored && !results.with_metrics) return put_zeros();
  const RowPartial whole = partial_of_row(rows, row, in_parallel, results.with_metrics, scratch);
  const math::RowTarget<double> target = rows.row_target(row);
  const math::RowLoss<double> loss = math::row_loss(whole, target, rows.terms());
  if (results.with_metrics) {
    results.lse.put(row, loss.lse);
    results.entropy.put(row, loss.entropy);
    results.argmax[row] = argmax_of(rows, row);
  }
  if (is_ignored) return put_zeros();
  put_loss(results, row, loss.loss);
  if (results.statistics != nullptr) results.statistics[row] = loss.statistics;
  if (!results.grad.is_wanted()) return;
  const math::RowGradient<double> of_row =
      math::row_gradient(loss.statistics, whole.reference, target.mass, rows.terms(), scale);
  const auto gradient = AMPFUSE_CHOOSE(row_gradient);
  each_block(rows.blocks(), in_parallel, [&](int64_t block) {
    // Exponentials are relative to their block's reference. They are 0 if all logits are -infinity.
    const RowPartial& partial = scratch.partial(block);
    const bool is_all_minus_infinity = partial.largest == math::minus_infinity<double>();
    const double below = is_all_minus_infinity ? 0 : whole.reference - partial.reference;
    math::RowGradient<double> of_block = of_row;
    if (below != 0) of_block.of_exponential *= std::exp(-below);
    gradient(rows.logits(row, block), rows.masses(row, block), scratch.exponentials(block),
             of_block, results.grad.at(row, block * kClassBlock), results.grad.dtype());
  });
}

}  // namespace

void forward_by_row(const CpuRows& rows, double scale, const ForwardResults& results) {
  each_row(rows, rows.are_narrowed_by(results.grad), RowScratch::bytes(rows),
           [&](int64_t row, bool in_parallel, void* memory) {
             forward_row(rows, results, scale, row, in_parallel, RowScratch(rows, memory));
           });
}

void shard_by_row(const CpuRows& rows, const ShardResults& results) {
  const bool with_metrics = results.argmax != nullptr;
  constexpr bool kIsNarrowed = false;  // the logits are not overwritten
  each_row(rows, kIsNarrowed, RowScratch::bytes(rows),
           [&](int64_t row, bool in_parallel, void* memory) {
             if (rows.is_ignored(row) && !with_metrics) return;
             const RowPartial partial =
                 partial_of_row(rows, row, in_parallel, with_metrics, {rows, memory});
             results.partials[row] =
                 math::shard_partial(partial, rows.row_target(row), rows.classes(), with_metrics);
             if (with_metrics) results.argmax[row] = argmax_of(rows, row);
           });
}

void backward_by_row(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad) {
  const auto exponentials = AMPFUSE_CHOOSE(row_exponentials);
  const auto gradient = AMPFUSE_CHOOSE(row_gradient);
  each_row(rows, rows.are_narrowed_by(grad), rows.exponentials_bytes(rows.blocks()),
           [&](int64_t row, bool in_parallel, void* scratch) {
             if (rows.is_ignored(row)) {
               grad.zero(row);
               return;
             }
             const math::RowStatistics known = rows.statistics(inputs.statistics, row);
             const math::RowGradient<double> of_row = math::row_gradient(
                 known, rows.reference(known.largest), rows.target_mass(rows.target(row)),
                 rows.terms(), inputs.scale(row));
             each_block(rows.blocks(), in_parallel, [&](int64_t block) {
               const Logits logits = rows.logits(row, block);
               void* const e =
                   static_cast<char*>(scratch) + rows.exponentials_bytes(in_parallel ? block : 0);
               exponentials(logits, known.largest, e);
               gradient(logits, rows.masses(row, block), e, of_row,
                        grad.at(row, block * kClassBlock), grad.dtype());
             });
           });
}

}  // namespace ampfuse
