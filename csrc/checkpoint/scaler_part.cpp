#include "scaler_part.h"

#include "encoding.h"

namespace ampfuse::checkpoint::detail {

Dict part_of(const GradScaler& scaler) {
  Dict part = new_dict();
  part.insert("class", "GradScaler");
  part.insert("state", scaler.state_dict());
  if (scaler.is_enabled()) {
    List records = new_list();
    for (const ScaleRecord& record : scaler.history()) {
      records.push_back(c10::ivalue::Tuple::create({record.scale, record.skipped, record.norm}));
    }
    part.insert("history", records);
  }
  return part;
}

void check_part(const GradScaler& scaler, const at::IValue& part, Mistakes& mistakes) {
  if (!check_class("GradScaler", part, mistakes)) return;
  if (scaler.is_enabled() && part.toGenericDict().at("state").toGenericDict().empty()) {
    mistakes.push_back("the checkpoint has the state of a disabled scaler");
  }
}

void load_part(GradScaler& scaler, const Dict& part) {
  scaler.load_state_dict(part.at("state").toGenericDict());
  if (!scaler.is_enabled() || !part.contains("history")) return;
  std::vector<ScaleRecord> records;
  for (const at::IValue& record : part.at("history").toListRef()) {
    const auto& values = record.toTupleRef().elements();
    records.push_back({to_double(values.at(0)), values.at(1).toBool(), to_double(values.at(2))});
  }
  scaler.load_history(records);
}

}  // namespace ampfuse::checkpoint::detail
