#include "server/warm_up.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/formats/dtype.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

constexpr char kTenant[] = " warm-up ";  // with blanks, so that no client can have this name
constexpr char kModel[] = "known-answer";
constexpr int kHeads = 2;
constexpr float kScale = 0.125f;

class Call final : public scheduler::StreamRequest {
 public:
  void Done(const absl::Status& status) override { done_.set_value(status); }
  absl::Status Run(scheduler::Engine* engine) {
    absl::Status status = engine->Submit(this);
    return status.ok() ? done_.get_future().get() : status;
  }

 private:
  std::promise<absl::Status> done_;
};

struct Known {
  int32_t lora = 0, rope = 0;
  std::vector<kernels::Bf16> kv, q, o;
  std::vector<float> lse = std::vector<float>(kHeads);

  explicit Known(const scheduler::Limits& limits) {
    rope = std::min(64, limits.max_row_dim / 9);
    lora = std::min(512, limits.max_row_dim - rope);
    kv.resize(static_cast<size_t>(lora + rope));
    q.resize(kv.size() * kHeads);
    o.resize(static_cast<size_t>(lora) * kHeads);
    for (size_t i = 0; i < kv.size(); ++i) {
      kv[i] = kernels::ToBf16(static_cast<float>(i % 17) / 16 - 0.5f);
    }
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = kernels::ToBf16(static_cast<float>(i % 13) / 16 - 0.375f);
    }
  }

  absl::Status Check() const {
    const size_t latent = static_cast<size_t>(lora);
    for (int head = 0; head < kHeads; ++head) {
      double dot = 0;
      for (size_t i = 0; i < kv.size(); ++i) {
        dot += double{kernels::ToFloat(q[static_cast<size_t>(head) * kv.size() + i])} *
               double{kernels::ToFloat(kv[i])};
      }
      const double expected = dot * kScale;
      if (!(std::abs(double{lse[static_cast<size_t>(head)]} - expected) < 1e-3)) {
        return absl::InternalError(absl::StrCat("known-answer test: LSE of head ", head, " is ",
                                                lse[static_cast<size_t>(head)], ", must be ",
                                                expected));
      }
      if (!std::equal(kv.begin(), kv.begin() + lora, o.begin() + static_cast<int>(latent) * head)) {
        return absl::InternalError(
            absl::StrCat("known-answer test: output of head ", head, " is not the value row"));
      }
    }
    return absl::OkStatus();
  }
};

absl::Status RunStep(scheduler::Engine* engine, scheduler::StreamId stream,
                     const scheduler::SequenceInfo& sequence, Known* known) {
  Call begin, attend, end;
  begin.kind = RequestKind::kBeginStep;
  attend.kind = RequestKind::kAttend;
  end.kind = RequestKind::kEndStep;
  for (Call* call : {&begin, &attend, &end}) {
    call->stream = stream;
    call->step_id = 1;
  }
  begin.begin.model_id = kModel;
  begin.begin.sequences = {{sequence.id, sequence.epoch, 0, 1}};
  MLA_RETURN_IF_ERROR(begin.Run(engine));
  attend.attend.row_count = 1;
  attend.attend.num_heads = kHeads;
  attend.attend.has_kv = true;
  attend.attend.want_lse = true;
  attend.attend.kv = reinterpret_cast<const std::byte*>(known->kv.data());
  attend.attend.q = reinterpret_cast<const std::byte*>(known->q.data());
  attend.attend.o = reinterpret_cast<std::byte*>(known->o.data());
  attend.attend.lse = known->lse.data();
  MLA_RETURN_IF_ERROR(attend.Run(engine));
  return end.Run(engine);
}

}  // namespace

absl::Status WarmUp(scheduler::Engine* engine) {
  if (engine->limits().max_row_dim < 2 || engine->limits().max_heads < kHeads) {
    return absl::OkStatus();  // the limits are too small for the test's model
  }
  Known known(engine->limits());
  scheduler::ModelSpec model;
  model.id = kModel;
  model.geometry.num_heads = kHeads;
  model.geometry.kv_lora_rank = known.lora;
  model.geometry.rope_dim = known.rope;
  model.layers = 1;
  model.softmax_scale = kScale;
  MLA_RETURN_IF_ERROR(engine->RegisterModel(kTenant, model).status());
  const scheduler::StreamId stream = engine->OpenStream(kTenant);
  scheduler::OpenArgs open;
  open.tenant = kTenant;
  open.model_id = kModel;
  const auto sequence = engine->OpenSequence(open);
  absl::Status status = sequence.status();
  if (status.ok()) {
    status = RunStep(engine, stream, *sequence, &known);
    std::vector<scheduler::SequenceId> missing;
    engine->ReleaseSequences(kTenant, {&sequence->id, 1}, &missing);
  }
  engine->CloseStream(stream);
  if (status.ok()) status = known.Check();
  const absl::Status removed = engine->UnregisterModel(kTenant, kModel);
  return status.ok() ? removed : status;
}

}  // namespace mla::server
