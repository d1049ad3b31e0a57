#include "scaler_history.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "../tensors/capture.h"

namespace ampfuse::amp {

namespace {

constexpr size_t kRemembered = 16;  // number of steps that offenders() searches

// Sets all elements. Unlike a copy from host memory, this lets the host go on.
template <typename Numbers>
void fill(const at::Tensor& tensor, const Numbers& numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) tensor[static_cast<int64_t>(i)].fill_(numbers[i]);
}

}  // namespace

const at::Tensor& ScalerHistory::counters(at::Device device) {
  if (!counters_.defined()) {
    counters_ = at::empty({math::kScaleCounters}, at::TensorOptions(device).dtype(at::kLong));
    fill(counters_, first_counts_);
    if (length_ > 0) history_ = with_first_records().to(device);
  }
  return counters_;
}

ScalerHistory::Counts ScalerHistory::counts() const {
  if (!counters_.defined()) return first_counts_;
  const at::Tensor on_host = counters_.cpu();
  Counts counts;
  std::copy_n(on_host.const_data_ptr<int64_t>(), counts.size(), counts.begin());
  return counts;
}

void ScalerHistory::set_counts(const Counts& counts) {
  first_counts_ = counts;
  counters_copy_ = HostCopy();
  consecutive_skips_ = counts[math::kConsecutiveSkips];
  recorded_from_ = counts[math::kUpdates];
  first_records_.clear();
  if (counters_.defined()) fill(counters_, counts);
}

const at::Tensor& ScalerHistory::norms(at::Device device) {
  if (!norms_.defined()) {
    norms_ = at::empty({math::kNormStatistics}, at::TensorOptions(device).dtype(at::kDouble));
    fill(norms_, first_norms_);
  }
  return norms_;
}

ScalerHistory::Norms ScalerHistory::norm_statistics() const {
  if (!norms_.defined()) return first_norms_;
  const at::Tensor on_host = norms_.cpu();
  Norms norms;
  std::copy_n(on_host.const_data_ptr<double>(), norms.size(), norms.begin());
  return norms;
}

void ScalerHistory::set_norm_statistics(const Norms& norms) {
  first_norms_ = norms;
  if (norms_.defined()) fill(norms_, norms);
}

void ScalerHistory::note_step(const at::Tensor& found_inf, const Inspection& inspection) {
  found_inf_ = found_inf;
  is_replayed_ = found_inf.is_cuda() && is_capturing();
  if (found_inf_copy_ && !is_replayed_) found_inf_copy_->send(found_inf);
  steps_.push_back({found_inf, inspection});
  if (steps_.size() > kRemembered) steps_.pop_front();
}

at::Tensor ScalerHistory::step_skipped() const {
  return found_inf_.defined() ? at::ne(found_inf_, 0) : at::scalar_tensor(false, at::kBool);
}

bool ScalerHistory::was_skipped() {
  if (!found_inf_.defined()) return false;
  // A graph may have replayed the step since, with another result.
  if (is_replayed_) return found_inf_.item<float>() != 0;
  if (!found_inf_copy_) found_inf_copy_.emplace().send(found_inf_);
  return found_inf_copy_->wait().item<float>() != 0;
}

int64_t ScalerHistory::consecutive_skips() {
  if (!counters_.defined() || !counters_.is_cuda()) return counts()[math::kConsecutiveSkips];
  const auto arrived = counters_copy_.latest();
  if (arrived) consecutive_skips_ = arrived->const_data_ptr<int64_t>()[math::kConsecutiveSkips];
  // A new copy is started only when the last one has arrived. If each call replaced it, the host
  // might never receive one.
  if (arrived || counters_copy_.is_unsent()) counters_copy_.send(counters_);
  return consecutive_skips_;
}

std::vector<ScaleRecord> ScalerHistory::records() const {
  if (!history_) return first_records_;
  const at::Tensor copied =
      at::cat({history_->flatten().to(at::kDouble), counters_.to(at::kDouble)}).cpu();
  const double* const numbers = copied.const_data_ptr<double>();
  const auto updates = static_cast<int64_t>(numbers[copied.numel() - 1]);
  std::vector<ScaleRecord> records;
  for (int64_t i = std::max(recorded_from_, updates - length_); i < updates; ++i) {
    const double* const record = numbers + i % length_ * math::kScaleRecord;
    records.push_back({record[0], record[1] != 0, record[2]});
  }
  return records;
}

void ScalerHistory::put_records(std::vector<ScaleRecord> records) {
  first_counts_ = counts();
  const int64_t most = std::min(length_, first_counts_[math::kUpdates]);
  const int64_t extra = static_cast<int64_t>(records.size()) - most;
  if (extra > 0) records.erase(records.begin(), records.begin() + extra);
  first_records_ = std::move(records);
  recorded_from_ = first_counts_[math::kUpdates] - static_cast<int64_t>(first_records_.size());
  if (history_) history_->copy_(with_first_records());
}

at::Tensor ScalerHistory::with_first_records() const {
  const at::Tensor rows = at::zeros({length_, math::kScaleRecord}, at::kFloat);
  int64_t update = recorded_from_;
  for (const auto& [scale, skipped, norm] : first_records_) {
    float* const row = rows.mutable_data_ptr<float>() + update++ % length_ * math::kScaleRecord;
    row[0] = static_cast<float>(scale);
    row[1] = skipped;
    row[2] = static_cast<float>(norm);
  }
  return rows;
}

std::vector<at::Tensor> ScalerHistory::offenders() const {
  const auto skipped = std::find_if(steps_.rbegin(), steps_.rend(), [](const Step& step) {
    return step.found_inf.item<float>() != 0;
  });
  std::vector<at::Tensor> offenders;
  if (skipped == steps_.rend()) return offenders;
  size_t index = 0;
  for (const at::Tensor& of_device : skipped->inspection.norms) {
    const at::Tensor norms = of_device.to(at::kCPU, at::kDouble);
    for (int64_t i = 0; i < norms.numel(); ++i, ++index) {
      if (std::isfinite(norms.const_data_ptr<double>()[i])) continue;
      auto param = skipped->inspection.params[index].lock();
      if (param) offenders.emplace_back(std::move(param));
    }
  }
  return offenders;
}

}  // namespace ampfuse::amp
