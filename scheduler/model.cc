#include "scheduler/model.h"

namespace mla::scheduler {

int32_t ModelSpec::q_dim(Profile profile) const {
  switch (profile) {
    case Profile::kAbsorbed:
      return geometry.absorbed_q_dim();
    case Profile::kExpanded:
      return geometry.expanded_q_dim();
    case Profile::kAppendOnly:
      return 0;
  }
  return 0;
}

int32_t ModelSpec::o_dim(Profile profile) const {
  switch (profile) {
    case Profile::kAbsorbed:
      return windowed() ? geometry.kv_row_dim() : geometry.kv_lora_rank;
    case Profile::kExpanded:
      return geometry.v_dim;
    case Profile::kAppendOnly:
      return 0;
  }
  return 0;
}

}  // namespace mla::scheduler
